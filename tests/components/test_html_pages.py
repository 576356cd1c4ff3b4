"""A page escapes every value, refuses a variable that nobody gave, and keeps an interval on one line."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest

from components.html_pages import render, unbroken, write_html


@pytest.fixture
def template(tmp_path: Path) -> Path:
    file = tmp_path / "page.html.jinja"
    file.write_text("<p>{{ title }}: {{ interval | unbroken }}</p>\n")
    return file


def test_values_are_escaped_and_the_page_is_written_whole(template: Path, tmp_path: Path) -> None:
    size = write_html(tmp_path, template, {"title": "<b>&", "interval": "1.2x [1.1, 1.3]"})
    content = (tmp_path / "index.html").read_bytes()
    assert content.decode() == "<p>&lt;b&gt;&amp;: 1.2x [1.1,\N{NO-BREAK SPACE}1.3]</p>" and len(content) == size


def test_a_missing_variable_is_an_error(template: Path) -> None:
    with pytest.raises(jinja2.UndefinedError):
        render(template, {"interval": "[1, 2]"})


def test_no_line_ends_inside_an_interval() -> None:
    assert unbroken("1.22x [1.15, 1.32], a list, [a b, c]") == "1.22x [1.15,\N{NO-BREAK SPACE}1.32], a list, [a b, c]"
