"""Step `data.collect_corpus`: collects text documents to pre-train on, split by file so that nothing leaks.

The held-out files are those of `stdlib_files.is_held_out`; prompts cut from the same sources for evaluation use the
same function.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from components.contract import Context, Corpus, UserError
from components.data.stdlib_files import HELD_OUT_PERCENT, stdlib_files

CorpusSource = Literal["python-stdlib"]


def collect_corpus(
    *,
    source: CorpusSource = "python-stdlib",
    with_tests: bool = True,
    min_characters: Annotated[int, Field(ge=0)] = 64,
    ctx: Context,
) -> Corpus:
    """Write `train.jsonl` and `held_out.jsonl`, one {"id", "source", "text"} a line, a document a file.

    A document is in exactly one of the two: by file (a stable hash of its path), and identical texts are kept once, in
    favour of held-out. The part of "source" before the first slash is the document's group.

    Args:
        source: where the documents come from: the standard library of the interpreter that runs this.
        with_tests: whether to take the library's own test suites too (two thirds of all text).
        min_characters: documents with fewer characters are left out.
    """
    held_out: list[dict[str, str]] = []
    train: list[dict[str, str]] = []
    seen_digests: set[str] = set()
    counts: Counter[str] = Counter()
    files = [file for file in stdlib_files() if with_tests or not file.source.startswith("stdlib-tests/")]
    for file in sorted(files, key=lambda file: not file.held_out):  # held-out first: its copies must not be trained on
        try:
            text = file.read()
        except (UnicodeError, SyntaxError) as error:
            ctx.set_aside(file.source, 1, f"cannot be decoded: {error}")
            counts["unreadable"] += 1
            continue
        digest = hashlib.sha256("\n".join(line.rstrip() for line in text.splitlines()).encode("utf-8")).hexdigest()
        if len(text) < min_characters or digest in seen_digests:
            counts["short_or_duplicate"] += 1
            continue
        seen_digests.add(digest)
        document = {"id": digest[:16], "source": file.source, "text": text}
        (held_out if file.held_out else train).append(document)
    if not train or not held_out:
        raise UserError(
            f"source {source}: no readable Python files in this interpreter's library; install python3 in full"
        )
    for name, documents in (("train", train), ("held_out", held_out)):
        with (ctx.out / f"{name}.jsonl").open("w", encoding="utf-8") as out:
            for document in sorted(documents, key=lambda document: document["source"]):
                out.write(json.dumps(document) + "\n")
    return Corpus.of_step(
        ctx,
        {
            "source": source,
            "licence": "PSF-2.0",
            "python_version": platform.python_version(),
            "held_out_percent": HELD_OUT_PERCENT,
            "train_documents": len(train),
            "held_out_documents": len(held_out),
            "train_characters": sum(len(document["text"]) for document in train),
            "held_out_characters": sum(len(document["text"]) for document in held_out),
            **counts,
        },
    )


def collect_corpus_fingerprint(settings: Mapping[str, Any]) -> dict[str, str]:
    """The content of `source`, for the step's key: the interpreter's version determines the library."""
    return {"python-stdlib": platform.python_version()}
