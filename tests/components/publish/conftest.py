"""A tiny target with a tokenizer, an untrained drafter of each method, and a policy that says what to do with them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_formats import KEYS, SETTINGS, VOCAB
from tiny_targets import save_with_words, tiny_llama

from components.contract import Context, DepthPolicy, Draft, Measurements, Target
from components.drafts.interface import AbstractDraft
from components.drafts.storage.files import build_draft, save_draft
from components.publish.formats.interface import Source
from components.publish.release.export import source_of
from components.rows import write_rows
from components.speedup import choose_depth, confirm_depth
from components.targets import load_target
from components.targets.interface import AbstractTarget
from components.targets.load import open_target

# The simulated measurements of the speedup tests serve here too; each test folder is a search path of its own.
sys.path.append(str(Path(__file__).parents[1] / "speedup"))
sys.path.append(str(Path(__file__).parents[1] / "drafts"))  # and the checkpoints with modules of their own


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
        folder, settings = tmp_path_factory.mktemp(method), SETTINGS[method]
        network = build_draft(method, opened, settings, ids)
        facts = {"target_key": target.key, "num_steps": network.num_steps, "max_depth": network.max_depth}
        save_draft(folder, method, settings, opened, ids, network.state_dict(), facts)
        made[method] = Draft(key=KEYS[method], path=folder, info={"method": method, "held_out_al": 1.9, **facts})
    return made


@pytest.fixture(scope="session")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A confirmed policy over both drafters, and what it was made of."""
    from simulated_rows import make_study

    root = tmp_path_factory.mktemp("evidence")
    study = make_study(num_prompts=32, seed=3)

    def measured(name: str, rows: list[Any]) -> Measurements:
        (root / name).mkdir()
        write_rows(root / name, rows)
        return Measurements(key=name.ljust(64, "0"), path=root / name)

    methods = ("eagle3", "mtp")
    acceptance = [measured(f"acceptance-{m}", [r for r in study["maps"] if r.method == m]) for m in methods]
    cost = [measured(f"cost-{m}", [r for r in study["cells"] if r.method == m]) for m in methods]
    end_to_end = measured("end-to-end", study["requests"])
    chosen = choose_depth(acceptance, cost, ctx=make_ctx(root / "chosen", "c" * 64))
    policy = confirm_depth(chosen, end_to_end, ctx=make_ctx(root / "policy", "p" * 64))
    return {"acceptance": acceptance, "cost": cost, "end_to_end": end_to_end, "chosen": chosen, "policy": policy}


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
def networks(opened: AbstractTarget) -> Callable[[str, dict[str, Any]], AbstractDraft]:
    """Makes a drafter of every second token whose weights all matter, none of them as it began."""

    def make(method: str, settings: dict[str, Any]) -> AbstractDraft:
        network: AbstractDraft = build_draft(method, opened, settings, torch.arange(3, VOCAB, 2))
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for weight in network.parameters():
                if weight.ndim == 1:
                    weight.uniform_(0.6, 1.4, generator=generator)
                else:
                    weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
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
        network = networks(method, told)
        facts = {"target_key": "t" * 64, "num_steps": network.num_steps, "max_depth": network.max_depth}
        (tmp_path / method).mkdir()
        save_draft(tmp_path / method, method, told, opened, network.draft_ids, network.state_dict(), facts)
        return Draft(key=KEYS["eagle3"], path=tmp_path / method, info={"method": method, **facts})

    return make
