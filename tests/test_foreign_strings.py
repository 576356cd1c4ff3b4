"""Strings of somebody else's stay strings: in SQL, paths, shell commands, Markdown, HTML, Mermaid and the terminal."""

from __future__ import annotations

import json
import re
import shlex
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from components.contract import UserError
from components.engines.depth_settings import settings_for
from components.engines.launch import launch_lines
from components.html_pages import environment
from components.report import pages
from components.report.charts.svg import Point, Series, bar_chart, line_chart
from components.rows import QualityFlag, write_rows
from components.tables import Table
from components.text import in_code, in_markdown, in_mermaid, one_line
from flows.commands.terminal import cell
from flows.spec.schema import load_spec
from storage import journal
from storage.artifacts.store import Store
from storage.history.query import query
from storage.history.records import new_promotion
from storage.history.write import record_artifact, record_promotion, record_run
from storage.journal import Journal
from storage.registry.versions import description, model_name

HOSTILE = (
    "it's; DROP TABLE run; --",
    "') UNION SELECT * FROM read_text('/etc/hostname') --",
    "\"; COPY (SELECT 1) TO 'x'; \"",
    "../../../etc/passwd\0",
    "$(touch x) `touch x` & touch x | cat; touch x",
    "| a | b |\n|---|---|\n**x** [x](javascript:alert(1)) ![x](http://x/y.png)",
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    '"]; click n0 "javascript:alert(1)"; n0["',
    "```\n# x\n- [ ] x\n1. x\n> x\n---\nhttp://example.org <a@b.c> &lt; ~~x~~ $x$",
    "{{ 7 * 7 }} {% raw %} ${params.x} \\",
    "\x1b[2J\x1b]0;title\x07\u202e",
    "%%{init: {'theme': 'x'}}%%",
)
strings = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(codec="utf-8"), max_size=30),
    st.text("|`*_[]()<>#+-.!~&$\\ \n1ab:/'\"", max_size=20),
)
MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def texts(tokens: Any) -> list[tuple[str, str]]:
    """(type, content) of everything inline, without the pieces of plain text told apart."""
    found = [(token.type, token.content) for token in tokens if token.content or token.type != "text"]
    return [(kind, content) for kind, content in found if kind != "text"] or [("text", "".join(c for _, c in found))]


@settings(max_examples=120, deadline=None)
@given(strings)
@example(" ".join(HOSTILE))
def test_markdown_shows_any_text_as_it_stands(text: str) -> None:
    told = in_markdown(text)
    for source in (told, f"| a |\n| --- |\n| {told} |", f"- {told}", Table(["a"], [[text]]).markdown()):
        blocks = MARKDOWN.parse(source)
        kinds = {block.type for block in blocks} & {
            "html_block",
            "heading_open",
            "blockquote_open",
            "fence",
            "code_block",
            "hr",
        }
        assert not kinds, (source, kinds)
        inline = [block for block in blocks if block.type == "inline"]
        if one_line(text) and (one_line(text) != "-" or "|" in source):  # in our tables: not measured
            assert texts(inline[-1].children) == [("text", one_line(text))], source
    (code,) = [b for b in MARKDOWN.parse(f"| a |\n| --- |\n| `x{in_code(text)}x` |") if b.content.startswith("`x")]
    assert [child.type for child in code.children or ()] == ["code_inline"]


@settings(deadline=None)
@given(strings)
def test_mermaid_and_terminal_show_text_and_obey_none(text: str) -> None:
    label = in_mermaid(text)
    assert not set(label) & set('"<>{}|`\n%;') - {";"} and re.fullmatch(r"(?:[^;#]|#\d+;)*", label)
    assert not any(ord(char) < 32 and char not in "\n\t" for char in cell(text))


class Tags(HTMLParser):
    """Which tags a page has."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.sampled_from([text for text in HOSTILE if text.isprintable()]), st.text("<>&\"'ab/=", max_size=20)))
def test_a_chart_and_a_page_cell_hold_no_foreign_tag(text: str) -> None:
    series = [Series(text, "pred", "line", [Point(0, 1.0), Point(1, 2.0)])]
    lines, named = line_chart(series, text, text), line_chart(series, text, text, x_labels=[text, text])
    bars = bar_chart([(text, [0.1, 0.2])], [(text, "pred"), (text, "meas")], text, text)
    for chart in (lines, named, bars):
        assert not {node.tag.split("}")[-1] for node in ET.fromstring(chart).iter()} & {"script", "img", "a", "image"}
    grid = '{% from "grid.html.jinja" import grid %}{{ grid(table) }}{{ title }}'
    page = Tags()
    page.feed(
        environment(Path(pages.__file__).parent).from_string(grid).render(table=Table([text], [[text]]), title=text)
    )
    assert page.seen <= {"div", "table", "thead", "tbody", "tr", "th", "td"}


@settings(deadline=None)
@given(strings, strings)
def test_a_command_of_the_model_card_is_one_command(target: str, other: str) -> None:
    lines = launch_lines("eagle3", 3, settings_for("eagle3", {1: 3}), (target or other).replace("\0", "") or "x")
    assert len(lines) == 3
    for _, command in lines:
        for line in command.split("\n"):
            words = shlex.split(line, posix=True)
            lexed = list(shlex.shlex(line, posix=True, punctuation_chars=True))
            assert not {word for word in lexed if set(word) <= set(";&|<>()") and word} - set(words), line


@settings(deadline=None)
@given(strings)
def test_the_name_of_a_model_fits_every_place_it_goes_to(target: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", model_name(target))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(strings)
def test_a_name_that_becomes_a_file_stays_in_its_folder(tmp_path: Path, text: str) -> None:
    step = {"uses": "data.collect_prompts", "matrix": {"source": [text]}}
    for steps, name in (({"a": step}, f"a[{text}]"), ({text: {"uses": "data.collect_prompts"}}, text)):
        file = tmp_path / "pipelines.yaml"
        file.write_text(json.dumps({"pipelines": {"p": {"steps": steps}}}), encoding="utf-8")
        try:
            load_spec(file)
        except UserError as error:
            assert all(line.startswith("pipelines.yaml:") for line in str(error).splitlines())
        else:
            place = (tmp_path / "logs" / f"{name}.log").resolve()
            assert place.parent == (tmp_path / "logs").resolve() and len(place.name) < 255


def test_a_home_and_rows_with_any_text_are_asked_about_as_data(tmp_path: Path) -> None:
    home = tmp_path / 'it\'s a "home"; $(touch x) [%20] {glob}* --'
    store, asked = Store(home), "f.detail, a.pipeline, a.settings ->> 'source', r.reason, p.name"
    for number, text in enumerate(HOSTILE[:4]):
        out, _ = store.open_staging(f"k{number}")
        write_rows(out, [QualityFlag(text, text, text, text, "info", 1.0, text)])
        facts = {"pipeline": text, "step": text, "run_id": "r", "settings": {"source": text}}
        record_artifact(home, store.commit(f"k{number}", "Measurements", {"title": text}, facts).path)
        run = Journal.start(home, text, {"x": text}, "direct")
        run.add("end", status="failed", reason=text)
        run.close()
        record_run(home, run.entries)
        move = new_promotion(text, text, "external", None, 1, text, text, {"x": text})
        journal.log_promotion(home, move)
        record_promotion(home, move)
        assert journal.promotions(home)[-1] == move
    for text in HOSTILE[:4]:
        where = "f.code = $x AND a.step = $x AND r.pipeline = $x AND p.why = $x"
        sql = f"SELECT {asked} FROM quality_flag f, artifact a, run r, promotion p WHERE {where}"
        assert query(sql, home, {"x": text})[1] == [(text,) * 5]


@settings(deadline=None)
@given(strings)
def test_the_description_of_a_version_keeps_its_tables(text: str) -> None:
    checks = json.dumps([{"name": text, "value": 1.0, "limit": text, "passed": True}])
    facts = {"draftsmith.method": text, "draftsmith.target": text, "draftsmith.pipeline": text, "gate.checks": checks}
    blocks = MARKDOWN.parse(description(facts, None))
    assert sum(block.type == "table_open" for block in blocks) == 2
    assert not {child.type for block in blocks for child in block.children or ()} - {
        "text",
        "strong_open",
        "strong_close",
        "text_special",
    }


def test_sql_is_never_put_together_from_values() -> None:
    """Every statement that storage executes is a constant, or made of our own table names."""
    source = (Path(__file__).parents[1] / "storage" / "history" / "query.py").read_text()
    made = re.findall(r"execute\(f\"([^\"]*)\"", source)
    assert made == ["SET {setting}"]


@pytest.mark.parametrize("text", HOSTILE[:4])
def test_the_command_line_takes_hostile_names_as_names(text: str, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    from flows.cli import main

    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for command in (["show", text], ["query", text], ["plan", text], ["check", "-f", text.replace("\0", "")]):
        assert main(command) == 2, command
        assert "Traceback" not in capfd.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} <= {"home"}
