"""The rules of the house, kept by a test, because a rule nobody checks is a wish."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("flows", "components", "storage")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
OWN_TESTS = sorted((ROOT / "tests").rglob("*.py"))

# What each room of components/ may import from the others (contract and rows are open to all).
COMPONENT_ORDER = ["targets", "data", "drafts", "decoding", "bench"]
MAY_SEE = {room: set(COMPONENT_ORDER[: i + 1]) for i, room in enumerate(COMPONENT_ORDER)}
MAY_SEE["publish"] = {"targets", "data", "drafts", "decoding", "publish"}
MAY_SEE["speedup"] = {"speedup"}
MAY_SEE["bench"].add("speedup")  # arithmetic on rows: when a measurement may end
MAY_SEE["report"] = {"report"}

ONLY_IN = {
    "prefect": {
        "flows/orchestration/flow.py",
        "flows/orchestration/ui_artifacts.py",
        "flows/orchestration/approval.py",
        "flows/catalog.py",
        "flows/orchestration/deployments.py",
        "flows/orchestration/server_app.py",
        "flows/orchestration/event_watcher.py",
        "flows/execution/clusters.py",
    },
    "prefect_dask": {"flows/execution/clusters.py"},
    "prefect_ray": {"flows/execution/clusters.py"},
    "mlflow": {
        "storage/registry/tracking.py",
        "storage/registry/registry.py",
        "storage/registry/evidence.py",
        "storage/registry/aliases.py",
        "storage/registry/versions.py",
        "components/publish/release/mlflow_model.py",
        "flows/services/mlflow_server.py",
    },
    "duckdb": {"storage/history/query.py"},
}
TORCH_FREE = ("flows/", "storage/", "components/speedup/", "components/report/")
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "core", "base", "misc"}
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 90


def where(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(tree: ast.AST) -> set[str]:
    """Every module named by an import anywhere in the tree, in dotted form."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring: explaining every setting must not cost a function its room."""
    assert function.end_lineno is not None
    length = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) and first.end_lineno is not None:
        length -= first.end_lineno - first.lineno + 1
    return length


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", SOURCES, ids=where)
def test_imports_go_one_way(path: Path) -> None:
    here = where(path)
    room, *rest = here.split("/")
    for name in imported(parse(path)):
        top, *inner = name.split(".")
        assert top != "tests", f"{here} imports {name}"
        if room == "components":
            assert top not in ("flows", "storage"), f"{here} imports {name}"
            if top == "components" and len(rest) > 1 and inner and inner[0] in MAY_SEE:
                assert inner[0] in MAY_SEE[rest[0]], f"{here} imports {name}, which stands above it"
        if room == "storage":
            assert top != "flows", f"{here} imports {name}"
            if top == "components" and inner:
                assert inner[0] in ("contract", "rows", "escapes", "promotion", "outside_json"), (
                    f"{here} imports {name}"
                )
        if top in ONLY_IN:
            assert here in ONLY_IN[top], f"{here} imports {name}, allowed only in {sorted(ONLY_IN[top])}"
        if top == "torch":
            assert not here.startswith(TORCH_FREE), f"{here} imports torch"


@pytest.mark.parametrize("path", SOURCES, ids=where)
def test_files_and_functions_fit_on_a_page(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert path.stem not in FORBIDDEN_NAMES, f"{where(path)}: name it after its idea"
    assert len(text.splitlines()) <= MAX_FILE_LINES, f"{where(path)} has {len(text.splitlines())} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = code_lines(node)
            assert length <= MAX_FUNCTION_LINES, f"{where(path)}:{node.lineno} {node.name} has {length} lines"


@pytest.mark.parametrize("path", SOURCES, ids=where)
def test_every_file_says_its_idea_first(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), f"{where(path)} has no docstring"


@pytest.mark.parametrize("path", [p for p in SOURCES if "__init__" not in p.name], ids=where)
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for pattern in (r"\btorch\.load\(", r"\bpickle\b\.", r"yaml\.load\(", r"shell=True", r"trust_remote_code=True"):
        assert not re.search(pattern, text), f"{where(path)} contains {pattern}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec"), f"{where(path)}:{node.lineno}"


@pytest.mark.parametrize("path", SOURCES + OWN_TESTS, ids=where)
def test_no_fault_is_swallowed(path: Path) -> None:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ExceptHandler):
            silent = all(isinstance(line, ast.Pass) for line in node.body)
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            assert not (silent and broad), f"{where(path)}:{node.lineno} swallows every fault"


def steps() -> list[str]:
    pipelines = yaml.safe_load((ROOT / "pipelines.yaml").read_text(encoding="utf-8"))["pipelines"]
    return sorted({step["uses"] for pipeline in pipelines.values() for step in pipeline["steps"].values()})


@pytest.mark.parametrize("address", steps())
def test_every_step_explains_every_setting(address: str) -> None:
    room, name = address.split(".")
    function = getattr(importlib.import_module(f"components.{room}"), name)
    documented = inspect.getdoc(function) or ""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in ("ctx", "machine"):
            assert re.search(rf"^\s+{parameter.name}: \S", documented, re.MULTILINE), f"{address}: {parameter.name}"
        assert parameter.kind is not parameter.VAR_KEYWORD, f"{address} takes **{parameter.name}"


@pytest.mark.parametrize("path", SOURCES, ids=where)
def test_everything_public_is_typed(path: Path) -> None:
    for node in ast.walk(parse(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            bare = [a.arg for a in args if a.annotation is None and a.arg not in ("self", "cls")]
            assert not bare, f"{where(path)}:{node.lineno} {node.name}: untyped {bare}"
            assert node.returns is not None, f"{where(path)}:{node.lineno} {node.name}: no return type"


def test_reading_the_steps_loads_nothing_heavy() -> None:
    rooms = sorted({address.split(".")[0] for address in steps()})
    program = "import sys\n" + "".join(f"import components.{room}\n" for room in rooms)
    program += "import flows.cli\n"
    heavy = ("torch", "transformers", "datasets", "prefect", "mlflow", "duckdb", "numpy")
    program += f"print([module for module in {heavy} if module in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
