"""The built-in target, prompts, and an EAGLE-3 drafter trained for it in a minute: what every engine is given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_homes import is_ready, llama_cpp_home, vllm_home
from measured_alike import DEPTH, make_context

from components.bench.machine import describe_machine
from components.contract import Draft, Machine, Prompts, Target
from components.data import collect_prompts, record_features, write_answers
from components.drafts import train_draft
from components.drafts.draft import AbstractDraft
from components.drafts.files import open_draft, read_draft
from components.publish.eagle3_layout import lay_out
from components.publish.exact_check import write_checkpoint
from components.targets import load_target
from components.targets.load import open_target
from components.targets.model import AbstractTarget
from components.targets.source import open_record


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(model="builtin", dtype="float32", ctx=make_context(tmp_path_factory.mktemp("t") / "target"))


@pytest.fixture(scope="session")
def target_folder(target: Target) -> Path:
    """The folder with the target's own files, as engines take it."""
    return open_record(target.path)[0]


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    """Eight test prompts, two for warm-up, and enough to train a little on."""
    return collect_prompts(
        num_train=64,
        num_validation=8,
        num_test=8,
        num_warm_up=2,
        workload="code",
        ctx=make_context(tmp_path_factory.mktemp("p") / "prompts"),
    )


@pytest.fixture(scope="session")
def draft(target: Target, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> Draft:
    """EAGLE-3, good enough to be right now and then at every depth."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("d")
    answers = write_answers(target, prompts, max_new_tokens=64, ctx=make_context(folder / "answers"))
    features = record_features(target, answers, ctx=make_context(folder / "features"))
    return train_draft(
        target,
        features,
        settings={"eagle3": {"ttt_steps": DEPTH}},
        num_steps=60,
        batch_tokens=512,
        draft_vocab_size=2048,
        eval_every=60,
        eval_rows=8,
        ctx=make_context(folder / "draft"),
    )


@pytest.fixture(scope="session")
def opened(target: Target) -> AbstractTarget:
    torch.set_num_threads(1)
    return open_target(target, dtype="float32", kernel="plain")


@pytest.fixture(scope="session")
def drafter(draft: Draft, opened: AbstractTarget) -> AbstractDraft:
    """The same drafter in our own loop."""
    found = open_draft(draft, opened, dtype=torch.float32)
    assert isinstance(found, AbstractDraft)
    return found


@pytest.fixture(scope="session")
def exported(draft: Draft, opened: AbstractTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drafter as releases hold it."""
    folder = tmp_path_factory.mktemp("exported") / "eagle3"
    record, tensors = read_draft(draft.path)
    write_checkpoint(folder, lay_out(tensors, opened.shape, record))
    return folder


@pytest.fixture(scope="session")
def machine() -> Machine:
    return describe_machine()


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of vLLM's environment; skips where it is not built."""
    if not is_ready(vllm_home()):
        pytest.skip(f"no vLLM in {vllm_home()}: run tests/engines/install_vllm.py")
    return vllm_home() / "bin" / "python"


@pytest.fixture(scope="session")
def llama_cpp() -> Path:
    """llama.cpp's folder; skips where it is not built."""
    if not is_ready(llama_cpp_home()):
        pytest.skip(f"no llama.cpp in {llama_cpp_home()}: run tests/engines/install_llama_cpp.py")
    return llama_cpp_home()
