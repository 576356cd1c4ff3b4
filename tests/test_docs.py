"""The documentation says what is true: links hold, examples work, commands and options exist.

It needs neither mkdocs nor the network. A code block with a title is a file; a whole pipeline is checked with the files
of its page beside it.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import random
import re
import shlex
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt
import pytest
import yaml
from random_rows import random_session
from report_study import make_report_study
from two_nights import two_nights

from components.contract import Context, Prompts
from components.rows import write_rows
from flows.cli import main
from flows.planning.step_signature import resolve
from storage.artifacts.store import Store
from storage.history.export import export_history
from storage.history.query import named_queries, query, view_names
from storage.history.write import record_artifact
from tools import docs_reference
from tools.docs_reference import command_table, history_columns, link_steps, pages, step_addresses

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r'^```(\w*)(?: title="([^"]+)")?[^\n]*\n(.*?)^```$', re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
GENERATED = "reference/"
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


class Block(NamedTuple):
    """A code block of a page. title: the file that it is, or ""."""

    page: Path
    language: str
    title: str
    text: str


def blocks(*languages: str) -> list[Block]:
    """Every block in one of these languages."""
    found = [Block(page, *match) for page in PAGES for match in BLOCK.findall(page.read_text(encoding="utf-8"))]
    return [block for block in found if block.language in languages]


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def anchors(markdown: str) -> set[str]:
    """The anchors of a page's headings, as mkdocs and GitHub make them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", BLOCK.sub("", markdown), re.MULTILINE):
        given = re.search(r"\{#(\S+)\}$", heading)
        plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
        found.add(given[1] if given else re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    """The pages that are made when the site is built."""
    return pages()


@each_page
def test_links_hold(page: Path, generated: dict[str, str]) -> None:
    for target in LINK.findall(prose(page)):
        if re.match(r"https?://", target):
            continue
        address, _, anchor = target.partition("#")
        place = (page.parent / address).resolve() if address else page
        if page.parent.name == "docs" and address.startswith(GENERATED):
            content = generated.get(address, "")
        else:
            assert place.is_file(), f"{page.name} links to {target}, which is not there"
            content = place.read_text(encoding="utf-8") if place.suffix == ".md" else ""
        assert content or place.suffix != ".md", f"{page.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors(content), f"{page.name} links to {target}: no such heading"
        if page.parent.name == "docs" and not address.startswith(GENERATED):
            assert place.is_relative_to(ROOT / "docs"), f"{target} of {page.name} leads out of the site"


def test_every_page_is_in_the_navigation(generated: dict[str, str]) -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = {
        address for part in config["nav"] for item in part.values() for entry in item for address in entry.values()
    }
    assert listed == {path.name for path in PAGES if path.parent.name == "docs"} | {*generated, "changelog.md"}


def test_the_reference_has_every_step_and_setting_with_its_meaning(generated: dict[str, str]) -> None:
    text = generated["reference/steps.md"]
    for address in (address for addresses in step_addresses().values() for address in addresses):
        section = text.split(f"{{#{address}}}")[1].split("\n### ")[0]
        for name in [*resolve(address).slots, *resolve(address).setting_names]:
            assert f"| `{name}` |" in section, f"{address}: {name} is not in the reference"
    assert "`[`drafts" not in link_steps("`drafts.train_draft` [`drafts.train_draft`](x)", "")


def test_every_setting_of_a_method_has_a_meaning(generated: dict[str, str]) -> None:
    rows = [line for line in generated["reference/method-settings.md"].splitlines() if line.startswith("| `")]
    assert len(rows) > 40
    assert [row for row in rows if row.endswith("|  |")] == []


def placeholders(folder: Path, text: str) -> None:
    """Files and folders that a pipeline names, with something in them."""
    row = json.dumps({"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]})
    for name in re.findall(r"[\w./-]+\.jsonl", text):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(row + "\n", encoding="utf-8")
    for block in blocks("csv"):
        (folder / block.title).write_text(block.text, encoding="utf-8")


@pytest.fixture
def packages_of_pages() -> Iterator[None]:
    """Packages that a page shows are imported anew by the next test."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "mysteps":
            del sys.modules[name]


def page_files(folder: Path, page: Path) -> list[str]:
    """Write the titled blocks of a page; the packages among them."""
    packages = []
    for block in blocks("python", "yaml", "csv"):
        if block.page == page and block.title:
            place = folder / block.title
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(block.text, encoding="utf-8")
            if place.name == "__init__.py":
                packages.append(place.relative_to(folder).parts[0])
    return packages


WHOLE = [block for block in blocks("yaml") if block.text.startswith("pipelines:")]
PARTS = [block for block in blocks("yaml") if not block.text.startswith("pipelines:")]


@pytest.mark.usefixtures("packages_of_pages")
@pytest.mark.parametrize("block", WHOLE, ids=lambda block: block.page.name)
def test_whole_pipelines_are_right(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "home"))
    monkeypatch.syspath_prepend(str(tmp_path))
    packages = ("components", *page_files(tmp_path, block.page))
    placeholders(tmp_path, block.text)
    (tmp_path / "pipelines.yaml").write_text(block.text, encoding="utf-8")
    code = main(["check"], packages=packages)
    assert code == 0, capfd.readouterr().err


@pytest.mark.parametrize("block", PARTS, ids=lambda block: f"{block.page.name}:{block.text[:20]}")
def test_parts_of_pipelines_name_steps_inputs_and_settings_that_exist(block: Block) -> None:
    content = yaml.safe_load(block.text)
    steps = [step for step in content.values() if isinstance(step, dict) and "uses" in step]
    assert steps or set(content) <= {"overlap", "approval", "retry", "notify", "triggers", "retention"}
    for step in steps:
        function = resolve(step["uses"])
        assert set(step.get("in", {})) <= set(function.slots), f"{block.page.name}: inputs of {step['uses']}"
        assert {name for name, slot in function.slots.items() if not slot.optional} <= set(step.get("in", {}))
        settings = {k: v for k, v in step.get("with", {}).items() if not (isinstance(v, str) and "${" in v)}
        inserted = {
            axis: step["matrix"][axis][0]
            for axis, value in step.get("with", {}).items()
            if value == f"${{matrix.{axis}}}"
        }
        assert function.settings({**settings, **inserted})[1] == [], f"{block.page.name}: settings of {step['uses']}"


@pytest.mark.usefixtures("packages_of_pages")
def test_the_step_of_ones_own_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (package,) = page_files(tmp_path, ROOT / "docs" / "extend.md")
    step = importlib.import_module(f"{package}.mine").keep_short
    for name in ("given", "out"):
        (tmp_path / name).mkdir()
    rows = [json.dumps({"prompt": "x" * length}) for length in (10, 500)]
    (tmp_path / "given" / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    made = step(Prompts("", tmp_path / "given"), ctx=Context("k", tmp_path / "out", tmp_path))
    assert made.info == {"kept": 1}
    assert (tmp_path / "out" / "prompts.jsonl").read_text().splitlines() == rows[:1]


def command_lines() -> Iterator[tuple[Path, list[str]]]:
    """Every `draftsmith ...` in code, as words, its comments left out."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line for block in BLOCK.findall(text) for line in block[2].splitlines()]
        lines += re.findall(r"`(draftsmith [^`]+)`", " ".join(prose(page).split()))
        for line in lines:
            if found := re.match(r"\s*(?:\.venv/bin/)?draftsmith (.*)", line):
                yield page, shlex.split(found[1], comments=True)


PIPELINES = {
    name: pipeline
    for text in [
        (ROOT / "pipelines.yaml").read_text(encoding="utf-8"),
        (ROOT / "recipes" / "pipelines.yaml").read_text(encoding="utf-8"),
        *(block.text for block in WHOLE),
    ]
    for name, pipeline in yaml.safe_load(text)["pipelines"].items()
}


def test_every_command_and_option_exists() -> None:
    seen = 0
    for page, words in command_lines():
        where = f"{page.name}: draftsmith {' '.join(words)}"
        name, *rest = words or ["--help"]
        if name.startswith("-"):
            continue
        assert name in command_table(), where
        known = {option for parameter in command_table()[name].params for option in parameter.opts} | {"--help"}
        assert {word for word in rest if re.match(r"--?[a-z]", word)} <= known, where
        seen += 1
        if name in ("run", "plan", "rehearse") and rest and re.fullmatch(r"[a-z-]+", rest[0]):
            assert rest[0] in PIPELINES, where
            values = [word.split("=")[0] for before, word in itertools.pairwise(rest) if before == "-p"]
            assert set(values) <= set(PIPELINES[rest[0]].get("params", {})), where
        if name == "query" and rest and re.fullmatch(r"[a-z][\w-]*", rest[0]):
            assert rest[0] in named_queries(), where
            parameters = {parameter.name for parameter in named_queries()[rest[0]].parameters}
            values = [word.split("=")[0] for before, word in itertools.pairwise(rest) if before == "-p"]
            assert set(values) <= parameters, where
    assert seen > 40


def test_what_make_is_asked_for_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`make ([a-z-]+)`", page.read_text(encoding="utf-8"))}
    named |= {name for block in blocks("sh") for name in re.findall(r"^make ([a-z-]+)", block.text, re.MULTILINE)}
    assert len(named) > 4 and named <= targets


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose history holds a finished study."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "study").mkdir()
    home, study = folder / "home", make_report_study(folder / "study")
    store = Store(home)
    made = [*study["acceptance"], *study["cost"], study["end_to_end"], study["policy"]]
    for number, artifact in enumerate(made):
        out, _ = store.open_staging(key := f"{number:064x}")
        for file in artifact.path.iterdir():
            if file.is_file():
                (out / file.name).write_bytes(file.read_bytes())
        if artifact is study["end_to_end"]:
            write_rows(out, [row for rows in random_session(random.Random(1)) for row in rows])
        record = {"pipeline": "toy", "step": "s", "run_id": "r", "seconds": 1.0, "machine": {"machine_id": "m"}}
        kind = type(artifact).__name__
        record_artifact(home, store.commit(key, kind, artifact.info, record).path)
    return home


def sql_of_the_pages() -> list[str]:
    """Every SQL block, and every SELECT that a command asks."""
    asked = [block.text for block in blocks("sql")]
    for _, words in command_lines():
        if words[:1] == ["query"] and len(words) > 1 and words[1].startswith("SELECT"):
            asked.append(words[1])
    return list(dict.fromkeys(asked))


@pytest.mark.parametrize("sql", sql_of_the_pages(), ids=lambda sql: " ".join(sql.split())[:40])
def test_sql_finds_what_it_asks_for(sql: str, recorded: Path) -> None:
    columns, rows = query(re.sub(r"target_key, '[0-9a-f]{12}'", "target_key, ''", sql), recorded)  # of any target
    assert columns and rows


QUESTIONS = re.findall(
    r"^\| (.+\?) \| `draftsmith ([^`]+)` \|$", (ROOT / "docs" / "sql.md").read_text(encoding="utf-8"), re.MULTILINE
)


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with two nights and a registered champion."""
    home = tmp_path_factory.mktemp("nights") / "home"
    two_nights(home)
    return home


def test_twenty_questions_are_answered_as_the_docs_say(
    nights: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTSMITH_HOME", str(nights))
    assert len(QUESTIONS) == len(dict(QUESTIONS)) == 20
    for question, command in QUESTIONS:
        code = main(shlex.split(command))
        answer, complaint = capfd.readouterr()
        assert (code, complaint) == (0, ""), question
        assert "\n0 rows" not in answer and len(answer.splitlines()) > 2, f"{question} {answer}"


def test_the_notebook_runs_whole_and_every_cell_shows_something(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cell's last expression is what a notebook shows of it: a table, or a chart of tables."""
    export_history(recorded, tmp_path / "history.duckdb")
    monkeypatch.setenv("HISTORY", str(tmp_path / "history.duckdb"))
    cells = json.loads((ROOT / "docs" / "history.ipynb").read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells), "numbers of a user's own belong there"
    names: dict[str, Any] = {}
    for number, source in enumerate("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        code = ast.parse(source)
        last = code.body[-1]
        assert isinstance(last, ast.Expr)
        code.body[-1] = ast.copy_location(ast.Assign([ast.Name("shown", ast.Store())], last.value), last)
        exec(compile(ast.fix_missing_locations(code), f"cell {number}", "exec"), names)
        shown = names["shown"]
        tables = list(shown.to_dict()["datasets"].values()) if isinstance(shown, alt.TopLevelMixin) else [shown]
        assert all(len(table) for table in tables) and tables, source
    names["history"].close()


def test_views_named_in_prose_exist(recorded: Path) -> None:
    named = {name for page in PAGES for name in re.findall(r"`(v_\w+)`", prose(page))}
    assert named <= set(view_names()) == set(history_columns())


def test_choosing_a_depth_from_the_rows_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("csv")
    (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    assert main(["choose-depth", str(tmp_path / block.title)]) == 0
    assert "depth" in capfd.readouterr().out


def test_variables_of_the_environment_are_read_somewhere() -> None:
    named = {
        name for page in PAGES for name in re.findall(r"DRAFTSMITH_[A-Z_]+[A-Z]", page.read_text(encoding="utf-8"))
    }
    sources = [path for room in ("flows", "components", "storage") for path in (ROOT / room).rglob("*.py")]
    sources.append(ROOT / "deploy" / "Caddyfile")
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    assert len(named) > 6 and not [name for name in sorted(named) if name not in code]


def test_nothing_is_fetched_from_elsewhere() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert config["theme"]["font"] is False and config["strict"] is True
    assert "mermaid" not in json.dumps(config["markdown_extensions"]) and blocks("mermaid") == []
    images = [target for page in PAGES for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text())]
    assert images and not [image for image in images if image.startswith("http")]
    assert (ROOT / "docs" / "images" / "report.png").stat().st_size < 300_000


def test_the_reference_is_written_without_mkdocs(
    tmp_path: Path, generated: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["docs_reference", str(tmp_path)])
    docs_reference.main()
    assert {address: (tmp_path / address).read_text(encoding="utf-8") for address in generated} == generated
