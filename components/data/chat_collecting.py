"""Step `data.collect_chats`: any mix of sources, recognised, cleaned, and unified into whole conversations.

Work is cut into shards of files, by name and size alone, so the result is the same for any number of workers, and a
killed step goes on after its finished shards. Rows stay in the order of the sources, their files and lines.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from components.contract import Chats, Context, UserError
from components.data.chat_source_files import FoundFile, list_files
from components.data.chat_source_rows import ChatShard, collect_shard
from components.data.chat_sources import ChatSource, named_twice
from components.data.chats import DroppedWriter, most_first, read_dropped, write_manifest
from components.data.cleaning import Cleaning, faults_of
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
        redact: whether personal data are replaced by [EMAIL], [KEY], [CARD], [IP] and [PHONE] (needs
            `draftsmith[redaction]`).
    """
    shards = _shards(sources, clean, redact, ctx)
    for _ in ctx.map(collect_shard, shards, what="shards of files"):
        pass
    counts = [json.loads(shard.file.read_text(encoding="utf-8")) for shard in shards]
    by_source: dict[str, dict[str, Any]] = {}
    for shard, counted in zip(shards, counts, strict=True):
        _add(by_source, shard, counted)
    for name, found in by_source.items():
        _report(name, found, ctx)
    dropped = _join(ctx, shards, counts, by_source)
    named = ("languages", "domains", "shapes", "redacted")
    info = {name: most_first(sum((Counter(counted[name]) for counted in counts), Counter())) for name in named}
    read, kept = (sum(found[name] for found in by_source.values()) for name in ("read", "kept"))
    assert kept + sum(dropped.values()) == read, "a row was lost"
    return Chats.made(
        ctx,
        {
            "num_rows": kept,
            "num_read": read,
            "num_dropped": read - kept,
            "num_characters": sum(found["characters"] for found in by_source.values()),
            "num_repaired": sum(counted["repaired"] for counted in counts),
            "dropped": dropped,
            "by_source": by_source,
            **info,
        },
    )


def collect_chats_fingerprint(settings: Mapping[str, Any]) -> dict[str, str]:
    """The content behind every source that lies here, for the step's key: file -> sha256, or why it is not read.

    Planning never asks the network: what lies on a hub or in an object store counts by its name and revision alone.
    """
    from components.targets.file_digests import sha256_of

    found: dict[str, str] = {}
    for given in settings["sources"]:
        source = ChatSource.model_validate(given)
        if is_url(source.path):
            continue
        listing = list_files(source)
        found |= {file.place: sha256_of(Path(file.place)) for file in listing.files}
        found |= {f"{source.label}: {one.where}": one.reason for one in listing.unusable}
    return found


def collect_chats_settings(given: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[Place, str]]]:
    """The settings, and what no type can say of them; flows/signature.py asks when it reads pipelines.yaml."""
    faults: list[tuple[Place, str]] = [(("clean",), f"setting 'clean': {said}") for said in faults_of(given["clean"])]
    if twice := named_twice([ChatSource.model_validate(one) for one in given["sources"]]):
        faults.append((("sources",), f"setting 'sources': two are called {twice!r}; give each a name"))
    return given, faults


def _shards(sources: Sequence[ChatSource], clean: Cleaning, redact: bool, ctx: Context) -> list[ChatShard]:
    """The work, cut where files or lines add up to 32 MiB; a source that is streamed or has a limit is one shard."""
    if twice := named_twice(sources):
        raise UserError(f"sources: two are called {twice!r}; give each a name")
    shards: list[ChatShard] = []
    for source in sources:
        listing = list_files(source)
        if listing.num_others:
            ctx.note(f"{source.label}: {listing.num_others} files of other kinds left alone")
        groups: list[list[FoundFile]] = [[]]
        size = 0
        whole = source.max_rows is not None or source.hub is not None
        pieces = (
            listing.files
            if whole
            else [piece for file in listing.files for piece in file.cut(source.kind, _SHARD_BYTES)]
        )
        for file in pieces:
            full = groups[-1] and (size + file.size > _SHARD_BYTES or len(groups[-1]) >= _SHARD_FILES)
            if full and not whole:
                groups.append([])
                size = 0
            groups[-1].append(file)
            size += file.size
        for number, group in enumerate(groups):
            unusable = tuple(listing.unusable) if number == 0 else ()
            folder = ctx.scratch / f"shard-{len(shards):05d}"
            shards.append(ChatShard(folder, source, tuple(group), unusable, clean, redact))
    return shards


def _add(by_source: dict[str, dict[str, Any]], shard: ChatShard, counted: Mapping[str, Any]) -> None:
    """Add the counts of a shard to those of its source."""
    known = shard.source.known
    found = by_source.setdefault(
        shard.source.label,
        {"read": 0, "kept": 0, "characters": 0, "dropped": {}, "files": 0, "broken": 0, "stopped": 0}
        | {"first_broken": [], "folder": ""}
        | ({"licence": known.licence} if known is not None else {}),
    )
    for name in ("read", "kept", "characters", "broken", "stopped"):
        found[name] += counted[name]
    found["files"] += sum(file.span is None or file.span.start == 0 for file in shard.files)
    found["first_broken"] += counted["first_broken"]
    found["dropped"] = most_first(Counter(found["dropped"]) + Counter(counted["dropped"]))
    if not found["folder"] and counted["dropped"]:
        found["folder"] = str(shard.folder)


def _report(name: str, found: dict[str, Any], ctx: Context) -> None:
    """Say what became of a source; raises UserError where nothing of it is of use."""
    folder, stopped, broken = (found.pop(field) for field in ("folder", "stopped", "first_broken"))
    dropped = ", ".join(f"{number} {reason}" for reason, number in list(found["dropped"].items())[:5])
    if not found["kept"]:
        if not folder:
            raise UserError(f"sources: {name}: there are no rows in it; remove it or fill it")
        first = next(read_dropped(Path(folder)))
        said = " ".join(first["excerpt"].split())[:160]
        raise UserError(f"sources: {name}: no usable row in {found['read']} ({dropped}); {first['where']}: {said}")
    if stopped:
        ctx.note(f"{name}: stopped after {found['read']} rows (max_rows)")
    if dropped:
        ctx.note(f"{name}: {found['kept']} of {found['read']} rows kept; dropped {dropped}; see dropped.parquet")
    if broken:
        ctx.note(f"{name}: {found['broken']} files could not be read, or not to their end: {'; '.join(broken[:5])}")


def _join(
    ctx: Context, shards: Sequence[ChatShard], counts: Sequence[Mapping[str, Any]], by_source: Mapping[str, Any]
) -> dict[str, int]:
    """Move the parts of all shards beside one another, join what was dropped; gives the rows dropped by reason.

    Safe to repeat after a kill: a part is either still in its shard or already where it belongs.
    """
    parts: list[str] = []
    with DroppedWriter(ctx.out) as dropped:
        for shard, counted in zip(shards, counts, strict=True):
            for part in counted["parts"]:
                parts.append(f"part-{len(parts):05d}.parquet")
                if (shard.folder / part).is_file():
                    os.replace(shard.folder / part, ctx.out / parts[-1])
            dropped.copy(shard.folder)
    kept = {name: found["kept"] for name, found in sorted(by_source.items())}
    write_manifest(ctx.out, {"parts": parts, "num_rows": sum(kept.values()), "by_source": kept})
    return most_first(dropped.counts)
