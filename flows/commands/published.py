"""Published tables (benchmarks/published/NAME.json), and measurements of the history held beside their rows.

A table has a source and conditions, which hold for all of its rows; a row may say otherwise. None: the publication does
not say. Beside a row stands a measurement of the same method: on the same target where there is one, the newest such;
of its arms the one whose workload, shape, depth, temperature and batch size are nearest. Acceptance length is taken by
the row's own convention, and what differs is said. A ratio is computed on the same target alone, by its name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from components.contract import UserError
from components.outside_json import read_object
from components.rows import ALL
from components.text import did_you_mean, one_line
from storage.history.query import RunQuery, open_history

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "published"
OWN_LOOP = "Draftsmith's own loop"
COLUMNS = (
    "target", "method", "workload", "depth", "tree", "temperature", "al_published", "al", "al_ratio",
    "speedup_published", "speedup", "tokens_per_s_published", "tokens_per_s", "drafter", "draft_key", "measured_at",
    "differs",
)  # fmt: skip
TABLE_COLUMNS = ("name", "rows", "targets", "methods", "work", "table", "url", "read")
# What makes one arm of a measurement: views have these columns in common.
_ARM = (
    "created_at", "artifact_key", "session_id", "target_key", "draft_key", "method", "depth_k", "tree_budget",
    "batch_size", "temperature", "dtype", "kernel", "num_threads", "workload",
)  # fmt: skip
_NEWEST = """
SELECT DISTINCT max(created_at) FROM newest('request')
WHERE NOT is_warmup AND status <> 'error' AND depth_k > 0 AND num_rounds > 0 AND list_contains($methods, method)
  AND ($draft IS NULL OR draft_key = $draft) GROUP BY method, target_key"""
_FACTS = {
    "v_acceptance": "al, al_macro, al_with_overshoot, accepted_per_round, accepted_per_round_macro",
    "v_speed": "engine, tokens_per_s, tokens_per_s_e2e",
    "v_speedup": "speedup, speedup_e2e",
}
_SEEN = """
SELECT {arm}, {facts} FROM {view}
WHERE created_at >= $since AND list_contains($times, created_at) AND list_contains($methods, method) AND depth_k > 0
  AND ($draft IS NULL OR draft_key = $draft)"""
_DEVICES = (
    "SELECT artifact_key, created_at, machine ->> 'device_name' FROM artifact WHERE list_contains($keys, artifact_key)"
)
_TARGETS = "SELECT target_key, model FROM v_target WHERE list_contains($keys, target_key)"


class Source(BaseModel):
    """Where a table was published. read: the day on which it was read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    work: str = Field(min_length=1)
    table: str = Field(min_length=1)
    url: str = Field(pattern=r"^https://\S+$")
    read: date


class PublishedRow(BaseModel):
    """One published row with its conditions; None: not stated, and of a tree a chain.

    averaged: acceptance length is pooled over rounds, or the mean over prompts. bonus, overshoot: whether it counts the
    target's own token of each round, and what was accepted past the end. timed: with prefill (e2e) or without (decode).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str = Field(min_length=1)
    drafter: str = Field(min_length=1)
    method: str = Field(min_length=1)
    workload: str = Field(min_length=1)
    depth: int | None = Field(ge=1, le=64)
    tree: str | None
    temperature: float | None = Field(ge=0)
    batch_size: int | None = Field(ge=1)
    engine: str | None
    hardware: str | None
    dtype: str | None
    averaged: Literal["pooled", "macro"] | None
    bonus: bool | None
    overshoot: bool | None
    timed: Literal["decode", "e2e"] | None
    al: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    speedup: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    tokens_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _says_something(self) -> PublishedRow:
        if self.al is None and self.speedup is None and self.tokens_per_s is None:
            raise ValueError("a row has al, speedup or tokens_per_s")
        if self.al is not None and self.bonus and not 1 <= self.al <= (self.depth or math.inf) + 1:
            raise ValueError("with its bonus tokens, an acceptance length lies between 1 and depth + 1")
        return self

    @property
    def al_column(self) -> str:
        """The column of v_acceptance that counts as this row does, as far as it says so."""
        if self.bonus is False:
            return "accepted_per_round_macro" if self.averaged == "macro" else "accepted_per_round"
        if self.averaged == "macro":
            return "al_macro"
        return "al_with_overshoot" if self.overshoot else "al"


@dataclass(frozen=True)
class PublishedTable:
    """One file of benchmarks/published/. note: what else is to be known of it, and what was left out."""

    name: str
    source: Source
    licence: str
    note: str
    rows: tuple[PublishedRow, ...]


@dataclass(frozen=True)
class Measured:
    """One arm of a measurement. lengths: acceptance lengths, speeds: tokens/s and speedup, by their column's name."""

    target: str
    method: str
    workload: str
    depth: int
    tree: str | None
    temperature: float
    batch_size: int
    engine: str
    hardware: str | None
    dtype: str
    draft_key: str
    measured_at: datetime
    lengths: dict[str, float | None]
    speeds: dict[str, float | None]


def list_tables(folder: Path = FOLDER) -> list[PublishedTable]:
    """Every published table, by name; raises UserError as read_table does."""
    return [read_table(file.stem, folder) for file in sorted(folder.glob("*.json"))]


def read_table(name: str, folder: Path = FOLDER) -> PublishedTable:
    """The published table of this name.

    Raises:
        UserError: there is none, or its file is not as it must be; says which row and field.
    """
    names = [file.stem for file in sorted(folder.glob("*.json"))]
    if name not in names:
        raise UserError(f"compare --published {name}: there is no such table{did_you_mean(name, names)}")
    file = folder / f"{name}.json"
    content = read_object(file)
    parts = {"source": dict, "licence": str, "note": str, "conditions": dict, "rows": list}
    if content.keys() != parts.keys():
        odd = sorted(content.keys() ^ parts.keys())
        raise UserError(f"{file}: {odd[0]}: expected {', '.join(parts)}, and no others")
    for part, kind in parts.items():
        if not isinstance(content[part], kind) or not content[part]:
            raise UserError(f"{file}: {part}: is not a {kind.__name__} with something in it")
    rows, place = [], "source"
    try:
        source = Source.model_validate(content["source"])
        for number, row in enumerate(content["rows"], 1):
            place = f"row {number}"
            if not isinstance(row, dict):
                raise UserError(f"{file}: {place}: is not an object of fields")
            rows.append(PublishedRow.model_validate(content["conditions"] | row))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, (place, *first["loc"])))
        raise UserError(f"{file}: {field}: {one_line(first['msg'])}") from error
    return PublishedTable(name, source, content["licence"], content["note"], tuple(rows))


def measured_arms(home: Path, methods: Sequence[str], draft_key: str | None = None) -> list[Measured]:
    """The arms of the newest measurement of each method on each target, newest first. draft_key: of one drafter."""
    with open_history(home) as ask:
        parameters: dict[str, Any] = {"methods": list(methods), "draft": draft_key}
        times = [at for (at,) in ask(_NEWEST, parameters)[1]]
        if not times:
            return []
        parameters |= {"times": times, "since": min(times)}
        facts: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
        for view, columns in _FACTS.items():
            names, rows = ask(_SEEN.format(arm=", ".join(_ARM), facts=columns, view=view), parameters)
            size = len(_ARM)
            facts[view] = {row[:size]: dict(zip(names[size:], row[size:], strict=True)) for row in rows}
        devices, targets = _named(ask, list(facts["v_acceptance"]))
    arms = []
    for key, lengths in facts["v_acceptance"].items():
        arm = dict(zip(_ARM, key, strict=True))
        speeds = facts["v_speed"].get(key, {}) | facts["v_speedup"].get(key, {})
        arms.append(
            Measured(
                target=targets.get(arm["target_key"]) or f"target {arm['target_key'][:12]}",
                method=arm["method"],
                workload=arm["workload"],
                depth=arm["depth_k"],
                tree=None if arm["tree_budget"] is None else f"{arm['tree_budget']} tokens",
                temperature=arm["temperature"],
                batch_size=arm["batch_size"],
                engine=speeds.pop("engine", None) or OWN_LOOP,
                hardware=devices.get((arm["artifact_key"], arm["created_at"])),
                dtype=arm["dtype"],
                draft_key=arm["draft_key"],
                measured_at=arm["created_at"],
                lengths=lengths,
                speeds=speeds,
            )
        )
    return sorted(arms, key=lambda arm: arm.measured_at, reverse=True)


def _named(ask: RunQuery, arms: list[tuple[Any, ...]]) -> tuple[dict[tuple[str, datetime], str], dict[str, str]]:
    """The device of each measurement and the name of each target; those that the history knows."""
    keys = {name: list({arm[_ARM.index(name)] for arm in arms}) for name in ("artifact_key", "target_key")}
    devices = {(key, at): device for key, at, device in ask(_DEVICES, {"keys": keys["artifact_key"]})[1]}
    return devices, dict(ask(_TARGETS, {"keys": keys["target_key"]})[1])


def hold_beside(table: PublishedTable, arms: Sequence[Measured]) -> list[list[Any]]:
    """A row of COLUMNS for each published row, with the arm that is nearest to it, if any has its method."""
    return [_row(row, _nearest(row, [arm for arm in arms if arm.method == row.method])) for row in table.rows]


def _nearest(row: PublishedRow, arms: Sequence[Measured]) -> Measured | None:
    """The newest measurement on the row's target, else on any; of its arms the one that differs least."""

    def distance(arm: Measured) -> tuple[Any, ...]:
        return (
            0 if _same(arm.workload, row.workload) else 1 if arm.workload == ALL else 2,
            (arm.tree is None) != (row.tree is None),
            abs(arm.depth - (row.depth or arm.depth)),
            abs(arm.temperature - (row.temperature or 0.0)),
            abs(arm.batch_size - (row.batch_size or 1)),
            arm.engine != OWN_LOOP,
        )

    matching = [arm for arm in arms if same_target(arm.target, row.target)] or arms
    newest = max((arm.measured_at for arm in matching), default=None)
    return min((arm for arm in matching if arm.measured_at == newest), key=distance, default=None)


def _row(row: PublishedRow, arm: Measured | None) -> list[Any]:
    cells: dict[str, Any] = {name: getattr(row, name, None) for name in COLUMNS}
    cells |= {f"{name}_published": getattr(row, name) for name in ("al", "speedup", "tokens_per_s")}
    cells |= {"al": None, "speedup": None, "tokens_per_s": None, "differs": f"nothing measured with {row.method}"}
    if arm is not None:
        ending = "_e2e" if row.timed == "e2e" else ""
        cells |= {
            "al": arm.lengths[row.al_column],
            "speedup": arm.speeds.get(f"speedup{ending}"),
            "tokens_per_s": arm.speeds.get(f"tokens_per_s{ending}"),
            "draft_key": arm.draft_key[:12],
            "measured_at": arm.measured_at,
            "differs": differences(row, arm),
        }
        if row.al is not None and cells["al"] is not None and same_target(arm.target, row.target):
            cells["al_ratio"] = cells["al"] / row.al
    return [cells[name] for name in COLUMNS]


def differences(row: PublishedRow, arm: Measured) -> str:
    """What differs in conditions: ours, theirs in brackets; then what the publication does not state."""
    same = same_target(arm.target, row.target)
    different = [] if same else [f"target {arm.target} [{row.target}], so no ratio"]
    silent = []
    for name in ("workload", "tree", "depth", "temperature", "batch_size", "engine", "hardware", "dtype"):
        measured, published = getattr(arm, name), getattr(row, name)
        if name == "tree":
            measured, published = measured or "none: a chain", published or "none: a chain"
        if published is None and not (name == "depth" and row.tree is not None):
            silent.append(name.replace("_", " "))
        elif published is not None and not _same(measured, published):
            different.append(f"{name.replace('_', ' ')} {'unknown' if measured is None else measured} [{published}]")
    if row.al is not None:
        silent += ["bonus tokens"] * (row.bonus is None) + ["pooled or macro"] * (row.averaged is None)
        silent += ["overshoot"] * (row.overshoot is None)
        if row.averaged == "macro" and row.overshoot and row.bonus is not False:
            different.append("acceptance length without overshoot [with]")
        if row.bonus is False and row.overshoot is False:
            different.append("acceptance length with overshoot [without]")
    if (row.speedup or row.tokens_per_s) is not None:
        silent += ["prefill in or out"] * (row.timed is None)
        if (row.batch_size or 1) > 1:
            different.append("speed of one request [of all together]")
    return "; ".join(different + ([f"not stated: {', '.join(silent)}"] if silent else []))


def same_target(measured: str, published: str) -> bool:
    """Whether two names of a model mean the same: of a hub id or a folder the last part counts, revisions do not."""
    return _same(*(name.rstrip("/").rpartition("/")[2].partition("@")[0] for name in (measured, published)))


def _same(measured: Any, published: Any) -> bool:
    """Equal, or the same name but for capitals, hyphens, underscores and blanks."""
    if isinstance(measured, str) and isinstance(published, str):
        plain = str.maketrans("", "", "-_ ")
        return measured.casefold().translate(plain) == published.casefold().translate(plain)
    return bool(measured == published)
