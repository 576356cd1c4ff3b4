"""Moves of a registered model's aliases that survive a kill, and those that somebody else has made.

MLflow's aliases are plain upserts without a history. A move here is noted in `moving.json`, made, verified, appended to
the promotion log, and the note is deleted; whoever comes next finishes a move that a kill cut short, under the same id,
so it is in the log once. An alias that is not where the log says was moved by hand, and is logged as such. Every
function here needs the registry's lock.

Homes that share a store share the log, but each may have an MLflow of its own, with versions and aliases of its own
under the same names. So each registry has a mark, and each entry the mark of where it was made. It is kept in
MLflow itself: the same at every address of that MLflow, and a new one in a database that is made anew.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

from components.files import write_whole
from storage import journal
from storage.artifacts.sync import send_promotion
from storage.history.files import rows_of
from storage.history.records import PromotionRow, new_promotion
from storage.history.write import UNREADABLE, record_promotion
from storage.home import MARK
from storage.registry.fact_tags import tags_of
from storage.registry.tracking import RELEASES, MlflowClient, ensure_experiment, mlflow_error

GONE = "RESOURCE_DOES_NOT_EXIST"
DELETE = "delete"  # the action of what storage/registry/removal.py logs


def mark_of(home: Path, client: MlflowClient) -> str:
    """The mark of the registry behind this client, which the first call makes."""
    experiment = client.get_experiment_by_name(RELEASES)
    mark = experiment.tags.get(MARK) if experiment is not None else None
    if mark is None:
        experiment_id = ensure_experiment(home, client, RELEASES)
        client.set_experiment_tag(experiment_id, MARK, uuid.uuid4().hex)
        mark = client.get_experiment(experiment_id).tags[MARK]  # somebody else may have set it meanwhile
    return str(mark)


def moves_in_registry(mark: str, log: Iterable[PromotionRow]) -> list[PromotionRow]:
    """The moves made in the registry of this mark; moves without a mark are older, and count for every registry."""
    return [row for row in log if json.loads(row.numbers).get(MARK) in (None, mark)]


def move_alias(home: Path, client: MlflowClient, row: PromotionRow) -> None:
    """Move an alias, verify the move and log it. `previous` moves to where `champion` was."""
    assert row.to_version is not None, "an alias is moved to a version"
    home.mkdir(parents=True, exist_ok=True)
    write_whole(_pending_move_file(home), journal.as_line(row), durable=True)
    _apply(home, client, row)


def finish_interrupted(home: Path, client: MlflowClient) -> None:
    """Finish the move that a kill cut short, unless the alias was moved or the version deleted since.

    A note that cannot be read is renamed: if the alias was moved, `log_external_moves` logs that next.
    """
    try:
        row = journal.from_line(_pending_move_file(home).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (ValueError, TypeError, KeyError, AttributeError, IsADirectoryError):
        _pending_move_file(home).rename(_pending_move_file(home).with_suffix(f".broken-{time.time_ns()}"))
        return
    alias_version = aliases_of(client, row.name).get(row.alias)
    if alias_version in (row.from_version, row.to_version) and row.to_version in version_numbers(client, row.name):
        _apply(home, client, row)
    else:
        _pending_move_file(home).unlink()


def log_external_moves(home: Path, client: MlflowClient) -> list[PromotionRow]:
    """Log every alias that is not where this registry's log has put it; returns the new entries.

    A move that a damaged log has lost and the history still has is none of these.
    """
    logged = journal.promotions(home)
    if not logged:
        return []
    mark = mark_of(home, client)
    moves = _external_moves(client, mark, moves_in_registry(mark, logged))
    if moves and (lost_moves := _moves_missing_from_log(home, logged)):
        all_moves = sorted([*logged, *lost_moves], key=lambda row: row.promoted_at)
        moves = _external_moves(client, mark, moves_in_registry(mark, all_moves))
    for row in moves:
        log_move(home, row)
    return moves


def _moves_missing_from_log(home: Path, logged: Iterable[PromotionRow]) -> list[PromotionRow]:
    """The moves that are in the history and not in the log."""
    logged_ids = {row.promotion_id for row in logged}
    try:
        return [PromotionRow(**row) for row in rows_of(home, "promotion") if row["promotion_id"] not in logged_ids]
    except UNREADABLE:  # it can be made anew, from the log
        return []


def _external_moves(client: MlflowClient, mark: str, rows: list[PromotionRow]) -> list[PromotionRow]:
    """An entry for each alias that is not where these moves say."""
    moves = []
    for name in dict.fromkeys(row.name for row in rows):
        expected, actual = aliases_after(row for row in rows if row.name == name), aliases_of(client, name)
        for alias in sorted(expected.keys() | actual.keys()):
            before, after = expected.get(alias), actual.get(alias)
            if before != after:
                facts = tags_of(client, name, after) if after is not None else {}
                reason = "moved in MLflow, not by Draftsmith" if after is not None else "deleted in MLflow"
                moves.append(
                    new_promotion(name, alias, "external", before, after, "not known", reason, {**facts, MARK: mark})
                )
    return moves


def aliases_after(rows: Iterable[PromotionRow]) -> dict[str, int]:
    """alias -> version of one model after these moves."""
    aliases: dict[str, int] = {}
    for row in rows:
        if not row.alias:  # newer evidence moves nothing
            continue
        if moves_previous(row):
            assert row.from_version is not None
            aliases["previous"] = row.from_version
        if row.to_version is None:
            aliases.pop(row.alias, None)
        else:
            aliases[row.alias] = row.to_version
    return aliases


def last_deletion(name: str, log: Iterable[PromotionRow]) -> PromotionRow | None:
    """The entry of the last deletion of a model as a whole."""
    return next((row for row in reversed([*log]) if (row.name, row.alias, row.action) == (name, "", DELETE)), None)


def moves_previous(row: PromotionRow) -> bool:
    """Whether a move sets `previous` to where `champion` was; others than our own moves do not."""
    is_ours = row.action not in ("external", "restore", DELETE)
    return row.alias == "champion" and is_ours and row.from_version not in (None, row.to_version)


def aliases_of(client: MlflowClient, name: str) -> dict[str, int]:
    """alias -> version number of a registered model; nothing when there is no such model."""
    try:
        return {alias: int(number) for alias, number in client.get_registered_model(name).aliases.items()}
    except mlflow_error() as error:
        if error.error_code != GONE:
            raise
        return {}


def _apply(home: Path, client: MlflowClient, row: PromotionRow) -> None:
    """Make and log a move. It can be repeated from any point: the log takes an entry once."""
    if moves_previous(row):
        client.set_registered_model_alias(row.name, "previous", str(row.from_version))
    client.set_registered_model_alias(row.name, row.alias, str(row.to_version))
    alias_version = aliases_of(client, row.name).get(row.alias)
    assert alias_version == row.to_version, (
        f"{row.name}@{row.alias} was moved to version {alias_version} by somebody else meanwhile"
    )
    log_move(home, row)
    _pending_move_file(home).unlink()


def log_move(home: Path, row: PromotionRow) -> None:
    """Put an entry into the promotion log, the shared store and the history; each takes it once."""
    journal.log_promotion(home, row)
    send_promotion(row)
    record_promotion(home, row)


def _pending_move_file(home: Path) -> Path:
    return home / "mlflow" / "moving.json"


def version_numbers(client: MlflowClient, name: str) -> set[int]:
    """The numbers of a model's versions; none for a name with a quote, which Draftsmith never gives."""
    if "'" in name:
        return set()
    return {int(version.version) for version in client.search_model_versions(f"name = '{name}'")}
