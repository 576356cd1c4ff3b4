"""Render pages from templates: self-contained HTML without external resources; all values are escaped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2


def render(template: str, facts: Mapping[str, Any]) -> str:
    """Render a page. A variable of the template that is missing in `facts` raises jinja2.UndefinedError."""
    return environment().get_template(template).render(facts)


def environment() -> jinja2.Environment:
    """The environment of the templates in this folder, with their filter `unbroken`."""

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["unbroken"] = unbroken
    return templates


def unbroken(text: str) -> str:
    """The text without line breaks inside intervals such as 1.22x [1.15, 1.32]."""
    return re.sub(r"\[([^][\s]+), ([^][\s]+)\]", "[\\1,\N{NO-BREAK SPACE}\\2]", text)
