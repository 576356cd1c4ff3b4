"""The rungs of the parity ladder that a model's own MTP module (mtp, start: own) climbs as the other methods do.

Its graphs, files and stitching are tests/components/drafts/test_mtp_own.py's; here it learns a sample by heart, decodes
it, and is held against the same references as every line of METHODS.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from exact_draws import Watched, p_value
from ladder import DEPTH, HOT, NUM_SAMPLED, SAMPLE_TOKENS, SIGNIFICANCE, accepted_share
from learnable_target import PROMPT, VOCAB_SIZE, columns_of, make_learnable_target
from safetensors.torch import save_file
from tiny_targets import make_tiny_tokenizer
from without_cache import accepted_in_each_round, guess_by_training_graph

from components.decoding.batch import decode_batch
from components.decoding.chain import decode
from components.drafts.methods.mtp import Mtp
from components.drafts.methods.mtp_native import MtpNative
from components.drafts.settings import MtpSettings
from components.drafts.training.optimizer import Optimizer
from components.targets.interface import AbstractTarget
from components.targets.load import open_target

PREFIX = "model.mtp_layers.0."  # MiMo's names: its block is a Llama-like one
MOST_STEPS = 240


class Climber(NamedTuple):
    """A target whose checkpoint has a module, transformers' model of the same weights, and the module fine-tuned."""

    target: AbstractTarget
    model: Any
    drafter: MtpNative
    noisy: MtpNative


@pytest.fixture(scope="module")
def climber(tmp_path_factory: pytest.TempPathFactory) -> Climber:
    torch.set_num_threads(1)
    folder, model = tmp_path_factory.mktemp("own-ladder"), make_learnable_target().model
    model.save_pretrained(folder)
    make_tiny_tokenizer(folder)
    last = {name.partition("layers.6.")[2]: w for name, w in model.state_dict().items() if "layers.6." in name}
    generator, hidden = torch.Generator().manual_seed(0), model.config.hidden_size
    parts = {f"{name}.weight": torch.ones(hidden) for name in ("token_layernorm", "hidden_layernorm")}
    parts |= {"final_layernorm.weight": model.model.norm.weight, **last}
    parts["input_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5
    save_file({f"{PREFIX}{name}": part.clone() for name, part in parts.items()}, folder / "zz-mtp.safetensors")
    target = open_target(folder, dtype="float32", kernel="plain")
    drafter = fine_tuned(target)
    return Climber(target, model, drafter, with_noise(drafter, 0.3))


def module_of(target: AbstractTarget) -> MtpNative:
    drafter = Mtp.build(target, MtpSettings(start="own", recursive_steps=DEPTH), torch.arange(VOCAB_SIZE))
    assert isinstance(drafter, MtpNative)
    return drafter


def fine_tuned(target: AbstractTarget) -> MtpNative:
    """The module after it has learnt the target's greedy answer by heart."""
    answer = decode(target, None, PROMPT, max_new_tokens=SAMPLE_TOKENS, ignore_eos=True).tokens
    sample = columns_of(target, torch.tensor([PROMPT + answer]), len(PROMPT))
    drafter = module_of(target).train()
    optimizer = Optimizer(drafter, "adamw", weight_decay=0.0, muon_lr_scale=1.0)
    for step in range(MOST_STEPS):
        optimizer.update(drafter.losses(sample).loss, 4e-3 * (1 - step / MOST_STEPS), clip_norm=1.0)
    return drafter.eval().requires_grad_(False)


def with_noise(drafter: MtpNative, share: float) -> MtpNative:
    """Every matrix moved by that share of its size."""
    moved, generator = module_of(drafter.target), torch.Generator().manual_seed(1)
    moved.load_state_dict(drafter.state_dict())
    with torch.no_grad():
        for weight in moved.parameters():
            if weight.ndim > 1:
                weight.add_(share * weight.std() * torch.randn(weight.shape, generator=generator))
    return moved.eval().requires_grad_(False)


def test_a_sample_learnt_by_heart_is_drafted_by_heart(climber: Climber) -> None:
    room = SAMPLE_TOKENS - DEPTH - 1
    run = decode(climber.target, climber.drafter, PROMPT, max_new_tokens=room, depth=DEPTH, ignore_eos=True)
    assert sum(r.drafted for r in run.rounds) >= 18
    assert accepted_share(run) >= 0.95


def test_greedy_decoding_is_token_identical_alone_and_in_a_batch(climber: Climber) -> None:
    prompts = [PROMPT, [9], [1, 8, 30, 2, 2, 17, 5, 11, 29]]
    together = decode_batch(climber.target, climber.noisy, prompts, max_new_tokens=40, depth=DEPTH, ignore_eos=True)
    for prompt, run in zip(prompts, together, strict=True):
        plain = decode(climber.target, None, prompt, max_new_tokens=40, ignore_eos=True).tokens
        alone = decode(climber.target, climber.noisy, prompt, max_new_tokens=40, depth=DEPTH, ignore_eos=True)
        assert plain == run.tokens == alone.tokens and run.rounds == alone.rounds


def test_a_noisy_module_is_accepted_as_a_reference_without_any_cache_says(climber: Climber) -> None:
    run = decode(climber.target, climber.noisy, PROMPT, max_new_tokens=40, depth=DEPTH, ignore_eos=True)
    guess = guess_by_training_graph(climber.noisy, climber.model)
    assert [r.accepted for r in run.rounds] == accepted_in_each_round(climber.model, guess, PROMPT, 40, DEPTH)
    assert 0.1 < accepted_share(run) < 0.95


def test_sampled_chains_draw_from_the_target(climber: Climber) -> None:
    watched: Any = Watched(climber.drafter)
    rng = torch.Generator().manual_seed(11)
    run = decode(
        climber.target,
        watched,
        PROMPT,
        max_new_tokens=NUM_SAMPLED,
        depth=DEPTH,
        sampling=HOT,
        rng=rng,
        ignore_eos=True,
    )
    assert sum(r.accepted for r in run.rounds) >= 40
    drafted_from = torch.zeros(NUM_SAMPLED, VOCAB_SIZE)
    for facts, said in zip(run.rounds, watched.said, strict=True):
        for j in range(min(facts.accepted + 1, facts.drafted, NUM_SAMPLED - facts.out_pos - 1)):
            drafted_from[facts.out_pos + 1 + j] = said.probs[j]
    assert p_value(climber.model, run.tokens, drafted_from) > SIGNIFICANCE
