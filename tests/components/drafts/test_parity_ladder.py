"""The parity ladder: every drafting method climbs the same rungs. A method joins by being listed in METHODS.

One drafter of each trained method is overfitted on one sample and climbs all rungs; a copy with noise on its weights
climbs where guesses must sometimes be wrong. Methods without weights leave out what needs training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_draws import Watched, p_value
from ladder import DEPTH, HOT, NUM_SAMPLED, SAMPLE_TOKENS, SIGNIFICANCE, accepted_share
from learnable_target import PROMPT, VOCAB_SIZE, Learnable, columns_of, make_learnable_target
from saved_drafts import saved_draft
from tiny_drafts import ODD_TAPS, READING, TRAINED, batch_of, new_draft
from torch import Tensor
from without_cache import (
    Guess,
    accepted_in_each_round,
    guess_by_counting,
    guess_by_lookup,
    guess_by_training_graph,
    guess_with,
    lookahead_accepted_in_each_round,
)

from components.contract import Draft, Target
from components.decoding import verification
from components.decoding.batch import decode_batch, decode_tree
from components.decoding.chain import decode
from components.decoding.tree_shapes import DynamicShape, StaticShape, TreeShape
from components.drafts.interface import AbstractDraft, Batch, BatchProposer, CommittedPositions, Proposer, Sampling
from components.drafts.methods.suffix import Suffix
from components.drafts.methods.with_suffix import WithSuffix
from components.drafts.settings import SuffixSettings, settings_class
from components.drafts.storage.files import build_draft, open_draft, read_draft, save_untrained
from components.drafts.training.optimizer import Optimizer
from components.methods import METHODS
from components.publish.formats.interface import Source
from components.publish.formats.registry import FORMATS, drafter_state_of, layout_of, reopen_drafter, write_format
from components.stop_rule import Calibration, StopRule
from components.targets.interface import AbstractTarget, tapping
from components.targets.shape import TapLayers

DEPTHS = {"dflash": 7, "dspark": 7, "p-eagle": 7}
"""Where a method climbs at another depth: all of P-EAGLE's guesses come from one pass, however many they are."""
SETTINGS: dict[str, dict[str, Any]] = {
    "dspark": {"loss": "hard_ce"},  # as medusa
    "eagle1": {"chain_depth": DEPTH, "feature_noise": 0.0, "token_weight": 1.0},
    "eagle3": {"ttt_steps": DEPTH},
    "hass": {"chain_depth": DEPTH, "feature_noise": 0.0, "token_weight": 1.0},
    "medusa": {"num_heads": DEPTH, "loss": "hard_ce"},  # its own loss; soft targets this flat take it longer
    "mtp": {"mtp_modules": DEPTH},
    "mtp-parallel": {"num_heads": DEPTH},
    "p-eagle": {"parallel_depth": 7, "num_layers": 2, "kept_share": 1.0},
    "lookahead": {"window": 4, "ngram_size": DEPTH + 1, "max_guesses": 3},
    "suffix": {"min_score": 0.0},  # it drafts where it expects little, too: sampled text repeats by chance
}
WITHOUT_FORMAT = ("lookahead", "mtp-parallel", "ngram", "suffix")
WRITTEN = [(method, name) for name in FORMATS for method in layout_of(name).methods if name != "mimo"]
"""(method, format); mimo holds a single module and climbs in tests/components/publish."""
WITH_SUFFIX = "eagle3 with suffix"
"""EAGLE-3 with suffix decoding beside it: no method of its own, it climbs where chains are decoded."""
CHAINS = [*(name for name in METHODS if name != "lookahead"), WITH_SUFFIX]
"""Methods whose guesses depend on the text alone; lookahead's depend on the passes before, and are greedy only."""
BRANCHING = [name for name in METHODS if name not in ("lookahead", "ngram", "suffix")]
"""Methods whose guesses branch: all that say distributions."""
SHAPES: list[TreeShape] = [StaticShape.branching([2, 2, 1]), DynamicShape(depth=3, top_k=2, budget=6)]
MOST_STEPS = 150
FAMILIES = ("llama", "qwen3", "deepseek_v3", "qwen3_moe")


@cache
def learnable() -> Learnable:
    torch.set_num_threads(1)
    return make_learnable_target()


@cache
def sample() -> Batch:
    """The prompt and the target's greedy answer to it."""
    target = learnable().target
    answer = decode(target, None, PROMPT, max_new_tokens=SAMPLE_TOKENS, ignore_eos=True).tokens
    return columns_of(target, torch.tensor([PROMPT + answer]), len(PROMPT))


@cache
def learnt_weights(method: str) -> dict[str, Tensor]:
    """A drafter after it has learnt the sample by heart, or MOST_STEPS optimiser steps."""
    draft = untrained(method)
    draft.scale_to_target_features(sample().taps[0])
    draft.train()
    optimizer = Optimizer(draft, "adamw", weight_decay=0.0, muon_lr_scale=1.0)
    for step in range(MOST_STEPS):
        result = draft.losses(sample())
        rate = 2e-2 if method == "p-eagle" else 1e-2  # seven depths to learn in as many steps
        optimizer.update(result.loss, rate * (1 - step / MOST_STEPS), clip_norm=1.0)
    return {name: weight.detach().clone() for name, weight in draft.state_dict().items()}


def untrained(method: str) -> AbstractDraft:
    draft: AbstractDraft = build_draft(method, learnable().target, SETTINGS.get(method, {}), torch.arange(VOCAB_SIZE))
    return draft


@cache
def proposer(method: str, noise: float = 0.0) -> Any:
    """The overfitted drafter of a method, ready to decode; `noise` moves every matrix by that share of its size."""
    if method == WITH_SUFFIX:
        return WithSuffix(proposer("eagle3", noise), Suffix(SuffixSettings(min_score=1.0)), DEPTH - 1)
    if method not in TRAINED:
        return build_draft(method, learnable().target, SETTINGS.get(method, {}), torch.arange(VOCAB_SIZE))
    draft, generator = untrained(method), torch.Generator().manual_seed(1)
    draft.load_state_dict(learnt_weights(method))
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.ndim > 1 and noise:
                weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=generator))
    draft.eval().requires_grad_(False)
    draft.prepare_decoding()
    return draft


def depth_of(proposer: Proposer) -> int:
    return min(DEPTHS.get(proposer.method, DEPTH), proposer.max_depth)


# -- learning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", TRAINED)
def test_a_sample_learnt_by_heart_is_drafted_by_heart(method: str) -> None:
    drafter = proposer(method)
    room = SAMPLE_TOKENS - depth_of(drafter) - 1  # all guesses lie inside the sample
    run = decode(learnable().target, drafter, PROMPT, max_new_tokens=room, depth=depth_of(drafter), ignore_eos=True)
    assert sum(r.drafted for r in run.rounds) >= 18
    assert accepted_share(run) >= 0.95
    assert run.tokens == sample().ids[0, len(PROMPT) :][:room].tolist()


# -- one network, two graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "family", "taps", "settings"),
    [
        *itertools.product(TRAINED, FAMILIES, [None], [{}]),
        *itertools.product(READING, ("llama",), ODD_TAPS, [{}]),
        ("eagle3", "llama", None, {"ttt_steps": 3, "window": 7}),
        ("p-eagle", "llama", None, {"parallel_depth": 3, "window": 7}),
    ],
)
def test_training_graph_equals_cached_decoding(
    method: str,
    family: str,
    taps: TapLayers | None,
    settings: dict[str, Any],
    tiny_target: Callable[[str], AbstractTarget],
) -> None:
    """Feed the graph the tokens that decoding drafted: every step's distribution is the same within 1e-4."""
    target = tiny_target(family)
    target = target if taps is None else tapping(target, taps)
    draft, batch = new_draft(target, method, **settings), batch_of(target, num_rows=1)
    committed, depth = 12, draft.num_steps

    def columns(start: int, stop: int) -> CommittedPositions:
        return CommittedPositions(
            batch.ids[0, start + 1 : stop + 1], batch.taps[0, start:stop], batch.last[0, start:stop]
        )

    state, rng = draft.new_state(32), torch.Generator().manual_seed(0)
    draft.propose(state, columns(0, 9), 2, Sampling(), rng)
    proposal = draft.propose(state, columns(9, committed), depth, HOT, rng)
    assert proposal.probs is not None and proposal.probs.shape == (depth, target.shape.vocab_size)

    ids = batch.ids.clone()
    ids[0, committed + 1 : committed + 1 + depth] = proposal.tokens
    taps, last = batch.taps.clone(), batch.last.clone()
    taps[0, committed:] = last[0, committed:] = 0.0  # unknown while drafting, so nothing may read them
    rows = torch.tensor([[committed - 1]])
    with torch.no_grad():
        steps = list(draft.teacher_forced(batch._replace(ids=ids, taps=taps, last=last), rows))  # type: ignore[operator]
    assert len(steps) == depth
    draft_ids: Tensor = draft.draft_ids  # type: ignore[assignment]
    for found, logits in zip(proposal.probs, steps, strict=True):
        expected = logits[0, 0]
        if expected.numel() == target.shape.vocab_size:
            expected = expected[draft_ids]
        torch.testing.assert_close(found[draft_ids].log(), expected.log_softmax(-1), atol=1e-4, rtol=0)


# -- files ---------------------------------------------------------------------------------------------------------


def everywhere(draft: Any) -> Tensor:
    found: Tensor = draft.propose_at_every_position(
        sample().ids[0], sample().taps[0], sample().last[0], depth_of(draft)
    ).tokens
    return found


def saved(folder: Path, method: str) -> Draft:
    facts = {"shape": asdict(learnable().target.shape), "num_params": 1, "suppressed_tokens": []}
    folder.mkdir()
    drafter = proposer(method, noise=0.3)
    if method not in TRAINED:
        of = Target(key="t", path=folder, info=facts)
        return Draft(
            key="d",
            path=folder,
            info=save_untrained(folder, method, settings_class(method)(**SETTINGS.get(method, {})), of),
        )
    return saved_draft(folder, drafter, SETTINGS.get(method, {}), learnable().target, key="d", target_key="t")


@pytest.mark.parametrize("method", METHODS)
def test_a_saved_drafter_opens_with_the_same_guesses(method: str, tmp_path: Path) -> None:
    opened = open_draft(saved(tmp_path / "d", method), learnable().target)
    assert opened.method == method
    assert torch.equal(everywhere(opened), everywhere(proposer(method, noise=0.3)))
    if method in TRAINED:
        assert not torch.equal(everywhere(opened), everywhere(proposer(method)))


def test_every_method_either_has_a_format_or_is_known_to_have_none() -> None:
    assert sorted(METHODS) == sorted({*(method for method, _ in WRITTEN), *WITHOUT_FORMAT})
    assert not {method for method, _ in WRITTEN} & {*WITHOUT_FORMAT}


@pytest.mark.parametrize(("method", "name"), WRITTEN)
def test_an_exported_drafter_reads_back_with_the_same_guesses(method: str, name: str, tmp_path: Path) -> None:
    """The release's tensors, under the names that engines read, are all that a drafter needs."""
    target = learnable().target
    source = Source(target.shape, "learnable", None, target)
    write_format(name, drafter_state_of(*read_draft(saved(tmp_path / "d", method).path)), source, tmp_path / "out")
    again = reopen_drafter(tmp_path / "out", target, source)
    assert torch.equal(everywhere(again), everywhere(proposer(method, noise=0.3)))


# -- decoding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*METHODS, WITH_SUFFIX])
def test_greedy_decoding_is_token_identical(method: str) -> None:
    target, drafter = learnable().target, proposer(method, noise=0.3)
    for prompt in (PROMPT, [9], [1, 8, 30, 2, 2, 17, 5, 11, 29]):
        plain = decode(target, None, prompt, max_new_tokens=60, ignore_eos=True).tokens
        for depth in range(1, depth_of(drafter) + 1):
            run = decode(target, drafter, prompt, max_new_tokens=60, depth=depth, ignore_eos=True)
            assert run.tokens == plain, f"depth {depth}"


def test_lookahead_is_accepted_as_a_reference_without_any_cache_says() -> None:
    drafter, wanted = proposer("lookahead"), 60
    run = decode(learnable().target, drafter, PROMPT, max_new_tokens=wanted, depth=DEPTH, ignore_eos=True)
    expected = lookahead_accepted_in_each_round(learnable().model, drafter, PROMPT, wanted, DEPTH)
    assert [r.accepted for r in run.rounds] == expected and any(expected)


@pytest.mark.parametrize("method", CHAINS)
def test_a_batch_is_decoded_as_each_alone(method: str) -> None:
    """Ragged prompts, one of them a single token: the same tokens in the same rounds."""
    target, drafter = learnable().target, proposer(method, noise=0.3)
    prompts, depth = [PROMPT, [9], [1, 8, 30, 2, 2, 17, 5, 11, 29]], depth_of(drafter)
    together = decode_batch(target, drafter, prompts, max_new_tokens=40, depth=depth, ignore_eos=True)
    for prompt, run in zip(prompts, together, strict=True):
        alone = decode(target, drafter, prompt, max_new_tokens=40, depth=depth, ignore_eos=True)
        assert run.tokens == alone.tokens
        assert [(r.drafted, r.accepted) for r in run.rounds] == [(r.drafted, r.accepted) for r in alone.rounds]


@pytest.mark.parametrize("method", CHAINS)
def test_a_noisy_drafter_is_accepted_as_a_reference_without_any_cache_says(method: str) -> None:
    drafter = proposer(method, noise=0.7 if method == "medusa" else 0.3)  # hard targets leave wide margins
    guess: Guess
    if method == "ngram":
        guess = guess_by_lookup(drafter.max_ngram)
    elif method == "suffix":
        guess = guess_by_counting(drafter.settings)
    elif method == WITH_SUFFIX:
        copied = guess_by_counting(drafter.suffix.settings)
        drafted = guess_by_training_graph(drafter.drafter, learnable().model)
        guess = guess_with(copied, drafted, DEPTH - 1)
    else:
        guess = guess_by_training_graph(drafter, learnable().model)
    depth, wanted = depth_of(drafter), 40
    run = decode(learnable().target, drafter, PROMPT, max_new_tokens=wanted, depth=depth, ignore_eos=True)
    expected = accepted_in_each_round(learnable().model, guess, PROMPT, wanted, depth)
    assert [r.accepted for r in run.rounds] == expected
    assert 0.1 < accepted_share(run) < 0.95


def stop_rule(depth: int, verify_from: float = 0.3) -> StopRule:
    """Confidence taken at its word; some chains end before a pass, some before a token that was computed."""
    as_said = Calibration((0.0, 1.0), (0.0, 1.0))
    return StopRule((as_said,) * depth, (0.0, *([2 * verify_from] * (depth - 1))), (verify_from,) * depth)


@pytest.mark.parametrize("method", TRAINED)
def test_a_stop_rule_ends_chains_by_confidence_and_changes_no_token(method: str) -> None:
    """Each round drafts what the rule says of the confidences after its position, in a batch of those of all."""
    target, drafter = learnable().target, proposer(method, noise=0.7 if method == "medusa" else 0.3)
    depth, prompts = depth_of(drafter), [PROMPT, [9], [1, 8, 30, 2, 2, 17, 5, 11, 29]]
    rule, lengths = stop_rule(depth), set[int]()
    together = decode_batch(target, drafter, prompts, max_new_tokens=40, depth=depth, ignore_eos=True, stop=rule)
    said_in_batch: list[list[list[float]]] = []  # of each sequence, the confidences of its rounds
    for prompt, batched in zip(prompts, together, strict=True):
        run = decode(target, drafter, prompt, max_new_tokens=40, depth=depth, ignore_eos=True, stop=rule)
        assert batched.tokens == run.tokens == decode(target, None, prompt, max_new_tokens=40, ignore_eos=True).tokens
        text = columns_of(target, torch.tensor([prompt + run.tokens]), len(prompt))
        said = drafter.propose_at_every_position(text.ids[0], text.taps[0], text.last[0], depth).confidence.tolist()
        # Output token i is x_n with n = len(prompt) + i; the column before it is row n - 1.
        for facts in run.rounds:
            assert facts.drafted == rule.length(said[len(prompt) + facts.out_pos - 1])[1]
            lengths.add(facts.drafted)
        said_in_batch.append([said[len(prompt) + facts.out_pos - 1] for facts in batched.rounds])
    assert len(lengths) > 1, "the rule never chose"
    batches = isinstance(drafter, BatchProposer)  # others draft one sequence after the other, each with its own length
    for own, batched in zip(said_in_batch, together, strict=True):
        for number, facts in enumerate(batched.rounds):
            live = [said[number] for said in said_in_batch if number < len(said)] if batches else [own[number]]
            assert facts.drafted == rule.length(*live)[1]


@pytest.mark.parametrize("method", TRAINED)
def test_sampled_chains_that_a_rule_ends_draw_from_the_target(method: str) -> None:
    assert sampled_chain(method, stop_rule(depth_of(proposer(method)), verify_from=0.1)) > SIGNIFICANCE


def sampled_chain(method: str, stop: StopRule | None = None) -> float:
    watched: Any = Watched(proposer(method))
    run = decode(
        learnable().target,
        watched,
        PROMPT,
        max_new_tokens=NUM_SAMPLED,
        depth=depth_of(watched),
        sampling=HOT,
        rng=torch.Generator().manual_seed(11),
        ignore_eos=True,
        stop=stop,
    )
    assert sum(r.accepted for r in run.rounds) >= 40
    drafted_from = torch.zeros(NUM_SAMPLED, VOCAB_SIZE)
    for facts, said in zip(run.rounds, watched.said, strict=True):
        q = torch.nn.functional.one_hot(said.tokens, VOCAB_SIZE).float() if said.probs is None else said.probs
        for j in range(min(facts.accepted + 1, facts.drafted, NUM_SAMPLED - facts.out_pos - 1)):
            drafted_from[facts.out_pos + 1 + j] = q[j]
    return p_value(learnable().model, run.tokens, drafted_from)


@pytest.mark.parametrize("method", CHAINS)
def test_sampled_chains_draw_from_the_target(method: str) -> None:
    assert sampled_chain(method) > SIGNIFICANCE


@pytest.mark.parametrize("wrong", ["replaced by a draw from p", "kept with probability p"])
def test_the_chi_square_test_finds_wrong_rules(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong.startswith("replaced"):
        monkeypatch.setattr(verification, "_residual", lambda probs, guesses, q, row: probs[row : row + 1])
    else:
        kept = verification._count_accepted
        monkeypatch.setattr(
            verification, "_count_accepted", lambda probs, guesses, q, rng: kept(probs, guesses, None, rng)
        )
    assert sampled_chain("mtp") < SIGNIFICANCE / 100


@pytest.mark.parametrize("shape", SHAPES, ids=["static", "dynamic"])
@pytest.mark.parametrize("method", BRANCHING)
def test_greedy_trees_are_token_identical_and_no_shorter_than_the_chain(method: str, shape: TreeShape) -> None:
    target, drafter = learnable().target, proposer(method, noise=0.3)
    plain = decode(target, None, PROMPT, max_new_tokens=40, ignore_eos=True).tokens
    run = decode_tree(target, drafter, PROMPT, shape, max_new_tokens=40, ignore_eos=True)
    chain = decode(target, drafter, PROMPT, max_new_tokens=40, depth=shape.depth, ignore_eos=True)
    assert run.tokens == plain
    assert len(run.rounds) <= len(chain.rounds)


@pytest.mark.parametrize("shape", SHAPES, ids=["static", "dynamic"])
@pytest.mark.parametrize("method", BRANCHING)
def test_sampled_trees_draw_from_the_target(method: str, shape: TreeShape) -> None:
    watched: Any = Watched(proposer(method))
    rng = torch.Generator().manual_seed(11)
    run = decode_tree(
        learnable().target, watched, PROMPT, shape, max_new_tokens=NUM_SAMPLED, sampling=HOT, rng=rng, ignore_eos=True
    )
    assert sum(r.accepted for r in run.rounds) >= 40
    drafted_from = torch.zeros(NUM_SAMPLED, VOCAB_SIZE)
    for facts, root in zip(run.rounds, watched.roots, strict=True):
        drafted_from[facts.out_pos + 1] = root.softmax(-1)
    assert p_value(learnable().model, run.tokens, drafted_from) > SIGNIFICANCE
