"""A failed check of a gate in words: what was measured, what was asked, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_AGAIN: Final = "measure it again, best on a machine with nothing else to do"
_MORE_PROMPTS: Final = "give the step that collects prompts a larger num_test"
_BETTER: Final = "train on more conversations or for more steps"

WORDS: Final[Mapping[str, tuple[str, str]]] = {
    "acceptance": ("acceptance length, as a share of the champion's", _BETTER),
    "acceptance_against_champion": ("acceptance length, as a share of the champion's", _BETTER),
    "depth_chosen_and_measured": (
        "depth that is faster than plain decoding and was measured",
        f"{_MORE_PROMPTS} where the verdict is undecided; else {_BETTER}",
    ),
    "differs_from_champion": (
        "training step that was best",
        "no step was better than the champion on the validation answers: nothing has to change",
    ),
    "engine_mismatch": (
        "engine runs that differ from our own decoding",
        "mend the export, or the engine's version, and run its comparison again",
    ),
    "identical_output": (
        "outputs that differ from plain decoding",
        "measure in float32; if they still differ, decoding is at fault and the report shows where",
    ),
    "measured_lower_bound": ("lower end of the measured speedup", f"{_AGAIN}; else {_BETTER}"),
    "newest_evidence": ("newer measurements of its release that serve the same", "promote the version named here"),
    "no_faults": ("faults", "the report lists each with its cause"),
    "outputs_compared": ("outputs compared with plain decoding", _MORE_PROMPTS),
    "own_gate": ("checks of the release itself that fail", _AGAIN),
    "prediction_gap": ("gap between predicted and measured speedup, as a share of the measured one", _AGAIN),
    "prompts_measured": ("prompts measured end to end", _MORE_PROMPTS),
    "prompts_measured_for_both": (
        "prompts that champion and challenger decoded alike",
        "a run that gives both to bench.compare_end_to_end measures them side by side",
    ),
    "size": ("weights, as a multiple of the champion's", "train a smaller drafter"),
    "speed_against_champion": ("decoding speed, as a share of the champion's", f"{_AGAIN}; else {_BETTER}"),
    "speedup_over_lookup": ("speedup over prompt lookup, which needs no training", _BETTER),
    "ties_by_rounding": ("settings with more ties than rounding makes", "measure in float32"),
}
"""Name of a check, without the workload in brackets -> (what is measured, what to do where it fails)."""


def measured_and_asked(name: str, measured: str, bound: str) -> str:
    """What a check measured and what it asks, one clause. name: with its workload, "acceptance[code]".

    measured: the value with its interval, or "not measured".
    """
    seen = measured if measured.startswith("not ") else f"measured {measured}"
    return f"{quantity(name)}: {seen}, asked {limit_in_words(bound)}"


def quantity(name: str) -> str:
    """What a check measures. name: with its workload, "acceptance[code]"."""
    base, _, workload = name.removesuffix("]").partition("[")
    what = WORDS[base][0] if base in WORDS else base.replace("_", " ")
    return what + (f" on {workload} prompts" if workload else "")


def remedy(name: str) -> str:
    """What to do where a check fails; "" for a check that is not known."""
    return WORDS.get(name.partition("[")[0], ("", ""))[1]


def refusal(name: str, measured: str, bound: str) -> str:
    """A failed check in one clause: what was measured, what was asked, what to do."""
    todo = remedy(name)
    return measured_and_asked(name, measured, bound) + (f" ({todo})" if todo else "")


def limit_in_words(bound: str) -> str:
    """A bound with words in place of its sign."""
    for sign, words in ((">=", "at least"), ("<=", "at most"), (">", "more than"), ("<", "less than")):
        bound = bound.replace(f"{sign} ", f"{words} ")
    return bound
