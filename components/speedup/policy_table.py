"""The depth policy as people read it: `policy.md`, the choice first, then every number behind it.

Three and seven drafts are what CPU engines are usually set to; they stand beside the chosen depth wherever they were
measured, so that a reader sees what the usual setting would give.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from components.escapes import in_markdown
from components.rows import DepthChoice, DepthEval, QualityFlag
from components.speedup.candidate import Candidate, Mixture

if TYPE_CHECKING:
    from components.speedup.policy import Policy

USUAL = (3, 7)
ALL = "all"


class Cells(NamedTuple):
    """A table as text cells; a screen and a Markdown file show the same."""

    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """In GitHub's Markdown."""
        lines = ["| " + " | ".join(self.header) + " |", "|" + "---|" * len(self.header)]
        return "\n".join([*lines, *("| " + " | ".join(map(_escaped, row)) + " |" for row in self.rows)])


def _escaped(cell: str) -> str:
    """Numbers and intervals are our own; whatever else stands in a cell may come from outside."""
    return cell if set(cell) <= set("0123456789.,x[] %+-e") else in_markdown(cell)


def policy_text(policy: Policy) -> str:
    """policy.md."""
    parts = [f"# Depth policy: {policy.verdict.replace('_', ' ')}"]
    parts += ["\n".join(f"- {in_markdown(reason)}" for reason in policy.reasons), f"Rule: {in_markdown(policy.rule)}."]
    parts += ["## Choices", choice_cells([*policy.choices, *policy.contexts]).markdown()]
    parts += [in_markdown(mixture_line(mixture)) for mixture in policy.mixtures]
    for choice in policy.choices:
        if choice.workload == ALL:
            mine = [e for e in policy.evals if _same(e, choice)]
            parts.append(f"## {in_markdown(choice.method)}, batch {choice.batch_size}: every depth")
            parts.append(depth_cells(mine, choice.depth_k).markdown())
    if len(policy.ranking) > 1:
        parts += ["## Drafters against each other", ranking_cells(policy.ranking).markdown()]
    if policy.flags:
        parts += ["## Reasons to doubt", flag_cells(policy.flags).markdown()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _same(row: DepthEval, choice: DepthChoice) -> bool:
    names = ("draft_key", "workload", "batch_size")
    return all(getattr(row, name) == getattr(choice, name) for name in names)


def choice_cells(choices: Iterable[DepthChoice]) -> Cells:
    """One line for each choice."""
    header = ["drafter", "workload", "batch", "context", "depth", "predicted", "measured", "P(S > 1)"]
    rows = [
        [
            c.method,
            c.workload,
            str(c.batch_size),
            "all" if c.kv_len is None else str(c.kv_len),
            str(c.depth_k),
            times(c.speedup_pred, c.pred_lo, c.pred_hi),
            times(c.speedup_meas, c.meas_lo, c.meas_hi),
            "" if c.p_beats_no_spec is None else f"{c.p_beats_no_spec:.3f}",
            "" if c.loss is None else f"{c.loss:.1%}",
            c.verdict.replace("_", " "),
        ]
        for c in choices
    ]
    return Cells([*header, "lost at one depth", "verdict"], rows)


def mixture_line(mixture: Mixture) -> str:
    """A line about one depth for several workloads; of a stated mixture, also what it is not."""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in mixture.shares.items())
    apart = ", ".join(f"{name} {depth}" for name, depth in mixture.depths_apart.items())
    whose = "stated" if mixture.stated else "of what was measured"
    predicted = times(mixture.speedup_pred, mixture.pred_lo, mixture.pred_hi)
    said = " It is a prediction: engines are told the depth over all measured prompts." if mixture.stated else ""
    return (
        f"{mixture.method}, batch {mixture.batch_size}: one depth for the mixture {whose} ({shares}) is "
        f"{mixture.depth_k}, {predicted}. Each workload at its own ({apart}) would give {mixture.speedup_apart:.2f}x: "
        f"one depth loses {mixture.loss:.1%}.{said}"
    )


def depth_cells(evals: Sequence[DepthEval], chosen: int) -> Cells:
    """Every depth of one drafter. Times in ms."""
    header = ["depth", "AL", "T_verify", "T_draft", "cost", "tokens gained", "time added", "predicted", "measured"]
    rows = [
        [
            f"{e.depth_k}{_said(e.depth_k, chosen)}",
            f"{e.al:.2f}{bounds(e.al_lo, e.al_hi)}",
            f"{e.t_verify_ms:.3g}",
            f"{e.t_draft_ms:.3g}",
            f"{e.cost_ratio:.2f}",
            "" if e.marginal_gain is None else f"{e.marginal_gain:+.1%}",
            "" if e.marginal_cost is None else f"{e.marginal_cost:+.1%}",
            times(e.speedup_pred, e.pred_lo, e.pred_hi),
            times(e.speedup_meas, e.meas_lo, e.meas_hi),
            f"{e.p_best:.1%}",
            f"{e.regret:.1%}",
        ]
        for e in sorted(evals, key=lambda e: e.depth_k)
    ]
    return Cells([*header, "P(best)", "regret"], rows)


def _said(depth: int, chosen: int) -> str:
    words = [word for word, holds in (("chosen", depth == chosen), ("usual on CPUs", depth in USUAL)) if holds]
    return f" ({', '.join(words)})" if words else ""


def ranking_cells(ranking: Sequence[Candidate]) -> Cells:
    """Every drafter in every setting at its chosen depth."""
    header = ["drafter", "key", "shape", "draft vocabulary", "depth", "predicted", "P(best)", "regret"]
    rows = [
        [
            c.method + (" (chosen)" if c.chosen else ""),
            c.draft_key[:12] if len(c.draft_key) == 64 else c.draft_key,
            "chain" if c.tree_budget is None else f"tree of {c.tree_budget}",
            "" if c.draft_vocab is None else str(c.draft_vocab),
            str(c.depth_k),
            times(c.speedup_pred, c.pred_lo, c.pred_hi),
            f"{c.p_best:.1%}",
            f"{c.regret:.1%}",
        ]
        for c in ranking
    ]
    return Cells(header, rows)


def flag_cells(flags: Sequence[QualityFlag]) -> Cells:
    """Every reason to doubt a number."""
    rows = [[f.severity, f.code, f.method, f"{f.value:.4g}", f.detail] for f in flags]
    return Cells(["severity", "flag", "drafter", "value", "what it means"], rows)


def times(value: float | None, lo: float | None, hi: float | None) -> str:
    """1.54x [1.50, 1.58]; nothing where nothing was measured."""
    return "" if value is None else f"{value:.2f}x{bounds(lo, hi)}"


def bounds(lo: float | None, hi: float | None) -> str:
    """[1.50, 1.58]; nothing where no interval is known, or nothing varies."""
    return "" if lo is None or hi is None or lo == hi else f" [{lo:.2f}, {hi:.2f}]"
