"""`draftsmith compare A B`: two ways to serve on the same prompts, as ratios with 95 % intervals, and a verdict.

The comparison is that of confirm_depth and the promotion gate (components/speedup: pairing.py, paired.py), on all that
the history knows of both. Only our own decoding loop is compared; results of serving engines are in `draftsmith query
engines_beside_ours`. Notes name what cannot be compared, with the reason.

A side is a drafter at a depth, or with a tree of some budget. A run, a policy, a release and a registered version name
both; a drafter is compared at the depth that was last chosen for it, unless one is given. Nothing is measured here.

With --published, A is a table of benchmarks/published/ (flows/commands/published.py), and B the drafter to hold beside
it, if not the newest of its methods.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from components.contract import UserError
from components.promotion import MAX_ACCEPTANCE_LOSS, MAX_SLOWDOWN, Margins, ServingSetup
from components.rows import ALL
from components.speedup.comparison.paired import Ratio
from components.speedup.comparison.pairing import compare_ways
from flows.commands.published import COLUMNS as PUBLISHED_COLUMNS
from flows.commands.published import TABLE_COLUMNS, hold_beside, list_tables, measured_arms, read_table
from flows.commands.terminal import Format, echo, echo_error, out, print_in
from flows.spec.references import NAMED_VERSION
from storage import journal
from storage.artifacts.store import Store
from storage.history.query import measured_of, query
from storage.registry.registry import versions_of

COLUMNS = ("quantity", "workload", "a", "b", "ratio", "lo", "hi", "margin", "num_prompts", "verdict")
EXIT_CODES = {"better": 0, "not_worse": 0, "worse": 1}
UNDECIDED = 3  # also where nothing could be compared
_RUN = re.compile(r"\d{8}-\d{6}-\w+")
_CHAMPION = "champion"


def compare(
    a: Annotated[str, typer.Argument(help="A run, a key (Draft, DepthPolicy, Release) or NAME@ALIAS.")] = "",
    b: Annotated[
        str, typer.Argument(help="Likewise; `champion`: the registered champion for A's target.")
    ] = "champion",
    *,
    depth_a: Annotated[int | None, typer.Option("--depth-a", min=0, help="A's depth, if not the chosen one.")] = None,
    depth_b: Annotated[int | None, typer.Option("--depth-b", min=0, help="B's depth, if not the chosen one.")] = None,
    tree_a: Annotated[int | None, typer.Option("--tree-a", min=1, help="A with a tree of this budget.")] = None,
    tree_b: Annotated[int | None, typer.Option("--tree-b", min=1, help="B with a tree of this budget.")] = None,
    margin: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Share of B's speed by which A may lie below.")
    ] = MAX_SLOWDOWN,
    acceptance_margin: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="The same of acceptance length; of one workload twice that.")
    ] = MAX_ACCEPTANCE_LOSS,
    published: Annotated[
        bool, typer.Option("--published", help="A is a published table, B a drafter or none; alone: list the tables.")
    ] = False,
    format_: Annotated[Format, typer.Option("--format", help="How the answer is printed.")] = Format.table,
) -> None:
    """A against B on the same prompts. Exit code 0: A is not worse; 1: it is; 3: undecided or not comparable."""
    store = Store()
    if published:
        if {depth_a, depth_b, tree_a, tree_b} != {None}:
            raise UserError("compare --published: takes no depth and no tree: each published row has its own")
        _compare_published(store, a, "" if b == _CHAMPION else b, format_)
        return
    if not a:
        raise UserError("compare: name a run, a key or NAME@ALIAS; `draftsmith query runs` lists the runs")
    side_a = find_side(store, a, depth_a, tree_a)
    side_b = find_champion(store, side_a) if b == "champion" else find_side(store, b, depth_b, tree_b)
    outcome = compare_sides(store.home, side_a, side_b, Margins(margin, acceptance_margin))
    if format_ is Format.table:
        echo(f"A: {side_a.name()}\nB: {side_b.name()}")
    columns, rows = outcome.rows()
    if rows or format_ is not Format.table:
        print_in(format_, out, columns, rows)
    report = echo if format_ is Format.table else echo_error
    for note in outcome.notes:
        report(note)
    report(f"verdict: A is {outcome.verdict().replace('_', ' ')}" if rows else "verdict: not comparable")
    if outcome.exit_code():
        raise typer.Exit(outcome.exit_code())


def _compare_published(store: Store, name: str, drafter: str, format_: Format) -> None:
    """Print the rows of a published table beside what was measured; without a name, the tables that there are."""
    if not name:
        listing = [
            [table.name, len(table.rows), *(", ".join(dict.fromkeys(getattr(row, field) for row in table.rows))
             for field in ("target", "method")), *dict(table.source).values()]
            for table in list_tables()
        ]  # fmt: skip
        print_in(format_, out, TABLE_COLUMNS, listing)
        return
    table = read_table(name)
    methods = list(dict.fromkeys(row.method for row in table.rows))
    side = find_side(store, drafter, depth=0) if drafter else None  # whatever its depth: rows have theirs
    if side is not None and side.method not in methods:
        raise UserError(f"compare --published {name}: {drafter} is {side.method}; its rows are {', '.join(methods)}")
    arms = measured_arms(store.home, methods, side.draft_key if side else None)
    print_in(format_, out, PUBLISHED_COLUMNS, hold_beside(table, arms))
    report = echo if format_ is Format.table else echo_error
    report(f"published: {table.source.work}, {table.source.table}; {table.source.url}, read {table.source.read}")
    report(f"note: {table.note}")
    if not arms:
        report(f"not comparable: nothing was measured with {' or '.join(methods)}")
        raise typer.Exit(UNDECIDED)


@dataclass
class Outcome:
    """The result of a comparison. notes: what could not be compared, with the reason."""

    a: Side
    b: Side
    ratios: list[Ratio] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def verdict(self) -> str:
        """The verdict on speed over all workloads, else on acceptance length; "not comparable" without either."""
        for quantity in ("decode_speed", "speedup", "acceptance_length"):
            for row in self.ratios:
                if (row.quantity, row.workload) == (quantity, ALL):
                    return row.verdict
        return "not comparable"

    def exit_code(self) -> int:
        """0: A is not worse; 1: A is worse; 3: undecided or not comparable."""
        return EXIT_CODES.get(self.verdict(), UNDECIDED)

    def rows(self) -> tuple[list[str], list[list[Any]]]:
        """Columns and rows of the printed table."""
        return list(COLUMNS), [[asdict(ratio)[name] for name in COLUMNS] for ratio in self.ratios]


def compare_sides(home: Path, a: Side, b: Side, margins: Margins) -> Outcome:
    """A against B over everything the history knows of them. margins: shares by which A may lie below."""
    outcome = Outcome(a, b)
    if a.target_key and b.target_key and a.target_key != b.target_key:
        outcome.notes.append(f"not comparable: other target ({a.target_key[:12]} and {b.target_key[:12]})")
        return outcome
    if (a.draft_key, a.depth_k, a.tree_budget) == (b.draft_key, b.depth_k, b.tree_budget):
        outcome.notes.append(
            "both are the same drafter at the same depth: what differs is when and where it was measured"
        )
    comparison = compare_ways(measured_of(home, a.draft_key, b.draft_key), a.way(), b.way(), margins)
    outcome.ratios = comparison.ratios
    outcome.notes += comparison.notes
    return outcome


@dataclass(frozen=True)
class Side:
    """One way to serve. measured_in: keys of the artifacts to look at; empty: every measurement of this drafter.

    tree_budget: draft tokens verified in one pass of a tree, at the depth it was measured at; None: a chain.
    """

    label: str
    draft_key: str
    method: str
    depth_k: int
    target_key: str
    measured_in: frozenset[str] = frozenset()
    tree_budget: int | None = None

    def name(self) -> str:
        """The side as a heading names it."""
        how = f"depth {self.depth_k}" if self.tree_budget is None else f"tree of {self.tree_budget}"
        return f"{self.label} ({self.method}, {how}, {self.draft_key[:12]})"

    def way(self) -> ServingSetup:
        """The side as components/promotion.py describes it."""
        return ServingSetup(self.name(), self.draft_key, self.depth_k, self.tree_budget, self.measured_in)


def find_side(store: Store, reference: str, depth: int | None, tree: int | None = None) -> Side:
    """The side that a reference names. depth: replaces the chosen one. tree: budget of a tree instead of a chain.

    Raises:
        UserError: nothing has this name, or no depth is known for it.
    """
    if depth is not None and tree is not None:
        raise UserError(
            f"compare: {reference} at a depth or with a tree, not both; a tree is as deep as it was measured"
        )
    version = NAMED_VERSION.fullmatch(reference)
    if version is not None:
        side = _side_of_version(store.home, reference, version["name"], version["which"])
    elif _RUN.fullmatch(reference):
        side = _side_of_run(store, reference)
    else:
        side = _side_of_artifact(store, reference, depth)
    return dataclasses.replace(side, depth_k=side.depth_k if depth is None else depth, tree_budget=tree)


def find_champion(store: Store, other: Side) -> Side:
    """The champion for the same target: that of the same method, else the one that measured fastest.

    Raises:
        UserError: no champion drafts for this target.
    """
    champions: list[tuple[bool, float, Side]] = []
    for name in sorted({row.name for row in journal.promotions(store.home)}):
        for number, aliases, tags in versions_of(store.home, name):
            if _CHAMPION in aliases and tags.get("draftsmith.target_key") == other.target_key:
                side = _side_of_tags(f"{name}@{number}", tags)
                speed = float(tags.get("draftsmith.speedup_meas") or 0.0)
                champions.append((side.method == other.method, speed, side))
    if not champions:
        raise UserError(
            f"compare: no registered champion drafts for target {other.target_key[:12]}; name what to compare"
        )
    return max(champions, key=lambda entry: entry[:2])[2]


def _side_of_version(home: Path, reference: str, name: str, which: str) -> Side:
    versions = versions_of(home, name)
    for number, aliases, tags in versions:
        if which == str(number) or which in aliases:
            return _side_of_tags(reference, tags)
    listing = ", ".join(
        f"{number} ({', '.join(aliases)})" if aliases else str(number) for number, aliases, _ in versions
    )
    raise UserError(f"compare: {name} has no version {which}; it has: {listing or 'none'}")


def _side_of_tags(reference: str, tags: Mapping[str, str]) -> Side:
    facts = {key.removeprefix("draftsmith."): value for key, value in tags.items()}
    return _make_side(reference, facts, frozenset())


def _side_of_run(store: Store, run_id: str) -> Side:
    """The winner of a run, measured in that run."""
    parameters = {"run_id": run_id}
    sql = "SELECT kind, artifact_key FROM step WHERE run_id = $run_id AND artifact_key IS NOT NULL ORDER BY ended_at"
    steps = query(sql, store.home, parameters)[1]
    if not steps:
        raise UserError(f"compare: no finished run {run_id}; `draftsmith query runs` lists them")
    policies = [key for kind, key in steps if kind == "DepthPolicy"]
    if not policies:
        raise UserError(f"compare: run {run_id} has chosen no depth; name a drafter instead")
    side = _make_side(run_id, store.record_of(policies[-1])["info"] | _target_of(store, policies[-1]), frozenset())
    return dataclasses.replace(side, measured_in=frozenset(key for _, key in steps))


def _side_of_artifact(store: Store, reference: str, depth: int | None) -> Side:
    key = store.resolve(reference)
    content = store.record_of(key)
    kind, info = content["kind"], dict(content["info"])
    if kind == "Draft":
        depth_k = _chosen_depth(store.home, key) if depth is None else depth
        return _make_side(reference, info | {"draft_key": key, "depth_k": depth_k}, frozenset())
    if kind not in ("DepthPolicy", "Release"):
        raise UserError(f"compare: {reference} is a {kind}; give a run, Draft, DepthPolicy, Release or NAME@ALIAS")
    return _make_side(reference, info | _target_of(store, key), frozenset())


def _target_of(store: Store, key: str) -> dict[str, Any]:
    """The target that a policy or release is about, as its rows in the history say."""
    sql = "SELECT any_value(target_key) FROM depth_choice WHERE artifact_key = $key"
    target_key = query(sql, store.home, {"key": key})[1][0][0]
    return {"target_key": target_key} if target_key else {}


def _chosen_depth(home: Path, draft_key: str) -> int:
    """The depth of the newest selection, at its smallest batch size."""
    sql = """SELECT depth_k FROM v_choice WHERE draft_key = $key AND workload = 'all' AND kv_len IS NULL
             ORDER BY created_at DESC, batch_size, artifact_key LIMIT 1"""
    rows = query(sql, home, {"key": draft_key})[1]
    if not rows:
        raise UserError(
            f"compare: no depth was ever chosen for drafter {draft_key[:12]}; give one with --depth-a or --depth-b"
        )
    return int(rows[0][0])


def _make_side(reference: str, facts: Mapping[str, Any], measured_in: frozenset[str]) -> Side:
    if not facts.get("draft_key"):
        raise UserError(f"compare: {reference} has no drafter (its verdict: {facts.get('verdict', 'unknown')})")
    return Side(
        reference,
        str(facts["draft_key"]),
        str(facts.get("method", "?")),
        int(facts.get("depth_k", 0)),
        str(facts.get("target_key", "")),
        measured_in,
    )
