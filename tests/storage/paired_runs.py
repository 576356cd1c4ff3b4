"""Timed requests of several drafters on the same prompts, and versions of a registered model without model files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.contract import Artifact
from components.rows import Request
from components.speedup.comparison.promotion_rule import judge
from storage.registry import registry
from storage.registry import versions as model_versions
from storage.registry.fact_tags import as_tags
from storage.registry.model import RegisteredVersion
from storage.registry.tracking import open_client
from storage.registry.versions import ReleaseFacts

NAME = "builtin"
Arm = tuple[str, int, float, int]  # drafter, depth, decode time a token in ms, rounds for 60 tokens


def timed(arms: list[Arm], *, num_prompts: int = 12, session: str = "s", **changes: Any) -> list[Request]:
    """Requests of plain decoding (10 ms a token) and of each arm; prompts differ in length and speed for all alike."""
    rows = []
    for number in range(num_prompts):
        for draft, depth, ms, rounds in [("", 0, 10.0, 60), *arms]:
            prompt, noise = 0.03 * ((number * 7) % 5 - 2), 0.005 * ((number * 5 + depth) % 3 - 1)
            tokens, slower = 61 + number, 1 + (prompt + noise) * bool(draft)
            facts: dict[str, Any] = {
                "session_id": session,
                "request_id": f"{session}-{draft}-{depth}-{number}",
                "target_key": "t",
                "draft_key": draft,
                "method": "eagle3" if draft else "none",
                "depth_k": depth,
                "prompt_id": f"p{number}",
                "workload": "code" if number % 2 else "chat",
                "batch_size": 1,
                "rep": 0,
                "order_index": 0,
                "is_warmup": False,
                "status": "ok",
                "prompt_tokens": 9,
                "tokens_kept": tokens,
                "tokens_raw": tokens,
                "num_rounds": rounds,
                "num_drafted": rounds * depth,
                "num_accepted": 60 - rounds,
                "ttft_ns": 1000,
                "decode_ns": int(1e6 * ms * slower * (tokens - 1)),
                "output_sha256": "",
                "identical": True if draft else None,
                "first_divergence": None,
                "tie": None,
                "dtype": "float32",
                "kernel": "plain",
                "num_threads": 1,
                "temperature": 0.0,
            }
            rows.append(Request(**{**facts, **(changes if draft else {})}))
    return rows


def light_versions(monkeypatch: Any) -> None:
    """Versions are registered with all their tags, but no model is logged: that takes a process of its own."""

    def register_only(home: Path, release: Path, facts: ReleaseFacts, run: str | None, code: Path) -> int:
        client = open_client(home)
        if not client.search_registered_models(f"name = '{facts.name}'"):
            client.create_registered_model(facts.name)
        return int(client.create_model_version(facts.name, str(release), tags=as_tags(facts.tags)).version)

    monkeypatch.setattr(model_versions, "log_version", register_only)


def release(make: Callable[..., Artifact], key: str, draft: str = "d1", **changes: Any) -> Artifact:
    """A Release of one drafter; `passed` is its own gate."""
    passed, run_id = changes.pop("passed", True), changes.pop("run_id", "r1")
    info = {
        "target": "builtin",
        "target_key": "t",
        "draft_key": draft,
        "method": "eagle3",
        "depth_k": 4,
        "verdict": "use",
        "al": 2.5,
        "speedup_meas": 1.7,
        "meas_lo": 1.6,
        "meas_hi": 1.8,
        "gate_passed": passed,
        "gate_checks": [{"name": "speedup", "passed": passed, "value": 1.7, "limit": "> 1"}],
        **changes,
    }
    files = {"release.json": {"al": 2.5}, "eagle3.txt": "weights"}
    return make(key, kind="Release", step="release", files=files, info=info, run_id=run_id)


def add(home: Path, make: Callable[..., Artifact], key: str, draft: str = "d1", **changes: Any) -> RegisteredVersion:
    """Publish a release."""
    may_promote = changes.pop("may_promote", True)
    return registry.register(home, release(make, key, draft, **changes).path, judge, may_promote=may_promote)
