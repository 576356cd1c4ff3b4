"""Moves of a registered model's aliases that survive a kill, and those that somebody else has made.

MLflow's aliases are plain upserts without a history. A move here is written down before it is made (`moving.json`),
made, verified, appended to the promotion log, and then forgotten; whoever comes next finishes what a kill cut short,
under the same name, so it is in the log once. What MLflow says besides the log was moved by hand: it is logged as such.
Everything here is done under the registry's lock.

Homes that share a store share the log, but each may have an MLflow of its own, with versions and aliases of its own
under the same names. So each registry has a mark, and each entry the mark of where it was made. It stands in MLflow
itself: the same by whatever address MLflow is asked, and a new one in a database that is made anew.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from storage import journal
from storage.records import PromotionRow, new_promotion
from storage.sharing import send_promotion
from storage.tracking import RELEASES, experiment_of
from storage.whole_files import replace_file

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

GONE = "RESOURCE_DOES_NOT_EXIST"
MARK = "draftsmith.registry"  # a tag of the experiment RELEASES, and a fact of each move


def mark_of(home: Path, client: MlflowClient) -> str:
    """The mark of the registry behind this client; it is made on first use."""
    found = client.get_experiment_by_name(RELEASES)
    mark = found.tags.get(MARK) if found is not None else None
    if mark is None:
        experiment = experiment_of(home, client, RELEASES)
        client.set_experiment_tag(experiment, MARK, uuid.uuid4().hex)
        mark = client.get_experiment(experiment).tags[MARK]  # somebody else may have set it meanwhile
    return str(mark)


def made_in(mark: str, log: Iterable[PromotionRow]) -> list[PromotionRow]:
    """The moves made in the registry of this mark; those from before there were marks count as everybody's."""
    return [row for row in log if json.loads(row.numbers).get(MARK) in (None, mark)]


def move(home: Path, client: MlflowClient, row: PromotionRow) -> None:
    """Move an alias, see that it moved, log it. `previous` follows `champion`."""
    assert row.to_version is not None, "an alias is moved to a version"
    home.mkdir(parents=True, exist_ok=True)
    replace_file(_unfinished(home), journal.as_line(row), durable=True)
    _make(home, client, row)


def finish_interrupted(home: Path, client: MlflowClient) -> None:
    """Finish the move that a kill cut short, unless somebody has moved the alias or deleted the version since.

    A note of it that cannot be read is set aside: if the alias was moved, `outside_moves` says so next.
    """
    try:
        row = journal.from_line(_unfinished(home).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (ValueError, TypeError, KeyError, AttributeError, IsADirectoryError):
        _unfinished(home).rename(_unfinished(home).with_suffix(f".broken-{time.time_ns()}"))
        return
    there = aliases_of(client, row.name).get(row.alias)
    if there in (row.from_version, row.to_version) and row.to_version in version_numbers(client, row.name):
        _make(home, client, row)
    else:
        _unfinished(home).unlink()


def outside_moves(home: Path, client: MlflowClient) -> list[PromotionRow]:
    """Log every alias that is not where the log of this registry's moves says; returns the new entries.

    What a damaged log has lost and the history still knows was moved by nobody else.
    """
    logged_all = journal.promotions(home)
    if not logged_all:
        return []
    mark = mark_of(home, client)
    found = _elsewhere(client, mark, made_in(mark, logged_all))
    if found and (lost := _lost(home, logged_all)):
        every = sorted([*logged_all, *lost], key=lambda row: row.promoted_at)
        found = _elsewhere(client, mark, made_in(mark, every))
    for row in found:
        log(home, row)
    return found


def _lost(home: Path, logged: Iterable[PromotionRow]) -> list[PromotionRow]:
    """The moves that the history knows and the log does not."""
    from storage.results import UNREADABLE, rows_of

    known = {row.promotion_id for row in logged}
    try:
        return [PromotionRow(**row) for row in rows_of(home, "promotion") if row["promotion_id"] not in known]
    except UNREADABLE:  # it can be made anew, from the log
        return []


def _elsewhere(client: MlflowClient, mark: str, rows: list[PromotionRow]) -> list[PromotionRow]:
    """An entry for each alias that is not where these moves say."""
    found = []
    for name in dict.fromkeys(row.name for row in rows):
        logged, there = replayed(row for row in rows if row.name == name), aliases_of(client, name)
        for alias in sorted(logged.keys() | there.keys()):
            before, after = logged.get(alias), there.get(alias)
            if before != after:
                tags = client.get_model_version(name, str(after)).tags if after is not None else {}
                why = "moved in MLflow, not by Draftsmith" if after is not None else "deleted in MLflow"
                found.append(
                    new_promotion(name, alias, "external", before, after, "not known", why, {**tags, MARK: mark})
                )
    return found


def replayed(rows: Iterable[PromotionRow]) -> dict[str, int]:
    """alias -> version of one model, as its log says."""
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


def moves_previous(row: PromotionRow) -> bool:
    """Whether `previous` is set to where `champion` was; a move made in MLflow, or back, leaves it alone."""
    is_ours = row.action not in ("external", "restore")
    return row.alias == "champion" and is_ours and row.from_version not in (None, row.to_version)


def aliases_of(client: MlflowClient, name: str) -> dict[str, int]:
    """alias -> version number of a registered model; nothing when there is no such model."""
    from mlflow.exceptions import MlflowException

    try:
        return {alias: int(number) for alias, number in client.get_registered_model(name).aliases.items()}
    except MlflowException as error:
        if error.error_code != GONE:
            raise
        return {}


def _make(home: Path, client: MlflowClient, row: PromotionRow) -> None:
    """Safe to repeat from any point: the log takes an entry once."""
    if moves_previous(row):
        client.set_registered_model_alias(row.name, "previous", str(row.from_version))
    client.set_registered_model_alias(row.name, row.alias, str(row.to_version))
    there = aliases_of(client, row.name).get(row.alias)
    assert there == row.to_version, f"{row.name}@{row.alias} was moved to version {there} by somebody else meanwhile"
    log(home, row)
    _unfinished(home).unlink()


def log(home: Path, row: PromotionRow) -> None:
    """Put an entry into the promotion log, the shared store and the history; each takes it once."""
    from storage.results import remember_promotion

    journal.log_promotion(home, row)
    send_promotion(row)
    remember_promotion(home, row)


def _unfinished(home: Path) -> Path:
    return home / "mlflow" / "moving.json"


def version_numbers(client: MlflowClient, name: str) -> set[int]:
    """The versions of a model; a name with a quote is none of ours."""
    if "'" in name:
        return set()
    return {int(found.version) for found in client.search_model_versions(f"name = '{name}'")}
