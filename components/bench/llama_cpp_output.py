"""Parses the counts and times that llama.cpp's command-line programs print.

llama-speculative-simple ends with "encoded N tokens in S seconds", "decoded N tokens in S seconds", n_drafted, n_accept
and, at verbosity 4, a line of statistics with the rounds that drafted and the acceptance rate of each position. Plain
decoding (llama-completion, formerly llama-cli) ends with llama.cpp's own timings with --perf.

Seconds have three decimals: a decode time is known to a millisecond. Every token of llama-speculative-simple comes from
its decoding loop, so its decode time includes the pass that makes the first token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from components.bench.engine_acceptance import Acceptance

_NUMBER: Final = r"\s*([0-9.]+)"
_ENCODED: Final = re.compile(rf"encoded{_NUMBER} tokens in{_NUMBER} seconds")
_DECODED: Final = re.compile(rf"decoded{_NUMBER} tokens in{_NUMBER} seconds")
_COUNT: Final = re.compile(r"\bn_(predict|drafted|accept)\s+= (\d+)")
_STATISTICS: Final = re.compile(
    r"statistics +([\w-]+): #calls\(b,g,a\) = +\d+ +\d+ +(\d+), .*?#gen tokens = +(\d+), #acc tokens = +(\d+)"
    r"(?:.*?#acc rate/pos = \(([0-9., ]*)\))?"
)
_PROMPT_EVAL: Final = re.compile(rf"prompt eval time ={_NUMBER} ms /{_NUMBER} tokens")
_EVAL: Final = re.compile(rf"(?<!prompt )\beval time ={_NUMBER} ms /{_NUMBER} runs")
_SAMPLING: Final = re.compile(rf"\bsampling time ={_NUMBER} ms")
_VERSION: Final = re.compile(r"^version: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class ProgramOutput:
    """The output of one run. Times in ns; acceptance is None for plain decoding."""

    prompt_tokens: int
    tokens: int
    prefill_ns: int
    decode_ns: int
    acceptance: Acceptance | None


def read_speculative(text: str) -> ProgramOutput | None:
    """Parse llama-speculative-simple's log; None where its counts are missing."""
    encoded, decoded = _ENCODED.search(text), _DECODED.search(text)
    counts = {name: int(value) for name, value in _COUNT.findall(text)}
    if encoded is None or decoded is None or counts.keys() < {"predict", "drafted", "accept"}:
        return None
    # each round emits what it accepted and one token more
    acceptance = Acceptance(counts["predict"] - counts["accept"], counts["drafted"], counts["accept"])
    statistics = _STATISTICS.search(text)
    if statistics is not None:
        rounds, drafted, accepted = int(statistics[2]), int(statistics[3]), int(statistics[4])
        acceptance = Acceptance(rounds, drafted, accepted, _by_position(statistics[5] or "", rounds, accepted))
    return ProgramOutput(int(encoded[1]), int(decoded[1]), _ns(encoded[2], 1e9), _ns(decoded[2], 1e9), acceptance)


def read_plain(text: str) -> ProgramOutput | None:
    """Parse llama.cpp's timings after plain decoding; None where they are missing."""
    prompt, steps, sampling = _PROMPT_EVAL.search(text), _EVAL.search(text), _SAMPLING.search(text)
    if prompt is None or steps is None:
        return None
    decode_ns = _ns(steps[1], 1e6) + (_ns(sampling[1], 1e6) if sampling is not None else 0)
    return ProgramOutput(int(prompt[2]), int(steps[2]) + 1, _ns(prompt[1], 1e6), decode_ns, None)


def read_version(text: str) -> str:
    """The version that a program states, "" where it states none."""
    version = _VERSION.search(text)
    return version[1].strip() if version is not None else ""


def _by_position(rates: str, rounds: int, accepted: int) -> list[int] | None:
    """Counts from rates of three decimals; None where rounding is ambiguous (their sum must be `accepted`)."""
    counts = [round(float(rate) * rounds) for rate in rates.split(",") if rate.strip()]
    return counts if sum(counts) == accepted else None


def _ns(number: str, unit: float) -> int:
    return round(float(number) * unit)
