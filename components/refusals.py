"""What a verdict asks, in words: a failed check of a gate, and prompts too few for any verdict.

Of a check it is said what was measured, what was asked, and what to do. Prompts are there long before the verdict:
settings that cannot give enough are refused when a pipeline is checked, a small file with too few rows is told then,
and prompts that turn out too few end the run as soon as they are collected or mixed, before a drafter is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from components.positions import MUST_HOLD_MOST

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


class PromptThresholds(NamedTuple):
    """How many prompts a number needs behind it.

    decide: for a verdict, and for promotion. How prompts differ is known from them alone: one says nothing of it, and
        three hardly anything. Four let a trial run decide.
    context: near one context length, for an acceptance length of its own; below it all prompts speak for the length.
    warn: fewer raise a flag: intervals hold, but are too wide to tell depths or drafters apart.
    """

    decide: int = 4
    context: int = 8
    warn: int = 64


PROMPTS: Final = PromptThresholds()
_DECIDES: Final = ("speedup.choose_depth", "speedup.confirm_depth", "speedup.confirm_stop")
"""Steps that end in a verdict over what MUST_HOLD_MOST measured."""
_LIMITS: Final = ("num_test", "num_prompts")
"""Settings that say how many test prompts there are at most."""


class Evidence(NamedTuple):
    """What one input of a step that decides was measured by, and with which prompts; names of steps or of outside."""

    decides: str
    measured: tuple[str, ...]
    prompts: tuple[str, ...]


def evidence_of(steps: Mapping[str, tuple[str, Mapping[str, str | list[str]]]]) -> Iterator[Evidence]:
    """The evidence of every verdict of a pipeline. steps: name -> (address, inputs)."""
    for name, (address, inputs) in steps.items():
        for value in inputs.values() if address in _DECIDES else ():
            names = [value] if isinstance(value, str) else value
            measured = tuple(each for each in names if each in steps and steps[each][0] in MUST_HOLD_MOST)
            prompts = dict.fromkeys(str(steps[each][1].get("prompts", "")) for each in measured)
            if measured:
                yield Evidence(name, measured, tuple(prompts))


def too_few_prompts(number: int, settings: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong with so many test prompts for a verdict and what gives more; "" for enough of them.

    settings: of the steps that choose them.
    """
    if number >= PROMPTS.decide:
        return ""
    limit = next((name for each in settings for name in _LIMITS if each.get(name, PROMPTS.decide) < PROMPTS.decide), "")
    percent = min((each.get("evaluation_percent", 100) for each in settings), default=100)
    rows = "give more rows" + f", or raise evaluation_percent from {percent}" * (percent < 100)
    more = f"set {limit} to {PROMPTS.decide} or more" if limit else rows
    return f"a verdict needs {PROMPTS.decide} test prompts, there {'is' if number == 1 else 'are'} {number}: {more}"
