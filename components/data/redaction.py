"""Personal data out of a text, by kind and counted: addresses, telephone and card numbers, network addresses, keys.

Off unless asked for, since it costs time and changes what people wrote. Telephone numbers are found by `phonenumbers`
(Google's libphonenumber), keys and tokens by the patterns of `detect-secrets`; both are small, offline, and come with
`draftsmith[redaction]`. Larger tools (Presidio) bring spaCy, ask the network for top-level domains, and end words by
rules that Chinese does not have. Names of people are not found: that needs a model.
"""

from __future__ import annotations

import functools
import importlib
import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from components.contract import UserError

_REGIONS: Final = ("US", "CN", "GB", "DE", "FR", "JP", "IN")
"""Where a number without a country code may belong; with one, all countries are known."""

# words end where ASCII letters and digits end: in Chinese an address stands between ideographs without a space
_EMAIL: Final = re.compile(
    r"(?<![A-Za-z0-9.!#$%&'*+/=?^_`{|}~-])[A-Za-z0-9][A-Za-z0-9._%+-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}"
    r"(?![A-Za-z0-9-])"
)
_CARD: Final = re.compile(r"(?<![0-9A-Za-z.-])[3-6]\d{3}(?:[ -]?\d){9,15}(?![0-9A-Za-z-])")
_IP: Final = re.compile(
    r"(?<![0-9A-Za-z.:])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9A-Fa-f:]*:[0-9A-Fa-f:]+)(?![0-9A-Za-z:]|\.\d)"
)
_PEM: Final = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_DIGITS: Final = re.compile(r"\d(?:[^\w\n]{0,3}\d){6}")
"""Seven digits near each other: without them there is no telephone number, and the search for one is dear."""
_DECIMALS: Final = re.compile(r"\.\d{5}")
_MIN_KEY: Final = 12
"""A group of a pattern that is shorter is its prefix, not the key."""
_DETECTORS: Final = {
    "aws": "AWSKeyDetector",
    "azure_storage_key": "AzureStorageKeyDetector",
    "discord": "DiscordBotTokenDetector",
    "github_token": "GitHubTokenDetector",
    "gitlab_token": "GitLabTokenDetector",
    "jwt": "JwtTokenDetector",
    "mailchimp": "MailchimpDetector",
    "npm": "NpmDetector",
    "openai": "OpenAIDetector",
    "pypi_token": "PypiTokenDetector",
    "sendgrid": "SendGridDetector",
    "slack": "SlackDetector",
    "square_oauth": "SquareOAuthDetector",
    "stripe": "StripeDetector",
    "telegram_token": "TelegramBotTokenDetector",
    "twilio": "TwilioKeyDetector",
}


def require_redaction() -> None:
    """Raise UserError, in one line with what to install, where the libraries are missing."""
    for module in ("phonenumbers", "detect_secrets"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UserError(
                f"redact: true needs {module}, which is not installed; run pip install 'draftsmith[redaction]', "
                "or set redact: false"
            ) from error


def redact(text: str) -> tuple[str, Counter[str]]:
    """The text with [EMAIL], [KEY], [CARD], [IP] or [PHONE] in place of what was found, and how many of each kind.

    Raises:
        UserError: the libraries of `draftsmith[redaction]` are missing.
    """
    require_redaction()
    counts: Counter[str] = Counter()
    for kind, find in _FINDERS.items():
        spans = _disjoint(find(text))
        counts[kind] += len(spans)
        for start, end in reversed(spans):
            text = f"{text[:start]}[{kind.upper()}]{text[end:]}"
    return text, +counts


def _disjoint(found: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans in order; where two overlap, the earlier and longer one."""
    kept: list[tuple[int, int]] = []
    for start, end in sorted(set(found), key=lambda span: (span[0], -span[1])):
        if not kept or start >= kept[-1][1]:
            kept.append((start, end))
    return kept


def _emails(text: str) -> Iterator[tuple[int, int]]:
    if "@" in text:
        yield from (found.span() for found in _EMAIL.finditer(text))


def _keys(text: str) -> Iterator[tuple[int, int]]:
    if "PRIVATE KEY-----" in text:
        yield from (found.span() for found in _PEM.finditer(text))
    for pattern in _key_patterns():
        for found in pattern.finditer(text):
            inner = found.span(1) if pattern.groups == 1 else found.span()
            yield inner if inner[1] - inner[0] >= _MIN_KEY else found.span()


def _cards(text: str) -> Iterator[tuple[int, int]]:
    for found in _CARD.finditer(text):
        digits = [int(character) for character in found.group() if character.isdigit()]
        if len(set(digits)) > 1 and _luhn(digits):
            yield found.span()


def _luhn(digits: list[int]) -> bool:
    """ISO/IEC 7812: every second digit from the right doubled, the cross sum a multiple of ten."""
    doubled = [digit if place % 2 == 0 else sum(divmod(2 * digit, 10)) for place, digit in enumerate(reversed(digits))]
    return sum(doubled) % 10 == 0


def _addresses(text: str) -> Iterator[tuple[int, int]]:
    for found in _IP.finditer(text):
        try:
            address = ipaddress.ip_address(found.group())
        except ValueError:
            continue
        if address.version == 6 and not any(character.isdigit() for character in found.group()):
            continue  # a::b is C++
        if not (address.is_loopback or address.is_unspecified):  # 127.0.0.1, ::1 and 0.0.0.0 are nobody's
            yield found.span()


def _phones(text: str) -> Iterator[tuple[int, int]]:
    if not _DIGITS.search(text):
        return
    import phonenumbers

    for region in _REGIONS:
        for found in phonenumbers.PhoneNumberMatcher(text, region, leniency=phonenumbers.Leniency.VALID):
            decimal = text[max(0, found.start - 1) : found.start] in (".", ",") or _DECIMALS.search(found.raw_string)
            if not decimal:
                yield found.start, found.end


_FINDERS: Final[dict[str, Callable[[str], Iterator[tuple[int, int]]]]] = {
    "email": _emails,
    "key": _keys,
    "card": _cards,
    "ip": _addresses,
    "phone": _phones,
}
"""What is looked for, in this order: a card number is no telephone number."""


@functools.cache
def _key_patterns() -> tuple[re.Pattern[str], ...]:
    detectors = (
        getattr(importlib.import_module(f"detect_secrets.plugins.{module}"), name)
        for module, name in _DETECTORS.items()
    )
    return tuple(pattern for detector in detectors for pattern in detector().denylist)
