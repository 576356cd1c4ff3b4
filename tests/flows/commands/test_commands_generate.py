"""`draftsmith generate` answers as a policy decided, or with a Draft, and says what else it was given."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_targets import make_tiny_target
from toy_garden import Cli

from components.contract import Target, UserError
from components.drafts.settings import NgramSettings
from components.drafts.storage.files import save_untrained
from components.policy import Policy, Winner
from components.rows import DepthChoice
from components.speedup.policy_markdown import policy_summary, write_policy
from flows.commands.generate import find_pair
from storage.artifacts.store import Store

TARGET, DRAFT = "t" * 64, "d" * 64


def keep_policy(store: Store, key: str, verdict: str, depth: int) -> None:
    """Put a policy of one drafter into the store, measured on one thread."""
    choice = DepthChoice("s", TARGET, DRAFT, "ngram", "all", 1, depth, "", 0.01, *[1.0] * 3, *[None] * 5, verdict, [])
    policy = Policy(
        *("s", TARGET, "float32", "plain", "", 0.01, [choice], [], [], [], [], []),
        winner=Winner(DRAFT, "ngram", depth) if depth else None,
        judged=DRAFT,
        verdict=verdict,
        threads={DRAFT: 1},
        prompt_format="chat",
    )
    out, _ = store.open_staging(key)
    write_policy(out, policy)
    store.commit(key, "DepthPolicy", policy_summary(policy), {})


def test_without_any_policy_it_says_what_makes_one(store: Store) -> None:
    with pytest.raises(UserError, match="generate: no drafter has been chosen yet; `draftsmith run quickstart`"):
        find_pair(store, None)


def test_a_key_that_is_not_there_is_told(store: Store) -> None:
    with pytest.raises(UserError):
        find_pair(store, "0123456789")


@pytest.mark.parametrize(
    ("verdict", "depth", "served"),
    [("use", 2, 2), ("undecided", 2, 2), ("do_not_speculate", 2, 0), ("do_not_speculate", 0, 0), ("invalid", 2, 0)],
)
def test_a_policy_gives_its_depth_threads_dtype_and_kind_of_prompts(
    store: Store, verdict: str, depth: int, served: int
) -> None:
    keep_policy(store, "p" * 64, verdict, depth)
    pair = find_pair(store, None)
    assert (pair.target_key, pair.draft_key, pair.depth_k) == (TARGET, DRAFT, served)
    assert (pair.num_threads, pair.dtype, pair.prompt_format) == (1, "float32", "chat")


def test_after_do_not_speculate_the_named_target_decodes_plainly(store: Store, draftsmith: Cli, tmp_path: Path) -> None:
    folder = make_tiny_target("llama", tmp_path / "target")
    out, _ = store.open_staging(TARGET)
    shutil.copytree(folder, out, dirs_exist_ok=True)
    target = store.commit(TARGET, "Target", {"model": "tiny"}, {})
    out, _ = store.open_staging(DRAFT)
    save_untrained(out, "ngram", NgramSettings(), Target(key=TARGET, path=target.path))
    store.commit(DRAFT, "Draft", {"target_key": TARGET, "method": "ngram", "num_steps": 4}, {})
    keep_policy(store, "p" * 64, "do_not_speculate", 0)
    code, printed, err = draftsmith("generate", "def add(a, b):", "--max-new-tokens", 8, "--device", "cpu")
    assert (code, err) == (0, "")
    first, second, *rest = printed.splitlines()
    assert first == "tiny answers as a chat, float32, 1 thread"
    assert second.startswith("plain decoding: the policy says not to speculate; --depth N")
    assert any("plain" in line for line in rest) and "times as fast" not in printed
