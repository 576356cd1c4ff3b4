"""`draftsmith generate`: find target, drafter and chosen depth in the store, and let a child continue the prompt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from components.contract import UserError
from flows.device import num_usable_cores
from storage.artifacts import Store

ROOT = Path(__file__).resolve().parents[1]


def find_policy(store: Store, key: str | None) -> str:
    """The key of the DepthPolicy to use: the one given, that of the Release given, or the newest with a winner.

    Raises:
        UserError: there is none.
    """
    if key is not None:
        found = store.record_of(store.resolve(key))
        if found["kind"] == "DepthPolicy":
            return str(found["key"])
        policy = found["record"].get("inputs", {}).get("policy")
        if not isinstance(policy, str):
            raise UserError(f"generate: {key} is a {found['kind']}; give the key of a Release or a DepthPolicy")
        return policy
    for candidate in reversed(store.keys()):
        if store.record_of(candidate)["kind"] == "DepthPolicy" and _policy(store, candidate).get("winner"):
            return candidate
    raise UserError("generate: no drafter has been chosen yet; `draftsmith run quickstart` makes one")


def generate(
    store: Store, prompt: str, *, key: str | None, depth_k: int | None, max_new_tokens: int, device: str
) -> dict[str, Any]:
    """Plain and speculative continuation of `prompt`; see components/decoding/side_by_side.py for the answer.

    Raises:
        UserError: no drafter to use, or the prompt is wrong.
    """
    policy = _policy(store, find_policy(store, key))
    winner = policy.get("winner")
    if not winner:
        raise UserError("generate: this policy says not to speculate: there is no drafter to show")
    depth = depth_k if depth_k is not None else int(winner["depth_k"])
    places = {}
    for what, wanted in (("target", policy["target_key"]), ("draft", winner["draft_key"])):
        artifact = store.find(str(wanted))
        if artifact is None:
            raise UserError(
                f"generate: the {what} {str(wanted)[:12]} is not in the store any more; run the pipeline again"
            )
        places[what] = str(artifact.path)
    request = {
        **places,
        "prompt": prompt,
        "depth_k": max(1, depth),
        "max_new_tokens": max_new_tokens,
        "device": device,
        "num_threads": num_usable_cores(),
    }
    command = [sys.executable, "-m", "components.decoding.side_by_side", json.dumps(request)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        raise UserError(done.stderr.strip().splitlines()[-1])
    if done.returncode != 0:
        raise RuntimeError(f"generate failed: {done.stderr.strip()[-2000:]}")
    answer = dict(json.loads(done.stdout))
    return {**answer, "method": winner["method"], "depth_k": request["depth_k"]}


def _policy(store: Store, key: str) -> dict[str, Any]:
    try:
        return dict(json.loads((store.path_of(key) / "policy.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"generate: the policy {key[:12]} cannot be read; run the pipeline again") from error
