"""Which version counts as champion, over any sequence of moves by Draftsmith and by others."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from storage.history.records import PromotionRow
from storage.registry.standing import Standing, standing_of

VERSIONS = st.integers(1, 4)
MOVES = st.lists(st.tuples(st.sampled_from(["promote", "rollback", "external"]), VERSIONS), min_size=1, max_size=8)


def log_of(moves: list[tuple[str, int]]) -> list[PromotionRow]:
    rows: list[PromotionRow] = []
    for number, (action, version) in enumerate(moves):
        before = rows[-1].to_version if rows else None
        at = datetime(2026, 1, 1, tzinfo=UTC)
        rows.append(PromotionRow(str(number), at, "m", "champion", action, before, version, "somebody", "why", "{}"))
    return rows


@given(MOVES, VERSIONS)
def test_what_the_gate_refuses_counts_only_where_draftsmith_once_made_it_champion(
    moves: list[tuple[str, int]], alias: int
) -> None:
    standing = standing_of(log_of(moves), alias, lambda version, champion: "it is slower")
    ours = {version for action, version in moves if action != "external"}
    assert standing.number is None or standing.number in ours
    assert (standing.number == alias) == (standing.disputed is None), "the alias counts, or it is disputed"
    assert standing.disputed in (None, alias)
    deleted = standing_of(log_of(moves), None, lambda version, champion: "it is slower")
    assert deleted.number is None or (not deleted.is_settled and "draftsmith rollback m --why" in deleted.sentence("m"))
    if standing.disputed is not None:
        assert standing.why and "draftsmith promote m --version" in standing.sentence("m")


@given(MOVES, VERSIONS)
def test_after_a_move_by_draftsmith_its_version_counts_and_nothing_is_disputed(
    moves: list[tuple[str, int]], version: int
) -> None:
    log = log_of([*moves, ("promote", version)])
    assert standing_of(log, version, lambda version, champion: "refused") == Standing(version)


@given(st.lists(VERSIONS, min_size=1, max_size=8))
def test_where_the_gate_lets_everything_through_the_alias_counts(versions: list[int]) -> None:
    log = log_of([("promote", versions[0]), *(("external", version) for version in versions[1:])])
    standing = standing_of(log, versions[-1], lambda version, champion: "")
    assert standing.number == versions[-1] and standing.disputed is None and not standing.sentence("m")
    unfit = standing_of(log, versions[-1], lambda version, champion: "", lambda version: "its files are gone")
    assert (unfit.number, unfit.why) == (
        (standing.before, "its files are gone") if standing.before else (versions[-1], "")
    )
