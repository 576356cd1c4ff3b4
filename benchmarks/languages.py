"""What leaving a language out of the training mix costs: what the last `eaglechat-mini` run compared, as a record.

Needs a finished run on your chats (`draftsmith run eaglechat-mini -p english=FILES -p chinese=FILES`). Nothing is
measured anew: each language's acceptance length, interval, change against the bilingual mix and coverage by the draft
vocabulary are those of the run. Ends with exit code 1 when acceptance on the language that was left out did not
fall.

    python -m benchmarks.languages [--home DIR]
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from benchmarks.record import ROOT, write_record
from components.rows import AcceptanceByLanguage, read_rows
from storage.artifacts.store import Store

STEP = "speedup.measure_languages"
LEFT_OUT = {"session_id", "target_key", "draft_key", "baseline_key"}
"""Columns that name what is in one store only."""


def last_comparison(store: Store) -> tuple[str, list[AcceptanceByLanguage]]:
    """(artifact key, rows) of the newest comparison in the store; ends the program when there is none."""
    oldest_first = store.keys()
    found = [key for key in oldest_first if store.record_of(key)["record"]["uses"] == STEP]
    if not found:
        raise SystemExit(
            f"no comparison of languages in {store.home / 'store'}: `draftsmith run eaglechat-mini` makes it"
        )
    key = found[-1]
    return key, read_rows(store.path_of(key), AcceptanceByLanguage)


def main() -> None:
    """Read, print, write the record."""
    parser = argparse.ArgumentParser(description="acceptance by language of the last eaglechat-mini run")
    parser.add_argument("--home", default=None, help="the home directory of the run (default: $DRAFTSMITH_HOME)")
    key, rows = last_comparison(Store(parser.parse_args().home))
    for row in rows:
        change = "" if row.change is None else f"  {row.change:+.2f} [{row.change_lo:+.2f}, {row.change_hi:+.2f}]"
        mix, interval = " + ".join(row.trained_on), f"[{row.al_lo:.2f}, {row.al_hi:.2f}]"
        print(f"{row.language:8} trained on {mix:8} {row.al:.2f} {interval}{change}  {row.verdict}")
    results = [{name: value for name, value in asdict(row).items() if name not in LEFT_OUT} for row in rows]
    file = write_record("languages", {"artifact": key, "results": results})
    print(f"written: {file.relative_to(ROOT)}")
    left_out = [row for row in rows if row.change is not None and row.num_trained_on == 0]
    if not left_out or any(row.verdict != "lower" for row in left_out):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
