"""Answer one prompt plain and, with a drafter, speculatively, for people to compare: `draftsmith generate`.

A separate program (`python -m components.decoding.side_by_side`), because the command line does not load torch. The
request on stdin is JSON: {"target", "draft": directories of artifacts ("" for plain decoding alone), "prompt",
"as_chat", "depth_k", "max_new_tokens", "device", "dtype", "num_threads"}; the answer on stdout is one JSON object.
Times are of one run each, not a benchmark.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from components.contract import Draft, UserError
from components.data.formats.prompts import encode_text
from components.decoding.chain import Decoded, decode
from components.decoding.session import Session
from components.drafts.interface import Drafter
from components.drafts.storage.files import open_draft
from components.targets.load import open_target, open_tokenizer

WARM_UP_TOKENS = 8


def compare_once(request: dict[str, Any]) -> dict[str, Any]:
    """{"plain", "speculative": {"text", "num_tokens", "ms", "rounds"}, "identical"}, without a drafter {"plain"} alone;
    `request` as in the module."""
    torch.set_num_threads(int(request["num_threads"]))
    folder = Path(request["target"])
    tokenizer = open_tokenizer(folder)
    target = open_target(folder, device=request["device"], dtype=request["dtype"])
    prompt_ids = encode_text(tokenizer, request["prompt"], as_chat=request["as_chat"])
    proposers: dict[str, Drafter | None] = {"plain": None}
    if request["draft"]:
        draft = Draft(key="", path=Path(request["draft"]))
        proposers["speculative"] = open_draft(draft, target, dtype=target.dtype)
    depth, limit = int(request["depth_k"]), int(request["max_new_tokens"])
    session = Session(target, len(prompt_ids) + limit + depth + 1)
    runs: dict[str, Decoded] = {}
    for name, proposer in proposers.items():
        for tokens in (min(WARM_UP_TOKENS, limit), limit):
            at_depth = depth if proposer is not None else 0
            runs[name] = decode(target, proposer, prompt_ids, max_new_tokens=tokens, depth=at_depth, session=session)
    answer: dict[str, Any] = {
        name: {
            "text": tokenizer.decode(run.tokens, skip_special_tokens=True),
            "num_tokens": len(run.tokens),
            "ms": run.decode_ns / 1e6,
            "rounds": len(run.rounds),
        }
        for name, run in runs.items()
    }
    if "speculative" in runs:
        answer["identical"] = runs["plain"].tokens == runs["speculative"].tokens
    return answer


def main() -> int:
    """Read the request, write the answer; a UserError is one line on stderr and exit code 2."""
    try:
        sys.stdout.write(json.dumps(compare_once(json.load(sys.stdin))) + "\n")
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
