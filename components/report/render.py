"""Pages from templates: self-contained HTML, nothing loaded from elsewhere, whatever a cell says is text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2


def render(template: str, facts: Mapping[str, Any]) -> str:
    """A page. A fact that the template names and that is not given is our own mistake, and raises."""
    return environment().get_template(template).render(facts)


def environment() -> jinja2.Environment:
    """Where the templates of this folder are found, and the filter that they use."""
    import jinja2

    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["unbroken"] = unbroken
    return found


def unbroken(text: str) -> str:
    """Text in which no line ends inside an interval: 1.22x [1.15, 1.32]."""
    return re.sub(r"\[([^][\s]+), ([^][\s]+)\]", "[\\1,\N{NO-BREAK SPACE}\\2]", text)
