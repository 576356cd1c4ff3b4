"""Every measured number of the README and the documentation is that of the newest record.

The tables of docs/benchmarks.md are made by benchmarks/numbers_table.py. Elsewhere a measured number is a link to the
table that it stands in, `[1.9 times as fast](benchmarks.md#training-speed)`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.numbers_table import committed, sections, text
from benchmarks.record import RESULTS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CLAIM = re.compile(r"\[([^\]]*\d[^\]]*)\]\((?:docs/)?benchmarks\.md#([\w-]+)\)")
CLAIMS = [(page.name, *claim) for page in PAGES for claim in CLAIM.findall(page.read_text(encoding="utf-8"))]


def test_the_tables_are_those_of_the_newest_records() -> None:
    assert committed() == text(), "write them anew: python -m benchmarks.numbers_table"


def test_there_are_claims() -> None:
    assert len(CLAIMS) >= 10


@pytest.mark.parametrize(("page", "claim", "section"), CLAIMS)
def test_a_number_elsewhere_stands_in_the_table_that_it_links_to(page: str, claim: str, section: str) -> None:
    what, numbers = sections()[section]
    for number in re.findall(r"\d[\d,.]*\d|\d", claim):
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", what + numbers), f"{page}: {claim}"


def test_every_record_named_is_there() -> None:
    named = {name for page in PAGES for name in re.findall(r"results/([\w-]+)-\*", page.read_text(encoding="utf-8"))}
    assert not [name for name in named if not list(RESULTS.glob(f"{name}-*.json"))]
