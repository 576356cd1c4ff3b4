"""Which engine serves which of our formats, tried: the table of the README, from what was measured.

Trains a drafter of each method for a minute, exports it, serves it in every engine that is built here, and holds texts
and rounds against our own loop. Engines that are not built keep the line of the last record; those that need a GPU, or
that were found wanting, are lines of benchmarks/engines_elsewhere.json, which says how they were looked at.

    python -m benchmarks.engines_table [--only vllm,llama.cpp,broken,...] [--work DIR] [--print]

Exit code 1 when an engine keeps other tokens or rounds than ours. --print shows the table of the newest record.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks import engine_llama_cpp, engine_speculators, engine_transformers, engine_vllm
from benchmarks.engine_cases import OWN_MODULE, EngineCases, Served, as_record
from benchmarks.engine_glm import write_glm
from benchmarks.record import RESULTS, write_record
from benchmarks.speculators_environment import environment
from components.contract import UserError
from tests.engines.engine_homes import is_ready, llama_cpp_home, vllm_home

ELSEWHERE = Path(__file__).with_name("engines_elsewhere.json")
MIDLAYER = "EAGLE-3, midlayer.*"
SPECULATORS = "EAGLE-3, speculators"
GLM = "MTP, GLM-4.5's model.layers.N"
MIMO = "MTP, MiMo's model.mtp_layers.0"
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
    parallel = {"method": "eagle3", "parallel_drafting": True}
    yield "P-EAGLE, speculators", drafted("P-EAGLE, speculators", "p-eagle", "speculators", parallel)


def llama_cpp_lines(cases: EngineCases) -> Iterator[tuple[str, Line]]:
    """The same of llama.cpp."""
    yield MIDLAYER, lambda: engine_llama_cpp.serve(cases, MIDLAYER, cases.exported("eagle3", "eagle3"))[0]
    yield SPECULATORS, lambda: engine_llama_cpp.serve(cases, SPECULATORS, cases.exported("eagle3", "speculators"))[0]
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
        found[kind] = {"ours": ours, "llama.cpp": theirs or "takes it"}
    return found


def measure(work: Path, only: Sequence[str]) -> Iterator[Served]:
    """Every line that can be measured here; a failure is a line that says why."""
    cases = EngineCases(work / "builtin")
    write_glm(cases.target_folder, work / "glm")
    glm_work, model = work / "of-glm", str(work / "glm")
    glm = EngineCases(glm_work, model=model, num_prompts=12, num_train=48, settings={"mtp": OWN_MODULE})
    here: dict[str, tuple[bool, Iterator[tuple[str, Line]]]] = {
        "speculators": (environment().is_dir(), speculators_lines(cases)),
        "transformers": (True, iter([(GLM, lambda: engine_transformers.serve(glm, glm.stitched, GLM))])),
        "vLLM": (is_ready(vllm_home()), vllm_lines(cases, glm)),
        "llama.cpp": (is_ready(llama_cpp_home()), llama_cpp_lines(cases)),
    }
    for engine, (ready, each) in here.items():
        if not ready:
            print(f"{engine}: not built here, its last record stands", flush=True)
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


def said(line: Served) -> str:
    """One line for the terminal."""
    ours, theirs = line.lengths()
    if ours is None or theirs is None:
        return f"{line.state}; {line.note}"
    rounds = "the same rounds" if line.same_rounds else f"{line.different} of {line.compared} answers in other rounds"
    return f"{line.identical} of {line.prompts} texts the same, AL {ours:.3f} / {theirs:.3f}, {rounds}"


def differs(served: Served) -> bool:
    """Whether the engine keeps other tokens or rounds than ours.

    A draft model is judged by its texts alone: vLLM keeps a few other drafts of it than our loop does, which the
    table shows.
    """
    return bool(served.prompts) and not (served.same_text and (served.same_rounds or served.method == "draft-model"))


def newest() -> dict[str, Any]:
    """The newest record's lines and refusals."""
    files = sorted(RESULTS.glob("engines-*.json"))
    found: dict[str, Any] = json.loads(files[-1].read_text(encoding="utf-8")) if files else {}
    return {name: found.get(name, empty) for name, empty in (("lines", []), ("refused", {}))}


def recorded(changes: dict[str, Any]) -> Path:
    """Write the newest record with these changes: a line replaces the one of its format and engine."""
    now = newest()
    fresh = {(line["format"], line["engine"]) for line in changes.get("lines", [])}
    kept = [line for line in now["lines"] if (line["format"], line["engine"]) not in fresh]
    lines = [*kept, *changes.get("lines", [])]
    return write_record("engines", {"lines": lines, "refused": changes.get("refused") or now["refused"]})


def line_of(record: dict[str, Any]) -> Served:
    """A line as it was recorded."""
    known = {field.name for field in fields(Served)}
    return Served(**{name: tuple(v) if isinstance(v, list) else v for name, v in record.items() if name in known})


def table(lines: Sequence[Served]) -> str:
    """The README's table."""
    rows = ["| format | engine | tried | texts as ours | AL ours / engine | rounds |", "| --- " * 6 + "|"]
    for line in sorted(lines, key=lambda one: (one.format, one.state != "tried", one.engine)):
        ours, theirs = line.lengths()
        lengths = f"{ours:.3f} / {theirs:.3f}" if ours is not None and theirs is not None else "-"
        texts = (
            f"{line.identical} of {line.prompts}" + (f", {line.ties} at a tie" if line.ties else "")
            if line.prompts
            else "-"
        )
        rounds = "-"
        if line.compared:
            rounds = "the same" if line.same_rounds else f"{line.different} of {line.compared} answers differ"
        rounds = rounds if rounds != "-" else line.note or "-"
        engine = f"{line.engine} {line.version}".strip()
        rows.append(f"| {line.format} | {engine} | {line.state} | {texts} | {lengths} | {rounds} |")
    return "\n".join(rows)


def main() -> int:
    """Measure, record, print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="by commas, words of `ENGINE: FORMAT`: vllm, llama.cpp, medusa ...")
    parser.add_argument("--work", type=Path, default=None, help="an empty folder to work in, kept afterwards")
    parser.add_argument("--print", action="store_true", dest="shown", help="print the newest record's table")
    asked = parser.parse_args()
    elsewhere = [line_of(line) for line in json.loads(ELSEWHERE.read_text(encoding="utf-8"))]
    wrong = 0
    if not asked.shown:
        only = [name for name in asked.only.split(",") if name]
        with tempfile.TemporaryDirectory() as folder:
            work = asked.work or Path(folder)
            work.mkdir(parents=True, exist_ok=True)
            for served in measure(work, only):
                recorded({"lines": [as_record(served)]})
                wrong += served.state != "tried" or differs(served)
            if is_ready(llama_cpp_home()) and (not only or "broken" in only):
                recorded({"refused": refused_kinds(EngineCases(work / "for-broken"))})
    print(table([*map(line_of, newest()["lines"]), *elsewhere]))
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"engines_table: {error}")
