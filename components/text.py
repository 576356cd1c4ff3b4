"""Escapes for text from outside, where it could be taken for markup: in Markdown, in Mermaid, in links.

Names of models, prompts, pipelines and runs come from people and files. In SQL they are parameters, in a shell they
are arguments of a list, in HTML Jinja escapes them; for Markdown and Mermaid, which have no such machinery, it is done
here.
"""

from __future__ import annotations

import re
import unicodedata

_MARKUP = re.compile(r"[\\`*\[\]<|~&$]|(?<![^\W_])_|_(?![^\W_])")  # an underscore inside a word is plain
_FIRST = re.compile(r"^(?:>|[#=+-]+(?=\s|$)|\d+[.)](?=\s|$))")  # what begins a heading, a list, a quotation or a rule
_PLAIN_IN_MERMAID = re.compile(r"[^\w .,:=+/()@?'\[\]-]", re.ASCII)


def one_line(text: object) -> str:
    """Text without line ends, control characters and marks that turn the direction of reading."""
    return " ".join("".join(char if char.isprintable() else " " for char in str(text)).split())


def visible(text: str) -> str:
    """Text for a page that shows it as it stands: line ends and tabs stay, control characters and marks that turn the
    direction of reading appear as their code points. HTML is not escaped here."""
    return "".join(_spell_out(char) for char in text)


def in_markdown(text: object) -> str:
    """Text as it stands, in a line or a table cell of GitHub's Markdown; never a link, an image, HTML or a new line."""
    flat = one_line(text)
    escaped = _MARKUP.sub(lambda match: "\\" + match[0], flat).replace("://", ":&#47;&#47;")
    first = _FIRST.match(escaped)
    if first is None or flat == "-":  # as in a table: not measured
        return escaped
    at = first.end() - 1 if first[0][0].isdigit() else 0
    return f"{escaped[:at]}\\{escaped[at:]}"


def in_code(text: object) -> str:
    """Text inside the backticks of a code span in a table, where a bar alone can be escaped: a backtick is replaced."""
    return one_line(text).replace("`", "'").replace("|", "\\|")


def in_mermaid(text: object) -> str:
    """Text inside the quotes of a Mermaid label."""
    return _PLAIN_IN_MERMAID.sub(lambda match: f"#{ord(match[0])};", one_line(text))


def _spell_out(char: str) -> str:
    hidden = unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    return f"\\u{ord(char):04x}" if hidden and char not in "\n\t\u200d" else char
