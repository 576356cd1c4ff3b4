"""A tiny target with a tokenizer, an untrained drafter of each method, and a policy that says what to do with them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from report_study import decided_study
from saved_drafts import draw_wide, saved_draft
from tiny_formats import KEYS, SETTINGS, VOCAB, WHOLE
from tiny_targets import save_with_words, tiny_llama

from components.contract import Context, DepthPolicy, Draft, Target
from components.drafts.interface import AbstractDraft
from components.drafts.storage.files import build_draft
from components.publish.formats.interface import Source
from components.publish.release.export import source_of
from components.targets import load_target
from components.targets.interface import AbstractTarget
from components.targets.load import open_target

# The checkpoints with modules of their own serve here too; each test folder is a search path of its own.
sys.path.append(str(Path(__file__).parents[1] / "drafts"))


def make_ctx(path: Path, key: str) -> Context:
    path.mkdir(parents=True)
    return Context(key=key, out=path, scratch=path, num_threads=1)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Eight Llama layers of width 32."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    model = tiny_llama(VOCAB, lambda name: 1.0, num_layers=8, seed=5, intermediate_size=48, pad_token_id=2)
    save_with_words(model, folder, [f"w{i}" for i in range(3, VOCAB)])
    ctx = make_ctx(tmp_path_factory.mktemp("artifacts") / "target", "t" * 64)
    return load_target(model=str(folder), ctx=ctx)


@pytest.fixture(scope="session")
def opened(target: Target) -> AbstractTarget:
    return open_target(target, dtype="float32", kernel="plain")


@pytest.fixture(scope="session")
def drafts(target: Target, opened: AbstractTarget, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Draft]:
    """method -> drafter, as built before its first training step."""
    made = {}
    ids = torch.arange(3, VOCAB, 2)
    for method in KEYS:
        folder, network = tmp_path_factory.mktemp(method), build_draft(method, opened, SETTINGS[method], ids)
        facts = {"target_key": target.key, "held_out_al": 1.9}
        made[method] = saved_draft(folder, network, SETTINGS[method], opened, key=KEYS[method], **facts)
    return made


@pytest.fixture(scope="session")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A confirmed policy over both drafters, and what it was made of."""
    return decided_study(tmp_path_factory.mktemp("evidence"), num_prompts=32, seed=3)


@pytest.fixture
def export(target: Target, drafts: dict[str, Draft], evidence: dict[str, Any], tmp_path: Path) -> Callable[..., Any]:
    """Run export_release with any part replaced."""
    from components.publish import export_release

    def run(policy: DepthPolicy | None = None, only: list[Draft] | None = None, **settings: Any) -> Any:
        return export_release(
            target,
            only or list(drafts.values()),
            policy or evidence["policy"],
            evidence["acceptance"],
            evidence["end_to_end"],
            ctx=make_ctx(tmp_path / "release", "r" * 64),
            **settings,
        )

    return run


@pytest.fixture
def policy_for(evidence: dict[str, Any], tmp_path: Path) -> Callable[[str], DepthPolicy]:
    """The same policy with another drafter as its winner."""
    import json
    import shutil

    def make(method: str) -> DepthPolicy:
        folder = tmp_path / f"policy-{method}"
        shutil.copytree(evidence["policy"].path, folder)
        raw = json.loads((folder / "policy.json").read_text())
        choice = next(c for c in raw["choices"] if c["method"] == method and c["workload"] == "all")
        raw["winner"] = {"draft_key": choice["draft_key"], "method": method, "depth_k": choice["depth_k"]}
        (folder / "policy.json").write_text(json.dumps(raw))
        return DepthPolicy(key="p" * 64, path=folder)

    return make


@pytest.fixture(scope="session")
def source(target: Target) -> Source:
    """The tiny target as layouts see it."""
    return source_of(target)


@pytest.fixture(scope="session")
def networks(opened: AbstractTarget) -> Callable[..., AbstractDraft]:
    """Makes a drafter of every second token, or of all where the format wants so, with no weight as it began."""

    def make(method: str, settings: dict[str, Any], format: str = "") -> AbstractDraft:
        ids = torch.arange(VOCAB) if format in WHOLE else torch.arange(3, VOCAB, 2)
        network: AbstractDraft = build_draft(method, opened, settings, ids)
        draw_wide(network)
        network.eval().requires_grad_(False)
        return network

    return make


@pytest.fixture
def changed(evidence: dict[str, Any], tmp_path: Path) -> Callable[..., DepthPolicy]:
    """The policy with parts of it replaced."""
    import json

    def make(**parts: Any) -> DepthPolicy:
        folder = tmp_path / "changed"
        folder.mkdir()
        raw = json.loads((evidence["policy"].path / "policy.json").read_text())
        (folder / "policy.json").write_text(json.dumps(raw | parts))
        return DepthPolicy(key="p" * 64, path=folder)

    return make


@pytest.fixture
def saved(networks: Any, opened: Any, tmp_path: Path) -> Callable[..., Draft]:
    """A drafter of a method, under the key of the policy's winner."""

    def make(method: str, **settings: Any) -> Draft:
        told = {**SETTINGS[method], **settings}
        return saved_draft(tmp_path / method, networks(method, told), told, opened, key=KEYS["eagle3"])

    return make
