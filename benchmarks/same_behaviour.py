"""Two trees of Draftsmith do the same: `python -m benchmarks.same_behaviour OLD_TREE NEW_TREE [SHARED_DATA]`.

Both run under this interpreter, each from its own tree and with a home of its own, at seed 0:

- the steps of a small `quickstart` (and of a small `eaglechat-mini`, given a folder of chats) that measure nothing, and
  every byte that they write;
- depth, verdict, release and report, made in both trees of the same measurements (those of the old tree);
- every named query over the old tree's history, and `validate` of its release;
- the help of every command and the exit codes of wrong commands.

What differs by design (commit, versions, times, keys) is replaced by a word before it is compared. The record lists
every file and text that differs otherwise.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import write_record

PARAMS = {"train_steps": 60, "num_prompts": 96, "num_test_prompts": 8, "cost_seconds": 5, "measure_seconds": 10}
CHATS = {"english": "alpaca_en.json", "chinese": "alpaca_zh.json"}
MIXES = {"target_steps": 60, "target_width": 96, "num_prompts": 96, "num_test_prompts": 16, "train_steps": 40}
NOT_MEASURING = ("data.", "drafts.", "targets.")
REMADE = ("depth", "verdict", "release", "report")
WRONG = (
    ["run", "quickstrat"],
    ["check", "-f", "no-such-file.yaml"],
    ["run", "quickstart", "-p", "train_stops=3"],
    ["show", "no-such-key"],
    ["query", "no-such-question"],
    ["promote", "no-such-model"],
    ["choose-depth", "no-such-rows.csv"],
    ["plan", "quickstart", "-p", "train_steps=-1"],
)
REMAKE = """
import json, sys
from pathlib import Path
from components import contract, publish, report, speedup
STEPS = {"depth": speedup.choose_depth, "verdict": speedup.confirm_depth, "release": publish.export_release,
         "report": report.write_page}
plan = json.loads(sys.stdin.read())
def handle(item):
    if isinstance(item, list):
        return [handle(inner) for inner in item]
    return contract.KINDS[item["kind"]](key=item["key"], path=Path(item["path"]), info=item["info"])
for name, step in plan.items():
    out = Path(step["out"])
    out.mkdir(parents=True)
    ctx = contract.Context(key=step["key"], out=out, scratch=out.parent / "scratch")
    made = STEPS[name](**{slot: handle(item) for slot, item in step["inputs"].items()}, ctx=ctx)
    (out / "info.json").write_text(json.dumps(dict(made.info), sort_keys=True))
"""


def draftsmith(tree: Path, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of one tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "DRAFTSMITH_HOME": str(home), "COLUMNS": "200"}
    command = [sys.executable, "-c", "import sys; from flows.cli import main; sys.exit(main())", *words]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


def records(home: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folder and artifact.json of every artifact of a home."""
    for file in sorted(home.glob("store/*/artifact.json")):
        yield file.parent, json.loads(file.read_text(encoding="utf-8"))


def by_step(home: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """The artifacts of a home by the step that made them, `draft[method=mtp]` for one of a matrix."""
    return {str(record["record"]["step"]): (folder, record) for folder, record in records(home)}


def neutral(text: str, keys: Mapping[str, str]) -> str:
    """The text without what two trees may differ in: keys, commits, versions, times and folders."""
    for key, name in keys.items():
        text = text.replace(key, name).replace(key[:12], name)
    text = re.sub(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(\+00:00|Z)?", "TIME", text)
    text = re.sub(
        r'"(commit|changed|serial|serialNumber|finished_at|made_at|sha256|size)": *("[^"]*"|[\w.]+)', r'"\1": X', text
    )
    text = re.sub(r"\bcommit [0-9a-f]{7,12}\b", "commit X", text)
    return re.sub(r"\b[0-9a-f]{40,64}\b", "HEX", text)


def files_of(folder: Path, keys: Mapping[str, str]) -> dict[str, str]:
    """A digest of every file of an artifact; of texts, after what may differ is taken out."""
    digests = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "artifact.json"):
        data = file.read_bytes()
        if file.suffix in (".json", ".md", ".html", ".txt", ".jsonl", "") or file.name == "SHA256SUMS":
            data = neutral(data.decode(), keys).encode()
        digests[file.relative_to(folder).as_posix()] = hashlib.sha256(data).hexdigest()[:16]
    return digests


def differing(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Names whose values differ, or that only one of them has."""
    return sorted(name for name in {*old, *new} if old.get(name) != new.get(name))


def made_by_running(
    trees: tuple[Path, Path], homes: tuple[Path, Path], pipeline: str, params: Mapping[str, Any], *words: str
) -> dict[str, Any]:
    """Run a pipeline in both trees and compare what its steps wrote that measure nothing."""
    words = (*words, *(word for name, value in params.items() for word in ("-p", f"{name}={value}")))
    for tree, home in zip(trees, homes, strict=True):
        done = draftsmith(tree, home, "run", pipeline, "--direct", *words)
        assert done.returncode == 0, done.stdout[-800:] + done.stderr[-800:]
    old, new = (by_step(home) for home in homes)
    assert old.keys() == new.keys(), sorted(old.keys() ^ new.keys())
    result: dict[str, Any] = {}
    for step, (folder, record) in old.items():
        if str(record["record"]["uses"]).startswith(NOT_MEASURING):
            other, theirs = new[step]
            wrong = differing(files_of(folder, {}), files_of(other, {}))
            if neutral(json.dumps(record["info"]), {}) != neutral(json.dumps(theirs["info"]), {}):
                wrong.append("info")
            result[step] = {"files": len(files_of(folder, {})), "differ": wrong}
    return result


def made_of_the_same(trees: tuple[Path, Path], home: Path, scratch: Path) -> dict[str, Any]:
    """Depth, verdict, release and report, made in both trees of what the old tree measured."""
    steps = by_step(home)
    by_key = {record["key"]: (folder, record) for folder, record in steps.values()}

    def handle(key: str | list[str]) -> Any:
        if isinstance(key, list):
            return [handle(inner) for inner in key]
        folder, record = by_key[key]
        return {"kind": record["kind"], "key": key, "path": str(folder), "info": record["info"]}

    outs = []
    for number, tree in enumerate(trees):
        plan = {}
        for name in REMADE:
            _, record = steps[name]
            inputs = {slot: handle(key) for slot, key in record["record"]["inputs"].items()}
            plan[name] = {"key": record["key"], "inputs": inputs, "out": str(scratch / str(number) / name)}
        environment = {**os.environ, "PYTHONPATH": str(tree), "DRAFTSMITH_HOME": str(home)}
        subprocess.run(
            [sys.executable, "-c", REMAKE], input=json.dumps(plan), cwd=tree, env=environment, text=True, check=True
        )
        outs.append({name: files_of(Path(plan[name]["out"]), {}) for name in REMADE})
    return {name: {"files": len(outs[0][name]), "differ": differing(outs[0][name], outs[1][name])} for name in REMADE}


def said_alike(trees: tuple[Path, Path], homes: tuple[Path, Path]) -> dict[str, Any]:
    """Queries and validation over the old home, help, exit codes, and plans, each over its own home.

    Rows of queries are compared in any order, since rows of the same moment have none; the line of help that names a
    page of docs/ is new.
    """
    home = homes[0]
    listed = draftsmith(trees[0], home, "query", "--list").stdout
    release = next(folder for folder, record in records(home) if record["kind"] == "Release")
    target = next(folder for folder, record in records(home) if record["kind"] == "Target")
    commands = re.findall(r"^  ([a-z-]+) ", draftsmith(trees[0], home, "--help").stdout, re.MULTILINE)
    asked = {
        "queries": [["query", name] for name in re.findall(r"^([a-z][\w-]+)", listed, re.MULTILINE)],
        "validate": [["validate", str(file.parent), "--target", str(target)] for file in release.glob("*/config.json")],
        "help": [["--help"], *([name, "--help"] for name in commands)],
        "wrong commands": [*WRONG],
        "plans": [["check"], ["plan", "quickstart"], ["plan", "compare-methods"]],
    }
    result: dict[str, Any] = {}
    for group, lines in asked.items():
        texts: list[dict[str, str]] = [{}, {}]
        for words in lines:
            for tree, own_home, answers in zip(trees, homes, texts, strict=True):
                done = draftsmith(tree, own_home if group == "plans" else home, *words)
                shown = f"{done.returncode}\n{done.stdout}\n{done.stderr}".replace(str(tree), "TREE")
                shown = re.sub(r"\n*  More: docs/[a-z-]+\.md\n| \(docs: [a-z-]+\)", "", shown)
                lines_of = re.sub(r"\b[0-9a-f]{8,64}\b", "KEY", neutral(shown, {})).rstrip().splitlines()
                answers[" ".join(words)] = "\n".join(sorted(lines_of) if group == "queries" else lines_of)
        wrong = {name: [text.get(name, "")[:2000] for text in texts] for name in differing(*texts)}
        result[group] = {"texts": len(lines), "differ": wrong}
    return result


def main() -> None:
    """Compare, print a line for each part, and write the record."""
    trees = (Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
    with tempfile.TemporaryDirectory() as folder:
        homes = (Path(folder) / "old", Path(folder) / "new")
        parts: dict[str, Any] = {}
        if len(sys.argv) > 3:
            chats = {name: Path(sys.argv[3]).resolve() / file for name, file in CHATS.items()}
            mixed = (Path(folder) / "old-mixed", Path(folder) / "new-mixed")
            parts["eaglechat-mini"] = made_by_running(trees, mixed, "eaglechat-mini", chats | MIXES, "--to", "draft")
        parts["quickstart"] = made_by_running(trees, homes, "quickstart", PARAMS)
        parts["of the same measurements"] = made_of_the_same(trees, homes[0], Path(folder) / "remade")
        parts |= said_alike(trees, homes)
    for part, found in parts.items():
        print(part, json.dumps(found, indent=1)[:3000])
    print(f"written: {write_record('same-behaviour', {'parts': parts})}")


if __name__ == "__main__":
    main()
