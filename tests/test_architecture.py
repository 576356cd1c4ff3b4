"""The rules of the house, kept by a test, because a rule nobody checks is a wish."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import yaml

from tools.house import circles, read_house

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("flows", "components", "storage")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
OWN_TESTS = sorted((ROOT / "tests").rglob("*.py"))

# What each room of components/ may import from the others. Files directly in components/ are the ground floor: open to
# all, and they import no room.
COMPONENT_ORDER = ["engines", "targets", "data", "drafts", "decoding", "bench"]
MAY_SEE = {room: set(COMPONENT_ORDER[: i + 1]) for i, room in enumerate(COMPONENT_ORDER)}
MAY_SEE["publish"] = {"engines", "targets", "data", "drafts", "decoding", "publish"}
MAY_SEE["pipeline_checks"] = {"engines", "targets", "data", "drafts", "pipeline_checks"}
MAY_SEE["speedup"] = {"speedup"}
MAY_SEE["bench"].add("speedup")  # arithmetic on rows: when a measurement may end
MAY_SEE["report"] = {"report"}

ONLY_IN = {
    "prefect": ("flows/orchestration/", "flows/catalog.py", "flows/execution/clusters.py"),
    "prefect_dask": ("flows/execution/clusters.py",),
    "prefect_ray": ("flows/execution/clusters.py",),
    "mlflow": ("storage/registry/", "components/publish/release/mlflow_model.py", "flows/services/mlflow_server.py"),
    "duckdb": ("storage/history/query.py", "storage/history/export.py"),
}
TORCH_FREE = ("flows/", "storage/", "components/speedup/", "components/report/")
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "core", "base", "misc"}
MAX_FILE_LINES = 800
MIN_FILE_LINES = 40
MAX_FUNCTION_LINES = 90
MAX_FILES = 20
EXTRAS = {
    "prefect_dask",
    "prefect_ray",
    "ray",
    "phonenumbers",
    "detect_secrets",
    "asyncpg",
    "psycopg2",
    "boto3",
    "s3fs",
    "hs_connectors",
}
"""Packages that need not be installed: imported where they are used."""
LATE: dict[str, str] = {
    "components/data/sources/tables.py": "`datasets` takes seconds to load, and few sources are data sets of a hub",
    "flows/commands/check.py": "`plan --on` sizes models and drafters with torch, `check` and `plan` answer at once",
    "flows/commands/inspect.py": "`validate` needs torch, `show` and `query` do not",
    "flows/commands/homes.py": "charts take a second to load, and `du`, `gc` and `backup` draw none",
    "flows/commands/rehearse.py": "as `plan --on`; `night` runs a night without it",
    "flows/commands/removal.py": "prepare() prepares Prefect's settings",
    "flows/commands/run.py": "Prefect's settings are read from the environment that prefect_server() prepares",
    "flows/commands/services.py": "prepare() prepares Prefect's settings; `status` does without what `doctor` examines",
    "components/speedup/imported/rows.py": "choose-depth answers at once, and few rows are Parquet files",
    "components/pipeline_checks/verdict_prompts.py": "reading rows loads pyarrow, and few pipelines have a small file",
    "components/publish/release/mlflow_model.py": "MLflow runs it when it logs a version, which needs no torch",
    "components/drafts/training/sharding.py": "FSDP2 takes a second to load, and few drafters are trained in shares",
    "components/targets/quantised.py": "transformers' quantisers take a second to load, and few targets need them",
    "components/targets/source.py": "a plan reads where a target is; few targets come from a hub",
    "flows/execution/step_process.py": "a step's process needs Prefect only where a cluster carries its shards",
    "flows/orchestration/event_watcher.py": "Prefect's settings are read from the environment that main() prepares",
    "flows/planning/external_inputs.py": "a plan without registered versions needs no DuckDB and no MLflow",
    "flows/services/mlflow_server.py": "MLflow's app reads the environment that create_app() prepares",
    "storage/artifacts/remote.py": "a home without a shared store needs no fsspec",
    "storage/registry/tracking.py": "MLflow takes a second to load; a run that logs nothing does without",
}
"""Files with imports in functions, and why."""
SPLINTERS: dict[str, str] = {
    "flows/catalog.py": "the address of every deployment in users' Prefect servers",
    "flows/execution/preload.py": "the module that multiprocessing's fork server is told to import",
    "flows/orchestration/server_app.py": "uvicorn's entry point for Prefect's app",
}
"""Files under 40 lines, and why they stand alone."""


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


@cache
def parse(path: Path) -> ast.Module:
    """The tree of a file; nobody changes it."""
    return ast.parse(path.read_text(encoding="utf-8"))


def of_each(paths: Sequence[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Makes one test of a rule of files; it tells every file that breaks it."""

    def decorate(rule: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            assert len(paths) > 300, "the files were not found"
            faults = []
            for path in paths:
                try:
                    rule(path)
                except AssertionError as fault:
                    faults.append(str(fault))
            assert not faults, "\n".join(faults)

        return test

    return decorate


@of_each(SOURCES)
def test_imports_go_one_way(path: Path) -> None:
    here = where(path)
    room, *rest = here.split("/")
    for name in imported(parse(path)):
        top, *inner = name.split(".")
        assert top != "tests", f"{here} imports {name}"
        if room == "components":
            assert top not in ("flows", "storage"), f"{here} imports {name}"
            if len(rest) == 1 and top == "components" and inner:
                assert not (ROOT / "components" / inner[0]).is_dir(), f"{here} imports the room of {name}"
            if top == "components" and len(rest) > 1 and inner and inner[0] in MAY_SEE:
                assert inner[0] in MAY_SEE[rest[0]], f"{here} imports {name}, which stands above it"
        if room == "storage":
            assert top != "flows", f"{here} imports {name}"
            if top == "components" and inner and (ROOT / "components" / inner[0]).is_dir():
                raise AssertionError(f"{here} imports {name}: of components/ storage knows the ground floor alone")
        if top in ONLY_IN:
            assert here.startswith(ONLY_IN[top]), f"{here} imports {name}, allowed only in {ONLY_IN[top]}"
        if top == "torch":
            assert not here.startswith(TORCH_FREE), f"{here} imports torch"


def test_no_files_import_each_other() -> None:
    assert [" <-> ".join(group) for group in circles(read_house(ROOT).edges)] == []


@of_each(SOURCES)
def test_imports_stand_at_the_top(path: Path) -> None:
    here = where(path)
    if path.name == "steps.py":
        return
    for function in ast.walk(parse(path)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names = (
                        {alias.name for alias in node.names} if isinstance(node, ast.Import) else {node.module or ""}
                    )
                    extra = {name.split(".")[0] for name in names} <= EXTRAS
                    assert extra or here in LATE, f"{here}:{node.lineno} imports {sorted(names)} in a function"


def test_folders_are_small_and_flat() -> None:
    for folder in {path.parent for path in SOURCES}:
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= MAX_FILES, f"{where(folder)} holds {len(files)} files"
        assert len(folder.relative_to(ROOT).parts) <= 4, f"{where(folder)} lies too deep"


def test_no_file_is_a_splinter() -> None:
    small = {where(path) for path in SOURCES if len(path.read_text().splitlines()) < MIN_FILE_LINES}
    assert {name for name in small if not name.endswith("__init__.py")} - {*SPLINTERS} == set()


def test_names_of_test_files_are_unique_and_no_test_imports_a_test() -> None:
    names = [path.name for path in OWN_TESTS if path.name.startswith("test_")]
    assert [name for name in {*names} if names.count(name) > 1] == []
    for path in OWN_TESTS:
        tests = [name for name in imported(parse(path)) if name.startswith("test_")]
        assert not tests, f"{where(path)} imports {tests}"


@of_each(SOURCES)
def test_files_and_functions_fit_on_a_page(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert path.stem not in FORBIDDEN_NAMES, f"{where(path)}: name it after its idea"
    assert len(text.splitlines()) <= MAX_FILE_LINES, f"{where(path)} has {len(text.splitlines())} lines"
    for node in ast.walk(parse(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = code_lines(node)
            assert length <= MAX_FUNCTION_LINES, f"{where(path)}:{node.lineno} {node.name} has {length} lines"


@of_each(SOURCES)
def test_every_file_says_its_idea_first(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if text.strip():
        assert ast.get_docstring(parse(path)), f"{where(path)} has no docstring"


@of_each([path for path in SOURCES if "__init__" not in path.name])
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for pattern in (r"\btorch\.load\(", r"\bpickle\b\.", r"yaml\.load\(", r"shell=True", r"trust_remote_code=True"):
        assert not re.search(pattern, text), f"{where(path)} contains {pattern}"
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec"), f"{where(path)}:{node.lineno}"


@of_each(SOURCES + OWN_TESTS)
def test_no_fault_is_swallowed(path: Path) -> None:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ExceptHandler):
            silent = all(isinstance(line, ast.Pass) for line in node.body)
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            assert not (silent and broad), f"{where(path)}:{node.lineno} swallows every fault"


def steps() -> list[str]:
    """The addresses of all steps: those that rooms offer and those that pipelines.yaml uses."""
    pipelines = yaml.safe_load((ROOT / "pipelines.yaml").read_text(encoding="utf-8"))["pipelines"]
    addresses = {step["uses"] for pipeline in pipelines.values() for step in pipeline["steps"].values()}
    for room in sorted(path.parent.name for path in ROOT.glob("components/*/steps.py")):
        offered = vars(importlib.import_module(f"components.{room}")).items()
        addresses |= {f"{room}.{name}" for name, item in offered if inspect.isfunction(item) and name[0] != "_"}
    return sorted(addresses)


@pytest.mark.parametrize("address", steps())
def test_every_step_explains_every_setting(address: str) -> None:
    room, name = address.split(".")
    function = getattr(importlib.import_module(f"components.{room}"), name)
    documented = inspect.getdoc(function) or ""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in ("ctx", "machine"):
            assert re.search(rf"^\s+{parameter.name}: \S", documented, re.MULTILINE), f"{address}: {parameter.name}"
        assert parameter.kind is not parameter.VAR_KEYWORD, f"{address} takes **{parameter.name}"


@of_each(SOURCES)
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
    heavy = ("torch", "transformers", "datasets", "prefect", "mlflow", "duckdb", "numpy", "pyarrow", "httpx")
    program += f"print([module for module in {heavy} if module in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
