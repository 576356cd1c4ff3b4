"""Which engine serves which of our formats, tried: the table of docs/benchmarks.md, from what was measured.

Trains a drafter of each method for a minute, exports it, serves it in every engine that is built here, and holds texts
and rounds against our own loop. Engines that are not built keep the line of the last record; those that need a GPU, or
that were found wanting, are lines of benchmarks/engines_elsewhere.json, which says how they were looked at. Every line
says which run measured it: a record is of one run unless --only mended some of its lines.

    python -m benchmarks.engines_table [--build] [--only vllm,llama.cpp,broken,...] [--work DIR] [--print]

Exit code 1 when an engine keeps other tokens or rounds than ours. --build builds the engines that are missing first (as
`make test-engines` does: 6 GB, half an hour and more). --print shows the table of the newest record.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import engine_llama_cpp, engine_speculators, engine_transformers, engine_vllm
from benchmarks.engine_cases import OWN_MODULE, EngineCases, Served, as_record
from benchmarks.engine_glm import write_glm
from benchmarks.record import RESULTS, ROOT, write_record
from benchmarks.speculators_environment import environment
from components.contract import UserError
from tests.engines.engine_homes import is_ready, llama_cpp_home, vllm_home

ELSEWHERE = Path(__file__).with_name("engines_elsewhere.json")
MIDLAYER = "EAGLE-3, midlayer.*"
SPECULATORS = "EAGLE-3, speculators"
GLM = "MTP, GLM-4.5's model.layers.N"
MIMO = "MTP, MiMo's model.mtp_layers.0"
DFLASH = "DFlash, speculators"
DSPARK = "DSpark, speculators"
TAKEN = "takes it"
Line = Callable[[], Served]


def vllm_lines(cases: EngineCases, glm: EngineCases) -> Iterator[tuple[str, Line]]:
    """(name, what measures it) of everything vLLM serves on a CPU."""

    def drafted(layout: str, method: str, form: str, told: dict[str, Any]) -> Line:
        return lambda: engine_vllm.serve(cases, layout, method, {**told, "model": str(cases.exported(method, form))})[0]

    yield SPECULATORS, drafted(SPECULATORS, "eagle3", "speculators", {"method": "eagle3"})
    yield GLM, lambda: engine_vllm.serve(glm, GLM, "mtp", {"method": "mtp"}, model=glm.stitched)[0]
    yield MIDLAYER, drafted(MIDLAYER, "eagle3", "eagle3", {"method": "eagle3"})
    yield (
        MIMO,
        lambda: engine_vllm.serve(
            cases,
            MIMO,
            "mtp",
            {"method": "mtp", "model": str(cases.exported("mtp", "mimo"))},
            depth=1,
            overrides={"num_nextn_predict_layers": 1},
        )[0],
    )
    yield "Medusa", drafted("Medusa", "medusa", "medusa", {"method": "medusa"})
    yield "EAGLE-1", drafted("EAGLE-1", "eagle1", "eagle1", {"method": "eagle"})
    yield "a small causal LM", drafted("a small causal LM", "draft-model", "causal-lm", {"method": "draft_model"})
    yield DFLASH, drafted(DFLASH, "dflash", "dflash", {"method": "dflash"})
    parallel = {"method": "eagle3", "parallel_drafting": True}
    yield "P-EAGLE, speculators", drafted("P-EAGLE, speculators", "p-eagle", "speculators", parallel)


def llama_cpp_lines(cases: EngineCases) -> Iterator[tuple[str, Line]]:
    """The same of llama.cpp."""
    yield MIDLAYER, lambda: engine_llama_cpp.serve(cases, MIDLAYER, cases.exported("eagle3", "eagle3"))[0]
    yield SPECULATORS, lambda: engine_llama_cpp.serve(cases, SPECULATORS, cases.exported("eagle3", "speculators"))[0]
    for name, method in ((DFLASH, "dflash"), (DSPARK, "dspark")):
        yield (
            name,
            lambda n=name, m=method: engine_llama_cpp.serve(  # type: ignore[misc]
                cases, n, cases.exported(m, "dflash"), f"draft-{m}"
            )[0],
        )
    small = "a small causal LM"
    yield (
        small,
        lambda: engine_llama_cpp.serve(cases, small, cases.exported("draft-model", "causal-lm"), "draft-simple")[0],
    )


def speculators_lines(cases: EngineCases) -> Iterator[tuple[str, Line]]:
    """The same of speculators."""
    for name, form, convert in ((MIDLAYER, "eagle3", True), (SPECULATORS, "speculators", False)):
        yield (
            name,
            lambda n=name, f=form, c=convert: engine_speculators.serve(  # type: ignore[misc]
                cases, n, cases.exported("eagle3", f), convert=c
            ),
        )


def refused_kinds(cases: EngineCases) -> dict[str, dict[str, str]]:
    """What our validator and llama.cpp say of each kind of broken checkpoint."""
    found = {}
    for kind in engine_llama_cpp.BROKEN:
        ours, theirs = engine_llama_cpp.refusals(cases, kind)
        found[kind] = {"ours": ours, "llama.cpp": theirs or TAKEN}
    return found


def measure(cases: EngineCases, work: Path, only: Sequence[str]) -> Iterator[Served]:
    """Every line that can be measured here; a failure is a line that says why."""
    write_glm(cases.target_folder, work / "glm")
    glm_work, model = work / "of-glm", str(work / "glm")
    glm = EngineCases(glm_work, model=model, num_prompts=12, num_train=48, settings={"mtp": OWN_MODULE})
    here: dict[str, Iterator[tuple[str, Line]]] = {
        "speculators": speculators_lines(cases),
        "transformers": iter([(GLM, lambda: engine_transformers.serve(glm, glm.stitched, GLM))]),
        "vLLM": vllm_lines(cases, glm),
        "llama.cpp": llama_cpp_lines(cases),
    }
    for engine, each in here.items():
        if engine not in built():
            print(f"{engine}: not built here (--build builds it), its last record stands", flush=True)
            continue
        for name, line in each:
            if only and not any(word.lower() in f"{engine}: {name}".lower() for word in only):
                continue
            begun = time.monotonic()
            try:
                served = line()
            except Exception as error:  # whatever an engine does, the other lines are still to be measured
                traceback.print_exc()
                served = Served(name, engine, "", "", state="failed", note=" ".join(str(error).split())[:300])
            print(f"{engine}, {name}: {said(served)} ({time.monotonic() - begun:.0f} s)", flush=True)
            yield served


def built() -> list[str]:
    """The engines that can be tried here, as lines of the table begin with them."""
    there = {
        "speculators": (environment() / "bin" / "python").exists(),
        "transformers": True,
        "vLLM": is_ready(vllm_home()),
        "llama.cpp": is_ready(llama_cpp_home()),
    }
    return [engine for engine, ready in there.items() if ready]


def build() -> None:
    """Build what is missing; an engine that cannot be built says why and is left out."""
    builders = ("tests/engines/install_vllm.py",), ("-m", "benchmarks.speculators_environment")
    for builder in (*builders, ("tests/engines/install_llama_cpp.py",)):
        subprocess.run([sys.executable, *builder], cwd=ROOT, check=False)


def said(line: Served) -> str:
    """One line for the terminal."""
    ours, theirs = line.lengths()
    if ours is None or theirs is None:
        return f"{line.state}; {line.note}"
    rounds = "the same rounds" if line.same_rounds else f"{line.different} of {line.compared} answers in other rounds"
    return f"{line.identical} of {line.prompts} texts the same, AL {ours:.3f} / {theirs:.3f}, {rounds}"


def differs(served: Served) -> bool:
    """Whether the engine keeps other tokens or rounds than ours."""
    return bool(served.prompts) and not (served.same_text and served.same_rounds)


def newest() -> dict[str, Any]:
    """The newest record's lines and refusals."""
    files = sorted(RESULTS.glob("engines-*.json"))
    found: dict[str, Any] = json.loads(files[-1].read_text(encoding="utf-8")) if files else {}
    return {name: found.get(name, empty) for name, empty in (("lines", []), ("refused", {}))}


def recorded(lines: Sequence[dict[str, Any]], refused: dict[str, Any] | None = None) -> Path:
    """Write the newest record with these lines, each in the place of the one of its format and engine."""
    now = newest()
    fresh = {(line["format"], line["engine"]) for line in lines}
    kept = [line for line in now["lines"] if (line["format"], line["engine"]) not in fresh]
    return write_record("engines", {"lines": [*kept, *lines], "refused": refused or now["refused"]})


def drop_left_over(run: str) -> None:
    """Drop the lines that a whole run could have measured anew and did not: their format or method is gone."""
    now = newest()
    here = tuple(built())
    lines = [line for line in now["lines"] if line.get("run") == run or not line["engine"].startswith(here)]
    write_record("engines", {"lines": lines, "refused": now["refused"]})


def line_of(record: dict[str, Any]) -> Served:
    """A line as it was recorded."""
    known = {field.name for field in fields(Served)}
    return Served(**{name: tuple(v) if isinstance(v, list) else v for name, v in record.items() if name in known})


def table(lines: Sequence[Served]) -> str:
    """The table of docs/benchmarks.md."""
    rows = ["| format | engine | tried | texts as ours | AL ours / engine | rounds |", "| --- " * 6 + "|"]
    for line in sorted(lines, key=lambda one: (one.format, one.state != "tried", one.engine)):
        ours, theirs = line.lengths()
        lengths = f"{ours:.3f} / {theirs:.3f}" if ours is not None and theirs is not None else "-"
        texts = (
            f"{line.identical} of {line.prompts}" + (f", {line.ties} at a tie" if line.ties else "")
            if line.prompts
            else "-"
        )
        rounds = line.note or "-"
        if line.compared:
            rounds = "the same" if line.same_rounds else f"{line.different} of {line.compared} answers differ"
            rounds += f" ({line.note})" if line.note else ""
        engine = f"{line.engine} {line.version}".strip()
        rows.append(f"| {line.format} | {engine} | {line.state} | {texts} | {lengths} | {rounds} |")
    return "\n".join(rows)


def main() -> int:
    """Measure, record, print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="store_true", help="build the engines that are missing first")
    parser.add_argument("--only", default="", help="by commas, words of `ENGINE: FORMAT`: vllm, llama.cpp, medusa ...")
    parser.add_argument("--work", type=Path, default=None, help="an empty folder to work in, kept afterwards")
    parser.add_argument("--print", action="store_true", dest="shown", help="print the newest record's table")
    asked = parser.parse_args()
    if asked.build:
        build()
    wrong = 0
    if not asked.shown:
        only = [name for name in asked.only.split(",") if name]
        with tempfile.TemporaryDirectory() as folder:
            wrong = measured(_empty(asked.work) if asked.work else Path(folder), only)
    elsewhere = [line_of(line) for line in json.loads(ELSEWHERE.read_text(encoding="utf-8"))]
    lines = newest()["lines"]
    print(table([*map(line_of, lines), *elsewhere]))
    runs = sorted({str(line.get("run", "")) for line in lines})
    print(f"\nmeasured in {len(runs)} run{'s' * (len(runs) != 1)}, the newest {runs[-1] if runs else '-'}")
    return 1 if wrong else 0


def measured(work: Path, only: Sequence[str]) -> int:
    """Measure and record, line by line, since a run takes half an hour; gives the number of lines that are wrong."""
    run = datetime.now(UTC).isoformat(timespec="seconds")
    wrong, cases = 0, EngineCases(work / "builtin")
    for served in measure(cases, work, only):
        recorded([{**as_record(served), "run": run}])
        wrong += served.state != "tried" or differs(served)
    if "llama.cpp" in built() and (not only or "broken" in only):
        refused = refused_kinds(cases)
        recorded([], refused)
        wrong += sum(not said["ours"] or said["llama.cpp"] == TAKEN for said in refused.values())
    if not only:
        drop_left_over(run)
    return wrong


def _empty(folder: Path) -> Path:
    """A folder to work in; raises UserError where it holds something."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UserError(f"--work: {folder} is not empty; name a new folder")
    return folder.resolve()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"engines_table: {error}")
