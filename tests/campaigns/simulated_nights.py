"""Nights one after the other on one home, with everything that goes wrong in a month: what happened, and what is wrong.

Real are the target, the data steps, training, decisions, releases, the store, the history, MLflow's registry and the
gate, kills and the full disk; in the nights of IN_PREFECT also Prefect, by a server that is started for the run.
Simulated are the calendar (a night begins when the one before has ended), the traffic, and what a drafter gains
(nightbox/simulated/measure.py), so that the truth of every champion is known. What is released is not served here: the
versions in MLflow have small code that loads no model.
"""

from __future__ import annotations

import json
import random
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from forked import Ended, forked, warm_up
from nightbox.simulated.measure import DEPTHS, HOST_MS, PLAIN_MS, draft_ms, verify_ms
from pipeline_builder import Pipeline, pipeline, step, written
from small_disk import ENOUGH, ROOMY, can_mount, change, small_disk, used_bytes
from tiny_nightly import ANSWERED, TRAINED, WORDS
from tiny_targets import make_tiny_target

from components.promotion import MAX_SLOWDOWN
from flows import cli
from storage import journal
from storage.artifacts.store import Store
from storage.collect import usage
from storage.history.query import query
from storage.registry import versions as model_versions
from storage.registry.fact_tags import tags_of
from storage.registry.registry import champion_that_counts
from storage.registry.tracking import open_client

MODEL = "oracle"
CHAMPION = f"registry:{MODEL}@champion"
MODEL_FILE = Path(__file__).parents[1] / "storage" / "model_file.py"
KEPT_RUNS, KEPT_VERSIONS = 3, 2
DRAFTER = {**TRAINED, "settings": {"mtp": {"mtp_modules": 4}}}
LEARNING = {"num_steps": 24, "eval_every": 4, "peak_lr": 2.5e-4}
"""Of the nights: so slowly that a drafter is not as good as it can be after three, and later ones still better it."""
LOADED_HERE = ("mlflow.store.tracking.sqlalchemy_store", "mlflow.store.model_registry.sqlalchemy_store", "mlflow.db")
"""Loaded once by this process, which all commands are forked from."""
LOADED_FOR_STEPS = (
    "transformers.models.llama.modeling_llama",
    "components.data.responses.generate",
    "components.data.features.record",
    "components.drafts.training.from_features",
    "components.publish.release.export",
    "components.report.pages.drafter",
    "components.speedup.confirm",
)
"""Loaded once by the server that all steps are forked from."""
IN_PREFECT = ("empty", "late", "moved alias")  # nights that run as flows, on a Prefect server started for each


def first(folder: Path) -> Pipeline:
    """The first champion."""
    world, sizes = str(folder / "world"), {"num_train": 16, "num_validation": 6, "num_test": 12, "num_warm_up": 2}
    both, judged = {"target": "target", "prompts": "prompts"}, {"drafts": "draft"}
    return pipeline(
        "first",
        target=step("targets.load_target", model=str(folder / MODEL)),
        prompts=step("data.collect_prompts", source=str(folder / "first.jsonl"), **sizes),
        answers=step("data.write_answers", both, **ANSWERED),
        features=step("data.record_features", "target", "answers"),
        draft=step("drafts.train_draft", "target", "features", **DRAFTER, num_steps=6),
        acceptance=step("simulated.measure_acceptance", both, "draft", world=world),
        cost=step("simulated.measure_step_cost", both, judged),
        depth=step("speedup.choose_depth", "acceptance", "cost"),
        end_to_end=step("simulated.compare_end_to_end", both, judged, {"policy": "depth"}, world=world),
        verdict=step("speedup.confirm_depth", "end_to_end", {"policy": "depth"}),
        release=step("publish.export_release", "target", "acceptance", "end_to_end", judged, {"policy": "verdict"}),
    )


def nightly(folder: Path, limit: int, lossy: bool) -> Pipeline:
    """`nightly` of the project's pipelines.yaml at tiny size.

    limit: of new conversations to be trained on; the usual 48, with 34 to judge on, are five ordinary days, since about
    one night in three promotes, and has to take what those before it left. lossy: with the planted fault of
    simulated.collect_traffic.
    """
    world, collect = str(folder / "world"), "simulated.collect_traffic" if lossy else "data.collect_traffic"
    taken = {"num_train": limit, "num_validation": 8, "num_test": 24, "min_new": 12, "evaluation_percent": 40}
    by, mixed = {"target": CHAMPION}, {"target": CHAMPION, "prompts": "mix"}
    rivals = {**mixed, "drafts": ["draft", CHAMPION]}
    seen = {"acceptance": ["acceptance", "champion_acceptance"]}
    duel = {"challenger": "draft", "champion": CHAMPION}
    one = {"target": CHAMPION, "drafts": ["draft"], "policy": "verdict", "acceptance": ["acceptance"]}
    return pipeline(
        "nightly",
        traffic=step(collect, {"seen": CHAMPION}, source=str(folder / "traffic"), **taken),
        now=step("simulated.measure_acceptance", by, {"draft": CHAMPION, "prompts": "traffic"}, world=world),
        then=step("simulated.measure_acceptance", by, {"draft": CHAMPION, "prompts": CHAMPION}, world=world),
        drift=step("speedup.measure_drift", "then", "now", {"policy": CHAMPION}),
        mix=step(
            "data.mix_prompts", {"new": "traffic", "old": CHAMPION},
            old_share=0.5, num_validation=6, num_test=24, num_warm_up=2,
        ),
        answers=step("data.write_answers", mixed, **ANSWERED),
        features=step("data.record_features", by, "answers"),
        draft=step(
            "drafts.train_draft", by, "features", {"start_from": CHAMPION},
            **{**DRAFTER, "method": "auto"}, **LEARNING,
        ),
        acceptance=step("simulated.measure_acceptance", mixed, "draft", world=world),
        champion_acceptance=step("simulated.measure_acceptance", mixed, {"draft": CHAMPION}, world=world),
        cost=step("simulated.measure_step_cost", rivals),
        depth=step("speedup.choose_depth", "cost", seen, {"champion": CHAMPION}),
        end_to_end=step("simulated.compare_end_to_end", rivals, {"policy": "depth"}, world=world),
        verdict=step("speedup.confirm_depth", "end_to_end", {"policy": "depth"}, duel),
        release=step("publish.export_release", "end_to_end", one),
        report=step("report.write_page", "cost", "end_to_end", "release", "drift", seen, {"policy": "verdict"}),
    )  # fmt: skip


@dataclass
class Night:
    """One night. what: came of the day before and of the night itself. status, sentence: as the history has them.

    champion: its version after the night. speed: the true speedup at which it serves. waiting: conversations of the
    traffic that no drafter in its line has used. mib: of the home before and after `gc`; empty where none ran.
    """

    number: int
    what: str
    status: str = ""
    sentence: str = ""
    champion: int = 0
    speed: float = 0.0
    waiting: int = 0
    mib: tuple[float, ...] = ()
    seconds: float = 0.0
    code: int | None = 0


@dataclass
class Month:
    """A home, its traffic, and the nights so far. limit, lossy: as for `nightly`.

    speed: the true speedup of the first champion.
    """

    folder: Path
    seed: int
    limit: int = 48
    lossy: bool = False
    speed: float = 0.0
    nights: list[Night] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for module in LOADED_HERE:
            import_module(module)
        self.chance = random.Random(self.seed)
        self.home, self.traffic = self.folder / "disk" / "home", self.folder / "traffic"
        self.file, self.arrived = self.folder / "pipelines.yaml", list[str]()
        for place in (self.home.parent, self.traffic, self.folder / "world"):
            place.mkdir(parents=True, exist_ok=True)
        self.settings = {"TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1"}
        warm_up(self.settings, LOADED_FOR_STEPS)
        make_tiny_target("llama", self.folder / MODEL)
        self._write_chats(self.folder / "first.jsonl", [f"first question {number}" for number in range(90)])
        self.file.write_text(
            written(first(self.folder), nightly(self.folder, self.limit, self.lossy)), encoding="utf-8"
        )

    def draftsmith(self, *arguments: str, **options: Any) -> Ended:
        """A command on the home, with the simulated steps beside the real ones."""

        def command() -> int:
            model_versions.MODEL_CODE = MODEL_FILE
            return cli.main(arguments, packages=("components", "nightbox"))

        options.setdefault("limit_s", 1800.0)  # this machine may do much else
        return forked(command, environment={"DRAFTSMITH_HOME": str(self.home), **self.settings}, warm=True, **options)

    def run(self, name: str, how: str = "direct", **options: Any) -> Ended:
        """A pipeline. how: "direct", as a worker runs it but for Prefect, or "prefect", on a server of its own."""
        here = ["--device", "cpu", "--file", str(self.file), *["--direct"] * (how == "direct")]
        return self.draftsmith("run", name, *here, **options)

    def in_home(self, ask: Callable[[], Any]) -> Any:
        """What is found in a process of its own, as JSON."""
        settings = {"DRAFTSMITH_HOME": str(self.home)}
        ended = forked(lambda: print(json.dumps(ask())), environment=settings)  # noqa: T201
        assert ended.code == 0, ended.said
        return json.loads(ended.said.splitlines()[-1])

    def _write_chats(self, file: Path, questions: Iterable[str]) -> None:
        rows = [json.dumps({"messages": [{"role": "user", "content": question}]}) for question in questions]
        aside = file.with_name(f"{file.name}.part")
        aside.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
        aside.rename(file)

    # ---- the days

    def arrive(self, number: int, count: int, name: str = "") -> None:
        """New conversations in a file of their own, of many words, so that a drafter has something to learn."""
        questions = [
            f"{' '.join(self.chance.choices(WORDS, k=8))} {number}-{n}-{self.chance.randrange(10**9)}"
            for n in range(count)
        ]
        self._write_chats(self.traffic / (name or f"day-{number:02d}.jsonl"), questions)
        self.arrived += questions

    def double(self) -> None:
        """A file of before under another name, with rows twice and in another order."""
        files = sorted(self.traffic.glob("day-*.jsonl"))
        rows = self.chance.choice(files).read_text(encoding="utf-8").splitlines() * 2 if files else []
        self.chance.shuffle(rows)
        (self.traffic / f"again-{len(self.nights)}.jsonl").write_text("".join(f"{row}\n" for row in rows))

    def malform(self, number: int) -> None:
        """What people and crashes leave in a folder of traffic, a few good rows among it."""
        good = f"night {number} asks in the middle of rubbish"
        row = json.dumps({"messages": [{"role": "user", "content": good}]})
        self.arrived.append(good)
        (self.traffic / f"torn-{number}.jsonl").write_bytes(
            f'{row}\n{{"messages": [{{"role": "us\n[1, 2]\n{{}}\nnull\n{{"messages": []}}\n'.encode()
            + b"\xff\xfe\x00\n"
        )
        (self.traffic / f"empty-{number}.jsonl").write_bytes(b"")
        (self.traffic / f"zeros-{number}.jsonl").write_bytes(bytes(4096))
        (self.traffic / f"no-{number}.parquet").write_bytes(b"PAR1 and nothing more")
        (self.traffic / f"notes-{number}.txt.bak").write_text("not for us")

    # ---- the nights

    def night(self, what: str) -> Night:
        """One night after a day of this kind; faults are what no night may do."""
        number = len(self.nights) + 1
        options: dict[str, Any] = {}
        if what not in ("empty", "late", "quiet"):
            self.arrive(number, self.chance.choice((14, 20, 48) if what == "new" else (12, 16)))
        if what == "late":
            self.arrive(number, 14, f"a-late-{number:02d}.jsonl")
        elif what == "doubled":
            self.double()
        elif what == "malformed":
            self.malform(number)
        elif what == "gone back":
            self._move_alias("previous")
        elif what == "moved alias":
            self._move_alias("refused")
        elif what == "deleted alias":
            self.in_home(lambda: open_client(self.home).delete_registered_model_alias(MODEL, "champion"))
        before = self.state()
        busy = self.folder / "world" / "busy"
        if what == "busy":
            busy.touch()
        elif what == "killed":
            options["kill_after_s"] = self.chance.uniform(0.05, 0.95) * self._usual_seconds()
        if what == "full disk":
            change(self.home.parent, f"size={used_bytes(self.home.parent) + self.chance.randrange(1 << 20)}")
        how = "prefect" if what in IN_PREFECT else "direct"
        ended = self.run("nightly", how, **options)
        if what == "full disk":
            change(self.home.parent, f"size={ENOUGH}")
        if ended.fault and (what, ended.code) != ("killed", -signal.SIGKILL):
            self.faults.append(f"night {number}, {what}: {ended.fault}")
        busy.unlink(missing_ok=True)
        night = self._told(number, what, ended, before)
        if "disturbed" in night.sentence:
            night = self._measured_again(night)
        self.nights.append(night)
        if before["disputed"]:
            self._settle(night)
        return night

    def _settle(self, night: Night) -> None:
        """In the morning the operator gives the command that the night's sentence names."""
        command = f"draftsmith rollback {MODEL} --why"
        if f"`{command} ...`" not in night.sentence:
            self.faults.append(f"night {night.number}, {night.what}: does not name `{command}`: {night.sentence!r}")
        ended = self.draftsmith(*command.split()[1:], "moved by mistake")
        if ended.code or self.state()["disputed"]:
            self.faults.append(f"night {night.number}, {night.what}: not settled: {ended.said[-300:]}")

    def _measured_again(self, night: Night) -> Night:
        """A disturbed night once its machine is quiet: what `retry` does later the same night, by hand."""
        before = self.state()
        ended = self.draftsmith("remeasure", MODEL, "--file", str(self.file))
        if ended.fault or ended.code:
            self.faults.append(f"night {night.number}, measured again: {ended.fault or ended.said}")
        after = self.state()
        self._check_champion(f"night {night.number}, measured again", before, after)
        measured = next((line.strip() for line in ended.said.splitlines() if "newer evidence" in line), "")
        if not measured:
            self.faults.append(f"night {night.number}, measured again: no newer evidence: {ended.said[-600:]}")
        return replace(
            night,
            sentence=f"{night.sentence} | {measured}",
            champion=after["champion"],
            speed=round(after["speed"], 4),
            waiting=after["waiting"],
        )

    def _usual_seconds(self) -> float:
        return median(night.seconds for night in self.nights if night.what in ("new", "doubled", "malformed"))

    def _told(self, number: int, what: str, ended: Ended, before: dict[str, Any]) -> Night:
        """The night as the records tell it, held against what may be."""
        after = self.state()
        night = Night(
            number,
            what,
            after["status"],
            after["sentence"],
            after["champion"],
            seconds=round(ended.seconds, 1),
            code=ended.code,
        )
        night.speed, night.waiting = round(after["speed"], 4), after["waiting"]
        at = f"night {number}, {what}"
        told = after["runs"] > before["runs"]
        cut_short = what in ("killed", "full disk")
        if not told and not cut_short:
            self.faults.append(f"{at}: no run in the history: {ended.said[-300:]}")
        if told and not night.sentence and not (cut_short and after["status"] in ("running", "killed")):
            self.faults.append(f"{at}: ended as {after['status']} without a sentence: {ended.said[-300:]}")
        if "\n" in night.sentence or (night.sentence and " " not in night.sentence):
            self.faults.append(f"{at}: its sentence is no line, or one word: {night.sentence!r}")
        if told and night.sentence and after["in_mlflow"] != night.sentence and not cut_short:
            self.faults.append(f"{at}: MLflow says {after['in_mlflow']!r}, the history {night.sentence!r}")
        if what in IN_PREFECT and night.sentence not in (message := last_message(self.home)):
            self.faults.append(f"{at}: Prefect says {message!r}, the history {night.sentence!r}")
        if told and after["new"] not in (None, before["waiting"]):
            self.faults.append(f"{at}: it found {after['new']} new conversations, and {before['waiting']} were")
        if told and after["traffic"] == after["taken_by_champion"] and after["left"] not in (None, after["waiting"]):
            self.faults.append(f"{at}: {after['waiting']} wait, and it said that it left {after['left']}")
        self._check_champion(at, before, after)
        return night

    def _check_champion(self, at: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        """It is not worse than it was by more than the gate's margin, and its line has used nothing twice."""
        if after["speed"] < before["speed"] * (1.0 - MAX_SLOWDOWN):
            self.faults.append(f"{at}: the champion went from {before['speed']:.3f} to {after['speed']:.3f} in truth")
        self.faults += [f"{at}: {fault}" for fault in after["line"]]

    def _move_alias(self, which: str) -> None:
        """A person makes another version champion in MLflow itself: the one before, or one that the gate refused."""
        to = self.state()[which]
        assert to is not None, f"a month in which no version is {which} tries nothing"

        def move() -> None:
            open_client(self.home).set_registered_model_alias(MODEL, "champion", str(to))

        self.in_home(move)

    def collect(self) -> None:
        """`gc` after the night, as an operator has it run."""
        before = self._mib()
        ended = self.draftsmith("gc", "--runs", str(KEPT_RUNS), "--versions", str(KEPT_VERSIONS))
        if ended.fault or ended.code:
            self.faults.append(f"gc after night {len(self.nights)}: {ended.fault or ended.said}")
        self.nights[-1].mib = (before, self._mib())

    def _mib(self) -> float:
        """Of the home, where a file with several names counts once."""
        return round(sum(use.num_bytes for use in usage(self.home)) / (1 << 20), 2)

    # ---- what is so

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.in_home(lambda: state_of(self.home, self.folder / "world", self.arrived))
        return found


def state_of(home: Path, world: Path, arrived: Sequence[str]) -> dict[str, Any]:
    """The newest night in the history and MLflow, the champion and its true speed, and what its line has used."""
    client = open_client(home)
    aliases = {name: int(number) for name, number in client.get_registered_model(MODEL).aliases.items()}
    champion = champion_that_counts(home, client, MODEL)
    assert champion is not None, "the first pipeline has made one"
    tags = tags_of(client, MODEL, champion)
    answers = {
        int(one.version): one.tags.get("gate.answer") for one in client.search_model_versions(f"name = '{MODEL}'")
    }
    refused = [number for number, answer in answers.items() if answer not in (None, "passed") and number != champion]
    rows = query("SELECT run_id, status, reason FROM v_run WHERE pipeline = 'nightly' ORDER BY started_at", home)[1]
    run_id, status, sentence = rows[-1] if rows else ("", "", "")
    filed = client.search_runs(
        [one.experiment_id for one in client.search_experiments()], f"tags.`draftsmith.run_id` = '{run_id}'"
    )
    told = [run.data.tags["draftsmith.reason"] for run in filed if "draftsmith.reason" in run.data.tags]
    chance = json.loads((world / "truths.json").read_text())[tags["draftsmith.draft_key"]]
    entries = journal.read(home / "runs" / f"{run_id}.jsonl") if run_id else []
    traffic = next((entry for entry in entries if entry.get("step") == "traffic" and entry.get("key")), None)
    used, taken, faults = used_by(home, tags["draftsmith.draft_key"])
    faults += [f"used and never arrived: {question}" for question in used.difference(arrived)]
    return {
        "runs": len(rows),
        "status": status,
        "sentence": sentence or "",
        "in_mlflow": told[0] if told else "",
        "champion": champion,
        "disputed": aliases.get("champion") != champion,
        "previous": aliases.get("previous"),
        "refused": max(refused, default=None),
        "speed": true_speed(chance, int(tags["draftsmith.depth_k"])),
        "new": traffic["info"]["new"] if traffic else 0 if "holds no conversation" in (sentence or "") else None,
        "traffic": traffic["key"] if traffic else "",
        "taken_by_champion": taken,
        "left": traffic["info"]["waiting"] if traffic else None,
        "waiting": len(set(arrived) - used),
        "line": faults,
    }


def last_message(home: Path) -> str:
    """What Prefect's page says of its newest run."""
    asked = (
        "SELECT state.message FROM flow_run JOIN flow_run_state AS state ON state.id = flow_run.state_id "
        "ORDER BY flow_run.created DESC LIMIT 1"
    )
    with closing(sqlite3.connect(f"file:{home / 'prefect' / 'prefect.db'}?mode=ro", uri=True)) as database:
        return str((database.execute(asked).fetchone() or ("no run",))[0])


def unexplained(home: Path) -> list[tuple[str, str]]:
    """Runs that the history does not explain: (id, status)."""
    return [tuple(row) for row in query("SELECT run_id, status FROM v_run WHERE coalesce(reason, '') = ''", home)[1]]


def true_speed(chance: float, depth: int) -> float:
    """What a drafter of this chance gains at a depth."""
    kept = sum(chance**i for i in range(depth + 1))
    return kept * (PLAIN_MS + HOST_MS) / (verify_ms(depth) + draft_ms(depth) + HOST_MS) if depth in DEPTHS else 1.0


def used_by(home: Path, draft_key: str) -> tuple[set[str], str, list[str]]:
    """The questions of the nights in a champion's line, the traffic of the last, and what is wrong with them.

    Wrong is what was used twice, or trained and judged on.
    """
    store = Store(home)

    def inputs(key: str) -> dict[str, Any]:
        return dict(store.record_of(key)["record"]["inputs"])

    prompts = str(inputs(str(inputs(str(inputs(draft_key)["features"]))["answers"]))["prompts"])
    times: Counter[str] = Counter()
    last = str(inputs(prompts).get("new", "none"))
    sides: dict[str, set[str]] = {"train": set(), "judged on": set()}
    while "new" in inputs(prompts):
        traffic, prompts = str(inputs(prompts)["new"]), str(inputs(prompts)["old"])
        for line in (store.path_of(traffic) / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            question = str(row["messages"][0]["content"])
            times[question] += 1
            sides["train" if row["split"] == "train" else "judged on"].add(question)
    faults = [f"used {count} times: {question}" for question, count in times.items() if count > 1]
    faults += [f"trained and judged on: {question}" for question in sides["train"] & sides["judged on"]]
    return set(times), last, faults


PLAN = (
    "new", "empty", "doubled", "malformed", "busy", "killed", "new", "late", "full disk", "gone back",
    "new", "moved alias", "new", "killed", "busy", "empty", "malformed", "full disk", "new", "late",
    "killed", "doubled", "moved alias", "new", "deleted alias", "full disk", "empty", "killed", "gone back", "new",
)  # fmt: skip
"""What the day before each night, and the night, are like."""


def month(folder: Path, plan: Sequence[str], seed: int, *, gc_every: int = 3) -> dict[str, Any]:
    """Nights by plan on one home; a record of each, and every fault."""
    disk = folder / "disk"
    with small_disk(disk) if can_mount() else nullcontext():
        here = Month(folder, seed)
        began = here.run("first")
        assert began.code == 0, began.said
        tried = [what for what in plan if what != "full disk" or can_mount()]
        here.speed = here.state()["speed"]
        for number, what in enumerate(tried, start=1):
            here.night(what)
            if number % gc_every == 0:
                here.collect()
        for _ in range(2):  # two quiet nights: all that was held up by kills and refusals is taken up again
            here.night("quiet")
        here.collect()
        for run_id, status in here.in_home(lambda: unexplained(here.home)):
            here.faults.append(f"run {run_id} is {status} without a sentence")
        if can_mount():
            change(disk, f"size={ROOMY}")  # doctor asks for room that no night of this size needs
        doctor = here.draftsmith("doctor")
        here.faults += [f"doctor: {doctor.said[-600:]}"] * (doctor.code != 0)
        sizes = [night.mib for night in here.nights if night.mib]
        promoted = sum(a.champion < b.champion for a, b in pairwise(here.nights))
        return {
            "nights": len(here.nights),
            "by_kind": dict(Counter(night.what for night in here.nights)),
            "not_tried": [] if can_mount() else ["full disk"],
            "simulated": "the calendar, the traffic, and what is measured of a drafter",
            "seconds_a_night": median(night.seconds for night in here.nights),
            "promoted": promoted,
            "killed": sum(night.code == -signal.SIGKILL for night in here.nights),
            "refused": sum("not promoted" in night.sentence for night in here.nights),
            "conversations": len(here.arrived),
            "used_once": len(here.arrived) - here.nights[-1].waiting,
            "waiting": here.nights[-1].waiting,
            "mib_before_gc": [before for before, _ in sizes],
            "mib_after_gc": [after for _, after in sizes],
            "true_speed": [here.speed, here.nights[-1].speed],
            "faults": here.faults,
            "each_night": [asdict(night) for night in here.nights],
        }
