"""Text for people: on one line, shortened, with a suggestion for a misspelt word, and escaped for Markdown and Mermaid.

Names of models, prompts, pipelines and runs come from people and files. In SQL they are parameters, in a shell they
are arguments of a list, in HTML Jinja escapes them; for Markdown and Mermaid, which have no such machinery, it is done
here.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable

_MARKUP = re.compile(r"[\\`*\[\]<|~&$]|(?<![^\W_])_|_(?![^\W_])")  # an underscore inside a word is plain
_FIRST = re.compile(r"^(?:>|[#=+-]+(?=\s|$)|\d+[.)](?=\s|$))")  # what begins a heading, a list, a quotation or a rule
_PLAIN_IN_MERMAID = re.compile(r"[^\w .,:=+/()@?'\[\]-]", re.ASCII)


def one_line(text: object) -> str:
    """Text without line ends, control characters and marks that turn the direction of reading."""
    return " ".join("".join(char if char.isprintable() else " " for char in str(text)).split())


def shorten(text: object, limit: int = 300) -> str:
    """Text without line breaks, of at most `limit` characters."""
    flat = " ".join(str(text).split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."


def message_of(error: BaseException | None, limit: int = 300) -> str:
    """The message of a library's error on one line, cut at `limit` characters; its class where it has no message."""
    return " ".join(str(error).split())[:limit].rstrip(".") or type(error).__name__


def nearest(word: object, choices: Iterable[str]) -> str | None:
    """The choice that a misspelt word probably means; None where nothing is near."""
    return next(iter(difflib.get_close_matches(str(word), list(choices), n=1)), None)


def did_you_mean(word: object, choices: Iterable[str], most_named: int = 8) -> str:
    """` (did you mean 'x'?)`; where nothing is near ` (known: x, y)`, or '' for more than `most_named` choices."""
    names = list(choices)
    if (near := nearest(word, names)) is not None:
        return f" (did you mean '{near}'?)"
    return f" (known: {', '.join(names)})" if 0 < len(names) <= most_named else ""


def kernel_in_words(kernel: str) -> str:
    """The kernels of an opened target: a name, or layer shapes with a letter for every number of rows."""
    name, is_by_shape, shapes = kernel.partition("[")
    if not is_by_shape:
        return f"{name} kernels"
    return f"the quickest kernel for each of {len(shapes.split(','))} layer shapes and each number of rows"


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


def as_utf8(text: str) -> str:
    """Text with `?` for what UTF-8 cannot hold: halves of a surrogate pair, bytes of a file's name."""
    return text.encode("utf-8", "replace").decode("utf-8")
