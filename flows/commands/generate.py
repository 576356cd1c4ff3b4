"""`draftsmith generate`: a child answers a prompt with target, drafter and depth that a policy of the store decided on.

It runs as it was measured: on the policy's threads, in its dtype, with the chat template where the prompts were chats.
"""

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

from components.contract import Artifact, UserError
from components.machine import num_usable_cores
from components.policy import Policy, judged_choice, read_policy, served_depths
from components.text import one_line
from flows.commands.terminal import Device, echo, out
from flows.planning.this_machine import resolve_device
from storage.artifacts.store import Store

ROOT = Path(__file__).resolve().parents[2]


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue, or what the user says.")],
    key: Annotated[
        str | None, typer.Option(help="A Release, DepthPolicy or Draft; default: the newest policy.")
    ] = None,
    depth_k: Annotated[int | None, typer.Option("--depth", min=1, help="Draft depth; default: the chosen one.")] = None,
    as_chat: Annotated[
        bool | None,
        typer.Option("--chat/--text", help="In the chat template, or continued; default: as what was measured."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Tokens to write.")] = 96,
    device: Device = "auto",
) -> None:
    """Answer a prompt plain and speculative, side by side; plain alone where a policy says not to speculate."""
    store = Store()
    pair = find_pair(store, key)
    depth = depth_k if depth_k is not None else pair.depth_k
    target = _find_artifact(store, "target", pair.target_key)
    draft = _find_artifact(store, "draft", pair.draft_key) if depth else None
    request = {
        "target": str(target.path),
        "draft": str(draft.path) if draft is not None else "",
        "prompt": prompt,
        "as_chat": pair.prompt_format == "chat" if as_chat is None else as_chat,
        "depth_k": depth,
        "max_new_tokens": max_new_tokens,
        "device": resolve_device(device),
        "dtype": pair.dtype,
        "num_threads": pair.num_threads,
    }
    how = "as a chat" if request["as_chat"] else "continuing the text"
    threads = "1 thread" if pair.num_threads == 1 else f"{pair.num_threads} threads"
    name = one_line(target.info.get("model") or pair.target_key[:12])
    echo(f"{name} answers {how}, {pair.dtype if pair.dtype != 'auto' else 'in its own dtype'}, {threads}")
    if not depth:
        echo("plain decoding: the policy says not to speculate; --depth N shows the drafter all the same")
    command = [sys.executable, "-m", "components.decoding.side_by_side"]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(request), capture_output=True, text=True, check=False)
    if done.returncode == 2:
        raise UserError(done.stderr.strip().splitlines()[-1])
    if done.returncode != 0:
        raise RuntimeError(f"generate failed: {done.stderr.strip()[-2000:]}")
    print_side_by_side({**json.loads(done.stdout), "method": pair.method, "depth_k": depth}, out)


def _find_artifact(store: Store, what: str, key: str) -> Artifact:
    artifact = store.get(key)
    if artifact is None:
        raise UserError(f"generate: the {what} {key[:12]} is not in the store any more; run the pipeline again")
    return artifact


@dataclass(frozen=True)
class Pair:
    """A drafter and how deep to draft with it; depth 0: not at all. The keys name artifacts of the store.

    num_threads, dtype, prompt_format: what it was measured with.
    """

    target_key: str
    draft_key: str
    method: str
    depth_k: int
    num_threads: int
    dtype: str = "auto"
    prompt_format: str = "text"


def find_pair(store: Store, key: str | None) -> Pair:
    """The drafter to generate with: a Draft by its key, or what a Release, a DepthPolicy or the newest one decided.

    Raises:
        UserError: there is none.
    """
    if key is None:
        for candidate in reversed(store.keys()):
            if store.record_of(candidate)["kind"] == "DepthPolicy":
                return _decided(store, candidate)
        raise UserError("generate: no drafter has been chosen yet; `draftsmith run quickstart` makes one")
    content = store.record_of(store.resolve(key))
    if content["kind"] == "Draft":
        info = content["info"]
        depth = int(info["num_steps"])
        return Pair(str(info["target_key"]), str(content["key"]), str(info["method"]), depth, num_usable_cores())
    policy = content["key"] if content["kind"] == "DepthPolicy" else content["record"].get("inputs", {}).get("policy")
    if not isinstance(policy, str):
        raise UserError(f"generate: {key} is a {content['kind']}; give the key of a Release, a DepthPolicy or a Draft")
    return _decided(store, policy)


def _decided(store: Store, key: str) -> Pair:
    """What a policy decided: the drafter that it is about, at the depth that is served."""
    policy = _policy(store, key)
    choice = judged_choice(policy)
    if choice is None:
        raise UserError(f"generate: the policy {key[:12]} has chosen nothing; --key names another, or a Draft")
    return Pair(
        policy.target_key,
        choice.draft_key,
        choice.method,
        served_depths(policy).get(choice.draft_key, 0),
        policy.threads.get(choice.draft_key) or num_usable_cores(),
        policy.dtype or "auto",
        policy.prompt_format or "text",
    )


def _policy(store: Store, key: str) -> Policy:
    try:
        return read_policy(store.path_of(key))
    except UserError as error:
        raise UserError(f"generate: the policy {key[:12]} cannot be read; run the pipeline again") from error


def print_side_by_side(answer: dict[str, Any], console: Console) -> None:
    """The continuations of one prompt (components/decoding/side_by_side.py), with their speed."""
    panels = []
    runs = [name for name in ("plain", "speculative") if name in answer]
    for name in runs:
        run = answer[name]
        speed = run["num_tokens"] / (run["ms"] / 1000) if run["ms"] else 0.0
        title = name if name == "plain" else f"{answer['method']}, depth {answer['depth_k']}"
        rounds = "" if name == "plain" else f", {run['rounds']} rounds"
        foot = f"{run['num_tokens']} tokens in {run['ms']:.0f} ms, {speed:.0f} a second{rounds}"
        panels.append(
            Panel(Text(run["text"]), title=Text(title), subtitle=Text(foot), width=console.width // len(runs) - 1)
        )
    console.print(Columns(panels))
    if "speculative" not in answer:
        return
    plain, fast = answer["plain"]["ms"], answer["speculative"]["ms"]
    same = "the same tokens" if answer["identical"] else "DIFFERENT tokens"
    ratio = f"{plain / fast:.2f} times as fast" if fast else "too short to time"
    console.print(f"{same}, {ratio} in this one run", markup=False, soft_wrap=True)
