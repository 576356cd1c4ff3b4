"""Step `data.deduplicate`: removes benchmark contamination and exact and near duplicates before a mix is made.

Three passes over the rows of all sources together remove contaminated rows (decontamination.py), then exact duplicates,
then near duplicates (near_duplicates_merge.py). First a sharded pass computes a sketch of each part
(near_duplicates_sketch.py); finished sketches survive a kill. `dropped.parquet` lists every removed row with the row
that stays instead of it, or with the benchmark prompt and the text that matched it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import Field

from components.contract import Chats, Context, Prompts, UserError

_ITEMS: Final = "benchmarks.parquet"


def deduplicate(
    chats: list[Chats],
    keep_out: list[Prompts] | None = None,
    *,
    similarity: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8,
    ngram: Annotated[int, Field(ge=1, le=32)] = 5,
    num_permutations: Annotated[int, Field(ge=16, le=1024)] = 128,
    prefer: list[str] | None = None,
    benchmark_ngram: Annotated[int, Field(ge=4, le=64)] = 13,
    benchmark_overlap: Annotated[float, Field(gt=0.0, le=1.0)] = 0.3,
    ctx: Context,
) -> Chats:
    """Write the rows that are not duplicates, in their order, and `dropped.parquet` with all others.

    Words are compared, or characters where a script writes no spaces; case, width, punctuation and white space do not
    count. Of duplicates the row of the preferred source stays, then the longer, then the one with the smaller row_id.

    Args:
        chats: rows of any sources; duplicates are found across all of them.
        keep_out: prompts of benchmarks: rows that contain a prompt or a reference answer of their splits test and
            warm_up, in any turn, are removed.
        similarity: rows whose sets of n-grams have at least this Jaccard index are near duplicates; above 0.99 only
            rearranged repetition is. Rows of fewer than `ngram` units are compared as a whole.
        ngram: units (words; Chinese characters) of an n-gram in near duplicates. A changed word changes this many
            n-grams, so a smaller number forgives more.
        num_permutations: length of a MinHash signature. Longer ones miss fewer pairs near the threshold and take time;
            the bands they are cut into follow from similarity (near_duplicates.py shows the S-curve).
        prefer: names of sources, the best first; sources that are not named come last, all alike; null: all are alike.
        benchmark_ngram: units of an n-gram in the search for benchmark texts. Shorter prompts are searched as a whole.
        benchmark_overlap: share of a prompt's n-grams that a row must contain to be removed; 0.01: one is enough.
    """
    from components.data.chats import read_manifest
    from components.data.decontamination import MIN_TURN, items_of, num_too_short, write_items
    from components.data.near_duplicates import banding
    from components.data.near_duplicates_dropped import write_deduplicated
    from components.data.near_duplicates_merge import decide_rows
    from components.data.near_duplicates_sketch import SketchShard, sketch_part
    from components.data.near_duplicates_table import Sketches

    parts = [one.path / part for one in chats for part in read_manifest(one)["parts"]]
    items = items_of(keep_out or [])
    file = ctx.scratch / _ITEMS if items else None
    if file is not None:
        write_items(file, items)
        if short := num_too_short(items):
            ctx.note(f"{short} benchmark prompts are too short to be looked for (fewer than {MIN_TURN} words)")
    cut = banding(similarity, num_permutations)
    shards = [
        SketchShard(
            file=ctx.scratch / f"sketch-{number:05d}.arrow",
            part=part,
            ngram=ngram,
            num_permutations=num_permutations,
            cut=cut,
            preferred=tuple(prefer or ()),
            items=file,
            benchmark_ngram=benchmark_ngram,
            benchmark_overlap=benchmark_overlap,
        )
        for number, part in enumerate(parts)
    ]
    _check_preferred(prefer or [], chats)
    for _ in ctx.map(sketch_part, shards, what="parts read"):
        pass
    with Sketches([shard.file for shard in shards]) as sketches:
        decisions = decide_rows(
            sketches, cut.num_bands, similarity, lambda done, total: ctx.progress(done, total, "bands compared")
        )
        info = write_deduplicated(parts, sketches, decisions, items, ctx)
    _log_summary(info, ctx)
    facts = {"similarity": similarity, "num_bands": cut.num_bands, "band_length": cut.band_length}
    return Chats.of_step(ctx, {**info, **facts, "num_benchmark_texts": len(items)})


def _log_summary(info: Mapping[str, Any], ctx: Context) -> None:
    dropped = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in info["dropped"].items())
    ctx.note(f"{info['num_rows']} of {info['num_read']} rows stay; dropped: {dropped or 'none'}; see dropped.parquet")


def _check_preferred(prefer: Sequence[str], chats: Sequence[Chats]) -> None:
    from components.data.chats import read_manifest

    sources = sorted({name for one in chats for name in read_manifest(one)["by_source"]})
    for name in prefer:
        if name not in sources:
            raise UserError(f"prefer: {name}: no row has this source; there are {', '.join(sources)}")
