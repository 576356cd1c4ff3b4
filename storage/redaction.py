"""Removes passwords, and characters that a terminal would obey, from text that is shown or kept.

Secrets are recognised by their place (the user part of an address, a query parameter named like a password or a token)
and by their value (that of an environment variable named like one).
"""

from __future__ import annotations

import os
import re
import unicodedata
from typing import Final

HIDDEN: Final = "***"
_USER = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)(?:(?P<user>[^\s/@:'\"]*):)?[^\s/'\"]*@", re.I)
_PARAMETER = re.compile(
    r"(?P<name>[?&;][\w.-]*(?:password|passwd|token|secret|api_?key|signature)[\w.-]*=)[^\s&;'\"]+", re.I
)
_IS_SECRET = re.compile(r"(^|_)(PASSWORD|PASSWD|TOKEN|SECRET|API_KEY|AUTH_STRING|ACCESS_KEY)(_|$)", re.I)
LEAST_LENGTH: Final = 6  # of a value that is looked for: a shorter one would blot out common words


def without_secrets(text: str) -> str:
    """The text with every recognised secret replaced by ***."""
    for value in _secret_values():
        text = text.replace(value, HIDDEN)
    text = _USER.sub(lambda match: f"{match['scheme']}{_user_prefix(match['user'])}{HIDDEN}@", text)
    return _PARAMETER.sub(lambda match: f"{match['name']}{HIDDEN}", text)


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret."""
    return _IS_SECRET.search(name) is not None


def holds_password(value: str) -> bool:
    """Whether an address in this text holds a user and a password."""
    return _USER.search(value) is not None


def printable(text: str) -> str:
    """The text with control and direction characters spelled out (\\x1b, \\u202e); line ends and tabs stay."""
    if text.replace("\n", "").replace("\t", "").isprintable():  # nearly always, and a plan may have 25 MB
        return text
    return "".join(char if char in "\n\t" or not _is_control(char) else _spell_out(char) for char in text)


def _user_prefix(user: str | None) -> str:
    """The user's name; without a colon after it, it may be a token."""
    return "" if user is None else f"{user}:"


def _secret_values() -> list[str]:
    """Values of the environment that are secrets, the longest first: one may be a part of another."""
    values = {value for name, value in os.environ.items() if is_secret_name(name) and len(value) >= LEAST_LENGTH}
    values |= {
        value.partition(":")[2] for value in values if len(value.partition(":")[2]) >= LEAST_LENGTH
    }  # name:password
    return sorted(values, key=len, reverse=True)


def _is_control(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _spell_out(char: str) -> str:
    number = ord(char)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
