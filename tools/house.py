"""Measure the shape of the house: `python tools/house.py [ROOT]` prints a line for each measure, with its bar.

It reads flows/, components/ and storage/ as text and runs nothing of the project. With `--check` it exits 1 when a
measure falls short of its bar; a measure of NOT_YET has a bar of its own until it reaches the real one, so that it can
only get better. `-v` names the places behind every measure.
"""

from __future__ import annotations

import ast
import collections
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOMS = ("flows", "components", "storage")
AT_MOST = {
    "files": 290,
    "lines": 50_000,
    "file lines max": 800,
    "function lines p95": 60,
    "fullest folder": 20,
    "circles by any import": 0,
    "imports inside functions": 90,
    "files with TYPE_CHECKING": 10,
    "files with one user": 45,
    "odd names per 1000 lines": 2,
    "records as dict[str, Any]": 250,
    "functions of more than 8 positional arguments": 0,
}
AT_LEAST = {"file lines p50": 170, "signatures typed %": 99, "tests of the same name %": 90}
NOT_YET: dict[str, float] = {
    "files": 384,
    "lines": 85_480,
    "files with one user": 100,
}
"""Measures that are short of their bar, with the value that must not get worse."""
# fmt: off
ODD_NAMES = {
    "said", "told", "asked", "found", "known", "kept", "own", "wanted", "chosen", "given", "mine", "ours", "theirs",
    "there", "made", "taken", "why", "where", "left", "gone", "seen", "dealt", "reached", "opened", "begun",
    "ended", "held", "shown", "judged", "going_on", "said_in", "told_of",
}
# fmt: on
"""Participles and pronouns that name no object, where a noun of the field would."""


@dataclass
class House:
    """What was read of all files.

    edges: module -> the modules of the house that it imports, anywhere in the file. inside: imports in each file's
    functions. positional: functions of more than eight positional parameters.
    """

    root: Path
    modules: dict[str, Path] = field(default_factory=dict)
    edges: dict[str, set[str]] = field(default_factory=dict)
    line_counts: dict[Path, int] = field(default_factory=dict)
    function_lines: list[int] = field(default_factory=list)
    typed: list[bool] = field(default_factory=list)
    odd: collections.Counter[str] = field(default_factory=collections.Counter)
    dicts: collections.Counter[str] = field(default_factory=collections.Counter)
    inside: collections.Counter[str] = field(default_factory=collections.Counter)
    checking: list[str] = field(default_factory=list)
    positional: list[str] = field(default_factory=list)


def module_of(path: Path) -> str:
    """The dotted name of a file below the root."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_house(root: Path) -> House:
    """Every file of the rooms, parsed."""
    house = House(root)
    files = sorted(path.relative_to(root) for room in ROOMS for path in (root / room).rglob("*.py"))
    house.modules = {module_of(path): path for path in files}
    house.edges = {module: set() for module in house.modules}
    for module, path in house.modules.items():
        text = (root / path).read_text(encoding="utf-8")
        house.line_counts[path] = len(text.splitlines())
        house.dicts[str(path)] = len(re.findall(r"(?:dict|Mapping|Dict)\[str, Any\]", text))
        if "TYPE_CHECKING" in text:
            house.checking.append(str(path))
        for node in ast.walk(ast.parse(text)):
            _read_node(house, module, path, node)
    return house


def _read_node(house: House, module: str, path: Path, node: ast.AST) -> None:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        doc = ast.get_docstring(node, clean=False)
        assert node.end_lineno is not None
        house.function_lines.append(node.end_lineno - node.lineno + 1 - (doc.count("\n") + 1 if doc else 0))
        positional = [a for a in node.args.posonlyargs + node.args.args if a.arg not in ("self", "cls")]
        house.typed.append(node.returns is not None and all(a.annotation for a in positional + node.args.kwonlyargs))
        if len(positional) > 8:
            house.positional.append(f"{path}:{node.name} ({len(positional)})")
        house.inside[str(path)] += sum(isinstance(inner, ast.Import | ast.ImportFrom) for inner in ast.walk(node))
        house.odd[str(path)] += node.name in ODD_NAMES
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        house.odd[str(path)] += node.id in ODD_NAMES
    elif isinstance(node, ast.arg):
        house.odd[str(path)] += node.arg in ODD_NAMES
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        house.edges[module] |= {
            name
            for name in names
            if name in house.modules and name != module and house.modules[name].name != "__init__.py"
        }
    elif isinstance(node, ast.Import):
        house.edges[module] |= {a.name for a in node.names if a.name in house.modules and a.name != module}


def circles(edges: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Groups of modules that reach each other, the largest first found."""
    reach: dict[str, set[str]] = {}
    for start in edges:
        reached: set[str] = set()
        waiting = [*edges[start]]
        while waiting:
            module = waiting.pop()
            if module not in reached:
                reached.add(module)
                waiting += edges[module]
        reach[start] = reached
    grouped: set[str] = set()
    for module in sorted(edges):
        if module in reach[module] and module not in grouped:
            group = sorted(other for other in reach[module] if module in reach[other])
            grouped |= {*group}
            yield group


def measures(house: House) -> tuple[dict[str, float], dict[str, Sequence[str]]]:
    """Every measure by name, and for each the places behind it, the worst first."""
    named = {module: path for module, path in house.modules.items() if path.name != "__init__.py"}
    sizes = [n for path, n in house.line_counts.items() if path.name != "__init__.py" or n > 15]
    lines = sum(house.line_counts.values())
    folders = collections.Counter(str(path.parent) for path in named.values())
    users = collections.Counter(user for targets in house.edges.values() for user in targets)
    tests = {path.name for path in (house.root / "tests").rglob("test_*.py")}
    untested = [
        str(path)
        for path in named.values()
        if not {f"test_{path.name}", f"test_{path.parent.name}_{path.name}"} & tests
    ]
    lonely = [module for module in named if users[module] == 1]
    groups = [" <-> ".join(group) for group in circles(house.edges)]
    values = {
        "files": len(sizes),
        "lines": lines,
        "file lines p50": statistics.median(sizes),
        "file lines max": max(sizes),
        "function lines p95": sorted(house.function_lines)[int(0.95 * len(house.function_lines))],
        "fullest folder": max(folders.values()),
        "circles by any import": len(groups),
        "imports inside functions": house.inside.total(),
        "files with TYPE_CHECKING": len(house.checking),
        "files with one user": len(lonely),
        "odd names per 1000 lines": round(1000 * house.odd.total() / lines, 1),
        "records as dict[str, Any]": house.dicts.total(),
        "signatures typed %": round(100 * sum(house.typed) / len(house.typed), 1),
        "tests of the same name %": round(100 - 100 * len(untested) / len(named), 1),
        "functions of more than 8 positional arguments": len(house.positional),
    }
    places: dict[str, Sequence[str]] = {
        "file lines max": [f"{n} {path}" for path, n in sorted(house.line_counts.items(), key=lambda item: -item[1])],
        "fullest folder": [f"{n} {folder}" for folder, n in folders.most_common()],
        "circles by any import": groups,
        "imports inside functions": [f"{n} {path}" for path, n in house.inside.most_common() if n],
        "files with TYPE_CHECKING": house.checking,
        "files with one user": lonely,
        "odd names per 1000 lines": [f"{n} {path}" for path, n in house.odd.most_common() if n],
        "records as dict[str, Any]": [f"{n} {path}" for path, n in house.dicts.most_common() if n],
        "tests of the same name %": untested,
        "functions of more than 8 positional arguments": house.positional,
    }
    return values, places


def main() -> int:
    """Print the measures; 1 with --check when one falls short."""
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    values, places = measures(read_house(Path(arguments[0] if arguments else ".")))
    wrong = 0
    for name, value in values.items():
        bar = AT_MOST[name] if name in AT_MOST else AT_LEAST[name]
        reached = value <= bar if name in AT_MOST else value >= bar
        limit = NOT_YET.get(name, bar)
        allowed = value <= limit if name in AT_MOST else value >= limit
        wrong += not allowed
        state = "ok" if reached else "not yet" if allowed else "SHORT"
        print(f"{state:<8}{name:<48}{value:>9}   {'at most' if name in AT_MOST else 'at least'} {bar}")
        if state == "SHORT" or "-v" in sys.argv:
            for place in places.get(name, ())[: None if "-v" in sys.argv else 10]:
                print(f"            {place}")
    return 1 if wrong and "--check" in sys.argv else 0


if __name__ == "__main__":
    raise SystemExit(main())
