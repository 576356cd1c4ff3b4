"""Self-contained HTML pages from Jinja templates: no external resource, and every value escaped.

Names of models, prompts and runs come from people and files; a template marks what it made itself, such as a chart, as
safe. Other templates of a page's folder can be included by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import jinja2


def render(template: Path, values: Mapping[str, object]) -> str:
    """Render a page. A variable of the template that is missing in `values` raises jinja2.UndefinedError."""
    return environment(template.parent).get_template(template.name).render(values)


def environment(folder: Path) -> jinja2.Environment:
    """The environment of the templates in a folder, with the filter `unbroken`."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["unbroken"] = unbroken
    return templates


def write_html(folder: Path, template: Path, values: Mapping[str, object]) -> int:
    """Render a page into `index.html` of a folder and return its size in bytes."""
    content = render(template, values).encode()
    (folder / "index.html").write_bytes(content)
    return len(content)


def unbroken(text: str) -> str:
    """The text without line breaks inside intervals such as 1.22x [1.15, 1.32]."""
    return re.sub(r"\[([^][\s]+), ([^][\s]+)\]", "[\\1,\N{NO-BREAK SPACE}\\2]", text)
