"""Times are UTC without a zone, however they were given, and a move has an id of its own that sorts by time."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone

from storage.history.records import MEASURED, RECORDS, Provenance, as_time, columns_of, new_promotion, now

MOMENT = datetime(2026, 3, 1, 12, 0)


def test_a_time_is_utc_however_it_was_given() -> None:
    given = MOMENT.replace(tzinfo=UTC)
    for value in (given.timestamp(), int(given.timestamp()), given.isoformat(), MOMENT, MOMENT.isoformat()):
        assert as_time(value) == MOMENT
    assert as_time(given.astimezone(timezone(timedelta(hours=5)))) == MOMENT
    assert now().tzinfo is None


def test_measured_tables_carry_their_provenance_and_records_do_not() -> None:
    provenance = set(Provenance.__dataclass_fields__)
    assert all(provenance <= set(columns_of(table)) for table in MEASURED)
    assert not any(provenance <= set(columns_of(table)) for table in RECORDS if table != "artifact")


def test_moves_made_one_after_the_other_sort_by_their_ids_and_keep_their_numbers() -> None:
    moves = [new_promotion("m", "champion", "promote", 1, 2, "user", "why", {"b": "2", "a": "1"}) for _ in range(3)]
    assert len({move.promotion_id for move in moves}) == 3
    assert [move.promotion_id[:22] for move in moves] == sorted(move.promotion_id[:22] for move in moves)
    assert json.loads(moves[0].numbers) == {"a": "1", "b": "2"}
