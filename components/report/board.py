"""What the dashboard of a home shows, as plain facts: champions, what was measured, how runs ended, what takes room.

flows/dashboard/gathered.py reads them from the history; components/report/pages/dashboard.py draws them. `anchor` is
the place on the page that says where a point comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval; lo and hi None where there is none."""

    value: float
    lo: float | None = None
    hi: float | None = None


@dataclass(frozen=True)
class Origin:
    """Where a point comes from. sql: the SELECT over the history that gives its row."""

    anchor: str
    run_id: str
    artifact_key: str
    sql: str


@dataclass(frozen=True)
class Chosen:
    """One choice of a depth. speed: measured, against plain decoding; None where it was not. champion: "3" was once."""

    origin: Origin
    at: datetime
    model: str
    method: str
    pipeline: str
    depth: int
    verdict: str
    reasons: tuple[str, ...]
    speed: Interval | None
    predicted: Interval
    acceptance: Interval | None
    machine: str
    draft_key: str
    champion: str = ""


@dataclass(frozen=True)
class AtDepth:
    """One depth of one drafter of the newest choice. cost: time of a round over that of a plain step."""

    origin: Origin
    model: str
    series: str
    depth: int
    cost: float
    verify_ms: float
    draft_ms: float
    acceptance: Interval
    predicted: Interval
    speed: Interval | None


@dataclass(frozen=True)
class DriftSeen:
    """Acceptance of a champion on new traffic against that at its release; change in tokens a round."""

    origin: Origin
    at: datetime
    model: str
    method: str
    then: float
    now: float
    change: Interval
    drifted: bool
    prompts: int


@dataclass(frozen=True)
class Move:
    """One move of an alias of a registered model. facts: what was known of the version, by name."""

    at: datetime
    name: str
    model: str
    alias: str
    action: str
    before: int | None
    version: int | None
    who: str
    why: str
    facts: dict[str, str]


@dataclass(frozen=True)
class Champion:
    """The version that serves a target, and why. `move` made it champion; facts: the newest evidence about it."""

    move: Move
    facts: dict[str, str]
    lineage: tuple[Ancestor, ...] = ()
    goes_on: bool = False  # from an earlier drafter, whose own ancestors are left out


@dataclass(frozen=True)
class Ancestor:
    """Something that went into a champion. note: what tells it from others of its kind; inputs: keys."""

    key: str
    kind: str
    step: str
    pipeline: str
    note: str
    at: datetime
    seconds: float | None
    machine: str
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class RunSeen:
    """One run that has ended, and in one sentence how. report: the address of its report page; "" for none."""

    run_id: str
    started_at: datetime
    pipeline: str
    status: str
    outcome: str  # promoted | made | nothing new | failed | killed
    sentence: str
    seconds: float | None
    executed: int
    reused: int
    report: str
    prefect: str  # the address of its page in Prefect; "" where no server is known


@dataclass(frozen=True)
class Failure:
    """A step or a run that failed, and why. step "": the run as a whole."""

    at: datetime
    pipeline: str
    step: str
    why: str
    run_id: str


@dataclass(frozen=True)
class MachineUse:
    """A machine by its name, and what was measured on it. newest: method -> the newest measured speedup."""

    name: str
    runs: int
    newest: dict[str, float]
    last: datetime


@dataclass(frozen=True)
class Room:
    """What takes room. by: kind or pipeline."""

    by: str
    name: str
    artifacts: int
    num_bytes: int


@dataclass(frozen=True)
class Question:
    """How a part of the page was asked for, as a command to copy."""

    about: str
    command: str


@dataclass(frozen=True)
class Board:
    """Everything on the dashboard of one home. days: how far back what has a time goes."""

    home: str
    made_at: datetime
    days: int
    champions: tuple[Champion, ...] = ()
    moves: tuple[Move, ...] = ()
    choices: tuple[Chosen, ...] = ()
    depths: tuple[AtDepth, ...] = ()
    drift: tuple[DriftSeen, ...] = ()
    runs: tuple[RunSeen, ...] = ()
    failures: tuple[Failure, ...] = ()
    machines: tuple[MachineUse, ...] = ()
    room: tuple[Room, ...] = ()
    questions: dict[str, Question] = field(default_factory=dict)
    mlflow: str = ""  # the address of MLflow's server; "" where none runs
