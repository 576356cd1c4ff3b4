"""Step `data.collect_chats`: reads any mix of sources, cleans the rows, and unifies them into whole conversations.

Work is cut into shards of files by name and size alone, so the result is the same for any number of workers, and a
killed step resumes after its finished shards. Rows stay in the order of the sources, their files and lines.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from components.contract import Chats, Context, UserError
from components.data.chat_source_files import SourceFile, list_files
from components.data.chat_source_rows import ChatShard, collect_shard
from components.data.chat_sources import ChatSource, duplicate_name
from components.data.chats import DroppedWriter, most_first, read_dropped, write_manifest
from components.data.cleaning import Cleaning, pattern_faults
from components.data.row_streams import is_url

_DEFAULT: Final = Cleaning()
_SHARD_BYTES: Final = 32 << 20
_SHARD_FILES: Final = 256
Place = tuple[str | int, ...]


def collect_chats(
    *,
    sources: Annotated[list[ChatSource], Field(min_length=1)],
    clean: Cleaning = _DEFAULT,
    redact: bool = False,
    ctx: Context,
) -> Chats:
    """Write `part-*.parquet` with every row worth training on, and `dropped.parquet` with every other and its reason.

    Args:
        sources: presets by name (eaglechat, sharegpt, ultrachat, smoltalk-chinese, perfectblend, magpie), paths, or
            sources with preset, path, name, revision, format, documents, fields, language, domain, domain_field,
            max_rows and follow_links. Read are JSONL, JSON, CSV and text (also as .gz, .bz2, .xz, .zst), Parquet and
            Arrow; folders with all below them, patterns, s3:// and other URLs of fsspec, and hf:OWNER/NAME:SPLIT (on a
            hub: `draftsmith run --online`).
        clean: which rows are dropped; see components/data/cleaning.py.
        redact: whether to replace personal data by [EMAIL], [KEY], [CARD], [IP] and [PHONE] (needs
            `draftsmith[redaction]`).
    """
    shards = _plan_shards(sources, clean, redact, ctx)
    for _ in ctx.map(collect_shard, shards, what="shards of files"):
        pass
    counts = [json.loads(shard.file.read_text(encoding="utf-8")) for shard in shards]
    by_source: dict[str, SourceTotals] = {}
    for shard, counted in zip(shards, counts, strict=True):
        preset = shard.source.chat_preset
        totals = by_source.setdefault(shard.source.label, SourceTotals(preset.licence if preset is not None else None))
        totals.add(shard, counted)
    for name, totals in by_source.items():
        _report_source(name, totals, ctx)
    dropped = _join_parts(ctx, shards, counts, by_source)
    counters = ("languages", "domains", "shapes", "redacted")
    info = {name: most_first(sum((Counter(counted[name]) for counted in counts), Counter())) for name in counters}
    num_read, num_kept = (sum(getattr(totals, name) for totals in by_source.values()) for name in ("read", "kept"))
    assert num_kept + sum(dropped.values()) == num_read, "a row was lost"
    return Chats.of_step(
        ctx,
        {
            "num_rows": num_kept,
            "num_read": num_read,
            "num_dropped": num_read - num_kept,
            "num_characters": sum(totals.characters for totals in by_source.values()),
            "num_repaired": sum(counted["repaired"] for counted in counts),
            "dropped": dropped,
            "by_source": {name: totals.facts() for name, totals in by_source.items()},
            **info,
        },
    )


def collect_chats_fingerprint(settings: Mapping[str, Any]) -> dict[str, str]:
    """The content of every local source, for the step's key: file -> sha256, or the reason why it is not read.

    Planning never uses the network: sources on a hub or in an object store count by name and revision alone.
    """
    from components.targets.file_digests import sha256_of

    digests: dict[str, str] = {}
    for declared in settings["sources"]:
        source = ChatSource.model_validate(declared)
        if is_url(source.path):
            continue
        listing = list_files(source)
        digests |= {file.location: sha256_of(Path(file.location)) for file in listing.files}
        digests |= {f"{source.label}: {unusable.name}": unusable.reason for unusable in listing.unusable}
    return digests


def collect_chats_settings(settings: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[Place, str]]]:
    """The settings, and faults that no type can express; called when pipelines.yaml is checked (flows/signature.py)."""
    clean = pattern_faults(settings["clean"])
    faults: list[tuple[Place, str]] = [(("clean",), f"setting 'clean': {fault}") for fault in clean]
    if twice := duplicate_name([ChatSource.model_validate(source) for source in settings["sources"]]):
        faults.append((("sources",), f"setting 'sources': two are called {twice!r}; give each a name"))
    return settings, faults


def _plan_shards(sources: Sequence[ChatSource], clean: Cleaning, redact: bool, ctx: Context) -> list[ChatShard]:
    """Shards of about 32 MiB of files or lines; a source that is streamed or has a row limit is one shard."""
    if twice := duplicate_name(sources):
        raise UserError(f"sources: two are called {twice!r}; give each a name")
    shards: list[ChatShard] = []
    for source in sources:
        listing = list_files(source)
        if listing.num_others:
            ctx.note(f"{source.label}: {listing.num_others} files of other kinds left alone")
        groups: list[list[SourceFile]] = [[]]
        size = 0
        undivided = source.max_rows is not None or source.hub is not None
        pieces = listing.files
        if not undivided:
            pieces = [piece for file in pieces for piece in file.cut(source.kind, _SHARD_BYTES)]
        for file in pieces:
            full = groups[-1] and (size + file.size > _SHARD_BYTES or len(groups[-1]) >= _SHARD_FILES)
            if full and not undivided:
                groups.append([])
                size = 0
            groups[-1].append(file)
            size += file.size
        for number, group in enumerate(groups):
            unusable = tuple(listing.unusable) if number == 0 else ()
            folder = ctx.scratch / f"shard-{len(shards):05d}"
            shards.append(ChatShard(folder, source, tuple(group), unusable, clean, redact))
    return shards


@dataclass
class SourceTotals:
    """Counts of one source, summed over its shards. stopped: shards that reached max_rows.

    first_broken: messages of files that were not read to their end. folder: a shard with dropped rows.
    """

    licence: str | None
    read: int = 0
    kept: int = 0
    characters: int = 0
    broken: int = 0
    stopped: int = 0
    files: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first_broken: list[str] = field(default_factory=list)
    folder: Path | None = None

    def add(self, shard: ChatShard, counted: Mapping[str, Any]) -> None:
        """Add the counts of a shard."""
        for name in ("read", "kept", "characters", "broken", "stopped"):
            setattr(self, name, getattr(self, name) + counted[name])
        self.files += sum(file.span is None or file.span.start == 0 for file in shard.files)
        self.dropped.update(counted["dropped"])
        self.first_broken += counted["first_broken"]
        if self.folder is None and counted["dropped"]:
            self.folder = shard.folder

    def facts(self) -> dict[str, Any]:
        """The counts under their names in the artifact's info."""
        facts = {name: getattr(self, name) for name in ("read", "kept", "characters", "dropped", "files", "broken")}
        facts["dropped"] = most_first(self.dropped)
        return facts | ({} if self.licence is None else {"licence": self.licence})


def _report_source(name: str, totals: SourceTotals, ctx: Context) -> None:
    """Log the outcome of a source; raises UserError where no row of it is usable."""
    dropped = ", ".join(f"{number} {reason}" for reason, number in list(most_first(totals.dropped).items())[:5])
    if not totals.kept:
        if totals.folder is None:
            raise UserError(f"sources: {name}: there are no rows in it; remove it or fill it")
        first = next(read_dropped(totals.folder))
        excerpt = " ".join(first["excerpt"].split())[:160]
        raise UserError(f"sources: {name}: no usable row in {totals.read} ({dropped}); {first['where']}: {excerpt}")
    if totals.stopped:
        ctx.note(f"{name}: stopped after {totals.read} rows (max_rows)")
    if dropped:
        ctx.note(f"{name}: {totals.kept} of {totals.read} rows kept; dropped {dropped}; see dropped.parquet")
    if totals.broken:
        first_broken = "; ".join(totals.first_broken[:5])
        ctx.note(f"{name}: {totals.broken} files could not be read, or not to their end: {first_broken}")


def _join_parts(
    ctx: Context, shards: Sequence[ChatShard], counts: Sequence[Mapping[str, Any]], by_source: dict[str, SourceTotals]
) -> dict[str, int]:
    """Move the parts of all shards into the output, and join their dropped rows; returns dropped rows by reason.

    This may be repeated after a kill: a part is either still in its shard or already in the output.
    """
    parts: list[str] = []
    with DroppedWriter(ctx.out) as dropped:
        for shard, counted in zip(shards, counts, strict=True):
            for part in counted["parts"]:
                parts.append(f"part-{len(parts):05d}.parquet")
                if (shard.folder / part).is_file():
                    os.replace(shard.folder / part, ctx.out / parts[-1])
            dropped.copy(shard.folder)
    rows_by_source = {name: totals.kept for name, totals in sorted(by_source.items())}
    write_manifest(ctx.out, {"parts": parts, "num_rows": sum(rows_by_source.values()), "by_source": rows_by_source})
    return most_first(dropped.counts)
