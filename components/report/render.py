"""Pages from templates: self-contained HTML, nothing loaded from elsewhere, whatever a cell says is text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def render(template: str, facts: Mapping[str, Any]) -> str:
    """A page. A fact that the template names and that is not given is our own mistake, and raises."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(facts)
