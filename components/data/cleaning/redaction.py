"""Redaction of personal data: e-mail addresses, telephone and card numbers, IP addresses and keys are replaced.

Redaction is off by default, since it costs time and changes texts. Telephone numbers are found by `phonenumbers`
(Google's libphonenumber), keys and tokens by the patterns of `detect-secrets`; both are small, offline, and part of
`draftsmith[redaction]`. Larger tools (Presidio) need spaCy, use the network for top-level domains, and rely on word
boundaries that Chinese does not have. Names of people are not redacted: that needs a model.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Final

from components.contract import UserError

_REGIONS: Final = ("US", "CN", "GB", "DE", "FR", "JP", "IN")
"""Countries of telephone numbers without a country code; numbers with one are found for all countries."""

# words end where ASCII letters and digits end: in Chinese no spaces surround an address
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
"""Seven digits close together: a text without them has no telephone number, and the search is slow."""
_DECIMALS: Final = re.compile(r"\.\d{5}")
_MIN_KEY: Final = 12
"""A shorter group of a pattern is the prefix of a key, not the key."""
_DETECTORS: Final = (
    *("aws.AWSKey", "azure_storage_key.AzureStorageKey", "discord.DiscordBotToken", "github_token.GitHubToken"),
    *("gitlab_token.GitLabToken", "jwt.JwtToken", "mailchimp.Mailchimp", "npm.Npm", "openai.OpenAI"),
    *("pypi_token.PypiToken", "sendgrid.SendGrid", "slack.Slack", "square_oauth.SquareOAuth", "stripe.Stripe"),
    *("telegram_token.TelegramBotToken", "twilio.TwilioKey"),
)
"""Plugins of detect-secrets: module and class, whose name ends in Detector."""


def require_redaction() -> None:
    """Raise UserError, in one line with what to install, where the libraries are missing."""
    for module in ("phonenumbers", "detect_secrets"):
        try:
            import_module(module)
        except ImportError as error:
            raise UserError(
                f"redact: true needs {module}, which is not installed; run pip install 'draftsmith[redaction]', "
                "or set redact: false"
            ) from error


def redact(text: str) -> tuple[str, Counter[str]]:
    """(the text with [EMAIL], [KEY], [CARD], [IP] or [PHONE] in place of personal data, count by kind)."""
    require_redaction()
    counts: Counter[str] = Counter()
    for kind, find in _FINDERS.items():
        spans = _drop_overlaps(find(text))
        counts[kind] += len(spans)
        for start, end in reversed(spans):
            text = f"{text[:start]}[{kind.upper()}]{text[end:]}"
    return text, +counts


def _drop_overlaps(spans: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans in order; where two overlap, the earlier and longer one."""
    disjoint: list[tuple[int, int]] = []
    for start, end in sorted(set(spans), key=lambda span: (span[0], -span[1])):
        if not disjoint or start >= disjoint[-1][1]:
            disjoint.append((start, end))
    return disjoint


def _find_emails(text: str) -> Iterator[tuple[int, int]]:
    if "@" in text:
        yield from (match.span() for match in _EMAIL.finditer(text))


def _find_keys(text: str) -> Iterator[tuple[int, int]]:
    if "PRIVATE KEY-----" in text:
        yield from (match.span() for match in _PEM.finditer(text))
    for pattern in _key_patterns():
        for match in pattern.finditer(text):
            inner = match.span(1) if pattern.groups == 1 else match.span()
            yield inner if inner[1] - inner[0] >= _MIN_KEY else match.span()


def _find_cards(text: str) -> Iterator[tuple[int, int]]:
    for match in _CARD.finditer(text):
        digits = [int(character) for character in match.group() if character.isdigit()]
        if len(set(digits)) > 1 and _is_luhn_valid(digits):
            yield match.span()


def _is_luhn_valid(digits: list[int]) -> bool:
    """The checksum of ISO/IEC 7812: the digit sum, every second digit from the right doubled, is a multiple of 10."""
    doubled = [digit if place % 2 == 0 else sum(divmod(2 * digit, 10)) for place, digit in enumerate(reversed(digits))]
    return sum(doubled) % 10 == 0


def _find_ip_addresses(text: str) -> Iterator[tuple[int, int]]:
    for match in _IP.finditer(text):
        try:
            address = ipaddress.ip_address(match.group())
        except ValueError:
            continue
        if address.version == 6 and not any(character.isdigit() for character in match.group()):
            continue  # a::b is C++
        if not (address.is_loopback or address.is_unspecified):  # 127.0.0.1, ::1 and 0.0.0.0 identify nobody
            yield match.span()


def _find_phones(text: str) -> Iterator[tuple[int, int]]:
    if not _DIGITS.search(text):
        return
    import phonenumbers

    for region in _REGIONS:
        for match in phonenumbers.PhoneNumberMatcher(text, region, leniency=phonenumbers.Leniency.VALID):
            is_decimal = text[max(0, match.start - 1) : match.start] in (".", ",") or _DECIMALS.search(match.raw_string)
            if not is_decimal:
                yield match.start, match.end


_FINDERS: Final[dict[str, Callable[[str], Iterator[tuple[int, int]]]]] = {
    "email": _find_emails,
    "key": _find_keys,
    "card": _find_cards,
    "ip": _find_ip_addresses,
    "phone": _find_phones,
}
"""Kind -> its finder, in the order of redaction: a card number must not be taken for a telephone number."""


@functools.cache
def _key_patterns() -> tuple[re.Pattern[str], ...]:
    names = (detector.split(".") for detector in _DETECTORS)
    detectors = (getattr(import_module(f"detect_secrets.plugins.{file}"), f"{name}Detector") for file, name in names)
    return tuple(pattern for detector in detectors for pattern in detector().denylist)
