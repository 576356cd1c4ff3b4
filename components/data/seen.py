"""Digests of the conversations that nightly retraining has already processed: a watermark by content, not by date.

A Prompts artifact made from served traffic holds `seen.txt`: one content digest a line (16 hex digits, ascending) of
every conversation that it or an artifact before it has looked at, used or not. The next night reads the file of the
champion's prompts. So a killed night reads the same rows again, conversations of a refused challenger stay new, files
may be renamed, moved or read twice, and nothing depends on clocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from components.contract import Prompts, UserError
from components.data.choosing import content_of, hash_number, question_of
from components.data.prompts import SPLITS, Prompt, read_prompts

FILE: Final = "seen.txt"
EVALUATION: Final = ("test", "validation", "warm_up")


def digest_of(prompt: Prompt) -> int:
    """A digest of a conversation's content below 2**64; white space does not count."""
    return hash_number(content_of(prompt))


def read_seen(prompts: Prompts | None) -> set[int]:
    """Digests of all conversations that these prompts and those before them have looked at; empty for None."""
    if prompts is None:
        return set()
    digests = {digest_of(prompt) for split in SPLITS for prompt in read_prompts(prompts, split)}
    file = prompts.path / FILE
    if file.is_file():
        try:
            digests.update(int(line, 16) for line in file.read_text(encoding="ascii").splitlines())
        except ValueError as error:
            raise UserError(f"{file}: not a list of digests ({error}); run the pipeline that made it again") from error
    return digests


def write_seen(directory: Path, digests: Iterable[int]) -> None:
    """Write `seen.txt` into the directory of a Prompts artifact."""
    lines = "".join(f"{digest:016x}\n" for digest in sorted(digests))
    (directory / FILE).write_text(lines, encoding="ascii")


def questions_in(prompts: Prompts | None, *splits: str) -> frozenset[int]:
    """Hashes of the questions in some splits; empty for None."""
    if prompts is None:
        return frozenset()
    return frozenset(hash_number(question_of(prompt)) for split in splits for prompt in read_prompts(prompts, split))
