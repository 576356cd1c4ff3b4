"""What `check` accepts runs: thousands of mutants of pipelines.yaml through check, plan, compiling and a run.

A mutant that is refused is refused by `check`, in few lines, each with the line of the file. One that is accepted can
be planned and compiled to a Prefect flow with a form, and what the toy pipeline has become runs. A batch of mutants is
one child, which writes down what it is at; after a death the next child goes on behind the mutant that it died of.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forked import SEED, TOO_LONG, Ended, forked, recorded
from toy_garden import GARDEN, PACKAGES, ROOT
from yaml_mutants import Mutant, mutant

from flows import cli
from flows.execution import engine
from storage.registry.tracking import ensure_database

MUTANTS = int(os.environ.get("DRAFTSMITH_SOAK_PIPELINE_MUTANTS", "10000"))
BATCH = 100
CHECK_CPU_S = 10  # of the processor, for one mutant
FURTHER_CPU_S = 120  # in plan and compiling: four hundred values of a matrix are a plan of 25 megabytes
RUN_S = 20.0  # after that a run is told to end
MOST_LINES = 30  # of one mutated place

ONLY_PLAN_KNOWS = (
    r"registry:\S+: there is no registered model",
    r"there is no such file, or nothing in it|source: .*: no such file; give",
)
OF_THE_TOYS = (
    r"step '.*' failed: KeyError: ",  # toys.grow looks its method up by any word
    r"the pot fell|was killed by SIGKILL|returned str|data\.jsonl:3: no",  # toys.fail
    r"stopped after \S+ s, its timeout_minutes",
)


def campaign(folder: Path, number: int, seed: int, runs: int) -> dict[str, Any]:
    """Mutants 0 to `number`, and a run of the first `runs` different ones of the toy pipeline that can be run."""
    started = time.monotonic()
    bases = {"garden": GARDEN.text, "own": (ROOT / "pipelines.yaml").read_text(encoding="utf-8")}
    told = judged(folder, range(number), seed, bases)
    checked_s = time.monotonic() - started
    faults = [f"{row['number']} ({row['what']}): {row['fault']}" for row in told if row["fault"]]
    different = {row["run"]: row for row in told if row["run"] and not row["fault"] and row["base"] == "garden"}
    ran: Counter[str] = Counter()
    template = folder / "template"
    template.mkdir()
    ensure_database(template)
    for row in list(different.values())[:runs]:
        outcome, why = ended_run(folder, template, mutant(row["number"], seed, bases), row["pipeline"])
        ran[outcome] += 1
        faults += [f"{row['number']} ({row['what']}): in its run: {why}"] if why else []
    return {
        "mutants": len(told),
        "outcomes": dict(Counter(f"{row['base']}, {row['kind']}: {row['outcome']}" for row in told)),
        "most_lines": max(row["lines"] for row in told),
        "could_run": len(different),
        "runs": dict(ran),
        "faults": faults,
        "checked_s": round(checked_s, 1),
    }


def judged(folder: Path, numbers: range, seed: int, bases: Mapping[str, str]) -> list[dict[str, Any]]:
    """What became of each mutant in check, plan and compiling."""
    told: list[dict[str, Any]] = []
    environment = {"DRAFTSMITH_HOME": str(folder / "no-home"), "PREFECT_HOME": str(folder / "prefect")}
    while len(told) < len(numbers):
        left = numbers[len(told) : len(told) + BATCH]
        diary = folder / "diary.jsonl"
        diary.write_text("")
        ended = forked(partial(_batch, folder, diary, left, seed, bases), limit_s=60.0 * BATCH, environment=environment)
        rows = [json.loads(line) for line in diary.read_text().splitlines()]
        told += rows
        if len(rows) < len(left):  # it died of the one after the last that it has told of
            lost = mutant(left[len(rows)], seed, bases)
            why = ended.fault or f"ended with {ended.code}: {ended.said[-300:]}"
            told.append({**_facts(lost), "outcome": "died", "fault": why, "lines": 0, "run": "", "pipeline": ""})
    return told


def _facts(made: Mutant) -> dict[str, Any]:
    return {"number": made.number, "base": made.base, "kind": made.kind, "what": made.what}


def _batch(folder: Path, diary: Path, numbers: range, seed: int, bases: Mapping[str, str]) -> None:
    """In a child: judge mutants one after the other; one that takes too much of the processor ends the child."""
    (folder / "chats").mkdir(exist_ok=True)
    for language in ("english", "chinese"):  # where the project's own pipelines look for chats
        (folder / "chats" / f"{language}.jsonl").write_text('{"text": "hello"}\n', encoding="utf-8")
    os.chdir(folder)
    judge = Judge(folder, bases)
    with diary.open("a", encoding="utf-8") as told:
        for number in numbers:
            made = mutant(number, seed, bases)
            row = judge.judge(made)
            told.write(json.dumps({**_facts(made), **row}) + "\n")
            told.flush()
            signal.setitimer(signal.ITIMER_PROF, 0)


class Judge:
    """Takes mutants through check, plan and compiling, in this process."""

    def __init__(self, folder: Path, bases: Mapping[str, str]) -> None:
        from flows.spec.schema import load_spec

        self.file = folder / "mutant" / "pipelines.yaml"
        self.file.parent.mkdir(exist_ok=True)
        self.known: dict[str, dict[str, Any]] = {}
        for name, text in bases.items():
            self.file.write_text(text, encoding="utf-8")
            self.known[name] = {key: str(one) for key, one in load_spec(self.file).pipelines.items()}

    def judge(self, made: Mutant) -> dict[str, Any]:
        """outcome, fault ("" for none), lines of the refusal, and which run it would be."""
        row: dict[str, Any] = {"outcome": "refused", "fault": "", "lines": 0, "run": "", "pipeline": ""}
        self.file.write_bytes(made.content)
        signal.setitimer(signal.ITIMER_PROF, CHECK_CPU_S)
        code, said = told_by("check", "-f", str(self.file))
        signal.setitimer(signal.ITIMER_PROF, FURTHER_CPU_S)
        if fault := self._fault_of_check(made, code, said):
            return row | {"fault": fault}
        if code == 2:
            return row | {"lines": len(said.splitlines())}
        return row | self._further(made)

    def _fault_of_check(self, made: Mutant, code: int | None, said: str) -> str:
        ended = Ended(code, said, 0.0)
        if ended.fault or code == 1:
            return f"check: {ended.fault or said}"
        if code == 0:
            return ""
        lines, rows = said.splitlines(), re.split(rb"\r\n|[\r\n]", made.content.rstrip())
        for line in lines:
            found = re.match(r"pipelines\.yaml:(\d+): \S", line)
            if line.startswith(f"{self.file}: ") and len(lines) == 1:
                continue
            if found is None or not 1 <= int(found[1]) <= max(1, len(rows)):
                return f"check: no line of the file (it has {len(rows)}): {line[:300]}"
        if len(lines) > MOST_LINES * max(1, made.places):
            return f"check: {len(lines)} lines for {made.places} places, for example {lines[0][:200]}"
        return ""

    def _further(self, made: Mutant) -> dict[str, Any]:
        """Plan and compile every pipeline that is not as it was; all of the toy's."""
        from flows.spec.schema import load_spec

        pipelines = load_spec(self.file).pipelines
        changed = [name for name, one in pipelines.items() if self.known[made.base].get(name) != str(one)]
        row: dict[str, Any] = {"outcome": "accepted" if changed else "accepted, unchanged"}
        for name in changed:
            fault, keys = self._planned(name, made.number)
            if not fault:
                fault = _compiled(self.file, name)
            elif any(re.search(known, fault) for known in ONLY_PLAN_KNOWS):
                row["outcome"], fault = "accepted, wants what is not there", _compiled(self.file, name)
            elif "every step is left out" in fault:
                row["outcome"], fault = "accepted, nothing to run here", _compiled(self.file, name)
            if fault:
                return row | {"fault": f"{name}: {fault}"}
            row |= {"run": keys, "pipeline": name}
        return row

    def _planned(self, name: str, number: int) -> tuple[str, str]:
        """(what is wrong with its plan, its steps' keys and how they are run)."""
        for how in (["--json"], [[], ["--mermaid"]][number % 2]):
            code, said = told_by("plan", name, "--device", "cpu", "-f", str(self.file), *how)
            if code != 0:
                return f"plan {' '.join(how)}: {Ended(code, said, 0.0).fault or said}", ""
            if how == ["--json"]:
                steps = json.loads(said)
        return "", " ".join(f"{step['key']}:{step['retries']}:{step['timeout_minutes']}" for step in steps)


def told_by(*arguments: str) -> tuple[int | None, str]:
    """A command in this process: its code and what it says, which must be text that can be written."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = cli.main(arguments, packages=PACKAGES)
    raw = out.buffer.getvalue()  # type: ignore[attr-defined]
    return code, raw.decode("utf-8")


def _compiled(file: Path, name: str) -> str:
    """What is wrong with a pipeline's Prefect flow, its form or its schedules as a deployment has them, or ''."""
    from prefect.client.schemas.schedules import CronSchedule

    from flows.orchestration.flow import catalog_flow
    from flows.planning.plan import RunOptions
    from flows.spec.schema import load_spec

    try:
        declared = load_spec(file).pipelines[name]
        for schedule in declared.schedules:
            CronSchedule(cron=schedule.cron, timezone=schedule.timezone)
        flow = catalog_flow(name, declared, RunOptions(file=file, packages=PACKAGES))
        form = flow.parameters.model_dump_for_openapi()
        json.dumps(form, allow_nan=False).encode("utf-8")
        assert {"from_step", "to_step", "force", "trial", "dry_run"} <= set(form["properties"]), form
    except Exception as error:
        return f"compiling: {type(error).__name__}: {str(error)[:TOO_LONG]}"
    return ""


def ended_run(folder: Path, template: Path, made: Mutant, pipeline: str) -> tuple[str, str]:
    """(how the run of a mutant ended, why that is a fault or ''): on a home of its own, told to end after RUN_S."""
    place = folder / f"run-{made.number}"
    shutil.copytree(template, place / "home")
    file = place / "pipelines.yaml"
    file.write_bytes(made.content)
    settings = {"DRAFTSMITH_HOME": str(place / "home"), "TMPDIR": str(place)}
    act = partial(_run, place, ("run", pipeline, "--direct", "--device", "cpu", "-f", str(file)))
    ended = forked(act, limit_s=RUN_S + 100, environment=settings)
    long = (place / "told-to-end").exists()
    why = _fault_of_run(ended, long)
    if not why:
        shutil.rmtree(place)
    return "long" if long else {0: "done", 1: "a toy failed", 2: "a toy refused"}.get(ended.code or 0, "died"), why


def _fault_of_run(ended: Ended, long: bool) -> str:
    if long:
        return "" if ended.code in (0, 130) else ended.fault or f"told to end, it ended with {ended.code}: {ended.said}"
    if ended.fault or ended.code == 0:
        return ended.fault
    return "" if any(re.search(known, ended.said) for known in OF_THE_TOYS) else ended.said[-600:]


def _run(place: Path, arguments: tuple[str, ...]) -> int:
    assert engine.Engine.__init__.__kwdefaults__ is not None
    engine.Engine.__init__.__kwdefaults__["preload"] = ()

    def end() -> None:
        (place / "told-to-end").touch()
        os.kill(os.getpid(), signal.SIGTERM)

    watch = threading.Timer(RUN_S, end)
    watch.daemon = True
    watch.start()
    try:
        return cli.main(arguments, packages=PACKAGES)
    finally:
        watch.cancel()


def test_what_check_accepts_can_be_planned_compiled_and_run(tmp_path: Path) -> None:
    found = campaign(tmp_path, 60, seed=1, runs=1)
    assert found["faults"] == []
    assert found["mutants"] == 60 and sum(found["runs"].values()) == 1
    kinds = {key.rsplit(":", 1)[0] for key in found["outcomes"]}
    assert kinds == {f"{base}, {kind}" for base in ("garden", "own") for kind in ("characters", "structure")}
    for outcome in (": refused", ": accepted"):
        assert sum(count for key, count in found["outcomes"].items() if outcome in key) > 4, found["outcomes"]


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_ten_thousand_mutants_of_pipelines(tmp_path: Path) -> None:
    found = recorded("pipeline-mutants", lambda: campaign(tmp_path, MUTANTS, SEED, runs=MUTANTS))
    assert found["mutants"] == MUTANTS
    assert found["faults"] == []
