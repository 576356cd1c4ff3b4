"""Summary and manifest of a finished Conversations artifact: counts, looping rates, languages and domains."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from components.contract import Context

if TYPE_CHECKING:
    from components.data.answers import AnswerRow

ANSWERED_SPLITS = ("train", "validation")


def write_manifest(ctx: Context, target_key: str, shards: Sequence[str], shard_size: int) -> None:
    """Write the list of the shards; with it the artifact is complete."""
    manifest = {"target_key": target_key, "shards": list(shards), "shard_size": shard_size}
    (ctx.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def summarise(ctx: Context, shards: Sequence[str]) -> dict[str, Any]:
    """Counts and looping rates over all rows; many identical answers or low bigram ratios mean little variety."""
    from components.data.answers import read_shard

    rows: list[AnswerRow] = []
    answers: set[bytes] = set()
    for name in shards:
        for row, ids, mask in read_shard(ctx.out / name):
            rows.append(row)
            answers.add(hashlib.sha256(ids[mask].numpy().tobytes()).digest()[:16])
    greedy = [row for row in rows if row.temperature == 0.0]
    sampled = [row for row in rows if row.temperature]
    return {
        "num_rows": {split: sum(row.split == split for row in rows) for split in ANSWERED_SPLITS},
        "num_tokens": sum(row.num_prompt_tokens + row.num_answer_tokens for row in rows),
        "num_answer_tokens": sum(row.num_answer_tokens for row in rows),
        "num_sampled": len(sampled),
        "num_ended": sum(row.ended for row in rows),
        "num_duplicate_answers": len(rows) - len(answers),
        "distinct_bigrams_greedy": _mean(greedy),
        "distinct_bigrams_sampled": _mean(sampled),
        "num_looping": sum(row.distinct_bigrams < 0.3 for row in rows),
        "languages": _tokens_by([(row.language, row.num_answer_tokens) for row in rows]),
        "domains": _tokens_by([(row.domain, row.num_answer_tokens) for row in rows]),
    }


def _tokens_by(pairs: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Answer tokens of each name that is not empty, largest first."""
    counted: Counter[str] = Counter()
    for name, tokens in pairs:
        if name:
            counted[name] += tokens
    return dict(sorted(counted.items(), key=lambda item: (-item[1], item[0])))


def _mean(rows: Sequence[AnswerRow]) -> float | None:
    return round(sum(row.distinct_bigrams for row in rows) / len(rows), 4) if rows else None
