"""`draftsmith generate`: find target, drafter and chosen depth in the store, and let a child continue the prompt."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from components.contract import UserError
from components.machine import num_usable_cores
from components.policy import Policy, read_policy
from flows.commands.terminal import Device, out
from flows.planning.this_machine import resolve_device
from storage.artifacts.store import Store

ROOT = Path(__file__).resolve().parents[2]


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    key: Annotated[
        str | None, typer.Option(help="A Release, DepthPolicy or Draft; default: the newest winner.")
    ] = None,
    depth_k: Annotated[int | None, typer.Option("--depth", min=1, help="Draft depth; default: the chosen one.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Tokens to write.")] = 96,
    device: Device = "auto",
) -> None:
    """Continue a prompt twice, plain and speculative, side by side."""
    store = Store()
    pair = find_pair(store, key)
    places = {}
    for what, artifact_key in (("target", pair.target_key), ("draft", pair.draft_key)):
        artifact = store.get(artifact_key)
        if artifact is None:
            raise UserError(
                f"generate: the {what} {artifact_key[:12]} is not in the store any more; run the pipeline again"
            )
        places[what] = str(artifact.path)
    request = {
        **places,
        "prompt": prompt,
        "depth_k": depth_k if depth_k is not None else max(1, pair.depth_k),
        "max_new_tokens": max_new_tokens,
        "device": resolve_device(device),
        "num_threads": num_usable_cores(),
    }
    command = [sys.executable, "-m", "components.decoding.side_by_side"]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(request), capture_output=True, text=True, check=False)
    if done.returncode == 2:
        raise UserError(done.stderr.strip().splitlines()[-1])
    if done.returncode != 0:
        raise RuntimeError(f"generate failed: {done.stderr.strip()[-2000:]}")
    print_side_by_side({**json.loads(done.stdout), "method": pair.method, "depth_k": request["depth_k"]}, out)


@dataclass(frozen=True)
class Pair:
    """A drafter and how deep to draft with it. target_key and draft_key name artifacts of the store."""

    target_key: str
    draft_key: str
    method: str
    depth_k: int


def find_pair(store: Store, key: str | None) -> Pair:
    """The drafter to generate with: a Draft by its key, the winner of a Release or DepthPolicy, or the newest winner.

    Raises:
        UserError: there is none.
    """
    if key is None:
        for candidate in reversed(store.keys()):
            if store.record_of(candidate)["kind"] == "DepthPolicy" and _policy(store, candidate).winner:
                return _winner(store, candidate)
        raise UserError("generate: no drafter has been chosen yet; `draftsmith run quickstart` makes one")
    content = store.record_of(store.resolve(key))
    if content["kind"] == "Draft":
        info = content["info"]
        return Pair(str(info["target_key"]), str(content["key"]), str(info["method"]), int(info["num_steps"]))
    policy = content["key"] if content["kind"] == "DepthPolicy" else content["record"].get("inputs", {}).get("policy")
    if not isinstance(policy, str):
        raise UserError(f"generate: {key} is a {content['kind']}; give the key of a Release, a DepthPolicy or a Draft")
    return _winner(store, policy)


def _winner(store: Store, key: str) -> Pair:
    policy = _policy(store, key)
    winner = policy.winner
    if winner is None:
        raise UserError("generate: this policy says not to speculate; --key of a Draft shows that drafter all the same")
    return Pair(policy.target_key, winner.draft_key, winner.method, winner.depth_k)


def _policy(store: Store, key: str) -> Policy:
    try:
        return read_policy(store.path_of(key))
    except UserError as error:
        raise UserError(f"generate: the policy {key[:12]} cannot be read; run the pipeline again") from error


def print_side_by_side(answer: dict[str, Any], console: Console) -> None:
    """Two continuations of one prompt (components/decoding/side_by_side.py), with their speed."""
    panels = []
    for name in ("plain", "speculative"):
        run = answer[name]
        speed = run["num_tokens"] / (run["ms"] / 1000) if run["ms"] else 0.0
        title = name if name == "plain" else f"{answer['method']}, depth {answer['depth_k']}"
        rounds = "" if name == "plain" else f", {run['rounds']} rounds"
        foot = f"{run['num_tokens']} tokens in {run['ms']:.0f} ms, {speed:.0f} a second{rounds}"
        panels.append(Panel(Text(run["text"]), title=Text(title), subtitle=Text(foot), width=console.width // 2 - 1))
    console.print(Columns(panels))
    plain, fast = answer["plain"]["ms"], answer["speculative"]["ms"]
    same = "the same tokens" if answer["identical"] else "DIFFERENT tokens"
    ratio = f"{plain / fast:.2f} times as fast" if fast else "too short to time"
    console.print(f"{same}, {ratio} in this one run", markup=False, soft_wrap=True)
