"""Does an imported drafter guess what its target says, and if hardly, which other convention would it guess by?

Shapes and names cannot show everything: two norms of one shape exchanged, tapped layers in another order, hidden state
before embedding, or rotary pairs laid out side by side load without a word and draft noise. So the drafter is held
against a few dozen tokens of the target's own greedy answers: the share of positions at which its first draft token is
the target's, beside the share that chance gives (drafts and answers with these frequencies, paired at random). Then
the same with each convention that is known to differ between projects; the one that fits better by a clear margin is
named. Nothing is changed: whoever imports decides.

The margin is McNemar's test of the positions on which two conventions differ (b that only the other gets right, c that
only ours does): b - c > 4 sqrt(b + c), which chance passes once in 30,000 comparisons.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from components.contract import Target
from components.drafts.interface import AbstractDraft
from components.drafts.methods.dflash import BlockDraft
from components.drafts.methods.eagle1 import FeatureDraft
from components.drafts.methods.mtp import Mtp
from components.drafts.methods.mtp_native import MtpNative
from components.drafts.network.layers import BlockShape
from components.outside_json import JsonObject
from components.targets.generate import check_vocabulary
from components.targets.interface import AbstractTarget
from components.targets.load import open_tokenizer, target_facts
from components.targets.shape import TapLayers

PROMPTS = (
    "Explain in a few sentences how a bicycle stays upright.",
    "Write a short Python function that returns the primes below n.",
    "Name three rivers of Europe and the sea that each of them reaches.",
)
ANSWER_TOKENS = 48
"""Most tokens of one answer."""
FEWEST_TOKENS = 4
"""A prompt of fewer different tokens says nothing to a tokenizer of single words; random tokens take its place."""
MOST_SQUARE = 8
"""Most square weights of which each is tried transposed."""
MEDUSA_HEAD = "medusa_head."
DEEPER = 3
"""Draft tokens of a change that the first one does not show."""
CLEAR = 4.0
"""Standard errors by which a share must exceed another to be called better."""


@dataclass(frozen=True)
class Answer:
    """A greedy answer of the target: ids int64 [T], its taps and last states [T, ...]; first: the prompt's length."""

    ids: Tensor
    taps: Tensor
    last: Tensor
    first: int


@dataclass(frozen=True)
class Change:
    """Another convention. tensors: those of the state dict that it reads differently. attributes: of the network.

    taps: the layers that it reads; (): those of the network. depth: draft tokens that are needed to see it.
    """

    name: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    taps: TapLayers = ()
    depth: int = 1


@dataclass(frozen=True)
class Agreement:
    """How often the first draft token is the target's. better: the convention that fits clearly better, "" for none.

    depth: how many draft tokens that comparison is about. better_agreement: by that convention, how many of them are
    the target's in a row, on average; before: as the drafter is.
    """

    num_positions: int
    agreement: float
    chance: float
    better: str = ""
    better_agreement: float = 0.0
    depth: int = 1
    before: float = 0.0

    @property
    def facts(self) -> JsonObject:
        """For the Draft's info."""
        return asdict(self)

    @property
    def above_chance(self) -> bool:
        """Whether the drafter knows something of its target."""
        spread = (max(self.chance, 1.0 / self.num_positions) / self.num_positions) ** 0.5
        return self.agreement > self.chance + CLEAR * spread

    @property
    def text(self) -> str:
        """One line for the step's log."""
        share = (
            f"its first draft token is the target's at {self.agreement:.0%} of {self.num_positions} positions of"
            f" greedy answers, chance is {self.chance:.1%}"
        )
        if self.better and self.depth > 1:
            counts = f"{self.better_agreement:.2f} of {self.depth} draft tokens are accepted, not {self.before:.2f}"
            return f"{share}: wrong conventions? {self.better} {counts}"
        if self.better:
            return f"{share}: wrong conventions? {self.better} it is {self.better_agreement:.0%}"
        if self.above_chance:
            return share
        return f"{share}: made for another target, or by conventions that are not known here; none of those known fits"

    @property
    def warns(self) -> bool:
        """Whether the line is a warning."""
        return bool(self.better) or not self.above_chance


def measure_agreement(
    network: AbstractDraft, target: AbstractTarget, prompts: Sequence[Tensor], called: Callable[[str], str] = str
) -> Agreement:
    """Compare a drafter with its target, as it is and by every other convention that its method knows.

    prompts: of `prompts_of`. called: the checkpoint's name of a tensor.
    """
    answers = [greedy_answer(target, ids.to(target.device)) for ids in prompts]
    truth = torch.cat([answer.ids[answer.first + 1 :] for answer in answers])
    drafts = torch.cat(_drafted(network, answers, 1)).flatten()
    size, deepest = target.shape.vocab_size, min(DEEPER, network.max_depth)
    frequencies = (torch.bincount(tokens, minlength=size) / len(truth) for tokens in (drafts, truth))
    ours, chance = _accepted(network, answers, deepest), float(torch.stack([*frequencies]).prod(0).sum())
    measured = Agreement(len(truth), _mean(ours.clamp(max=1)), chance)
    for change in known_changes(network, called):
        others = [_tapped(target, answer, change.taps) for answer in answers] if change.taps else answers
        with _changed(network, change):
            theirs = _accepted(network, others, min(change.depth, deepest))
        for depth in {1, min(change.depth, deepest)}:
            counts, before = theirs.clamp(max=depth), ours.clamp(max=depth)
            gained, lost = int((counts > before).sum()), int((counts < before).sum())
            is_best = not measured.better or (-depth, _mean(counts)) > (-measured.depth, measured.better_agreement)
            if is_best and gained - lost > CLEAR * (gained + lost) ** 0.5:
                measured = replace(
                    measured, better=change.name, better_agreement=_mean(counts), depth=depth, before=_mean(before)
                )
    return measured


@torch.no_grad()
def greedy_answer(target: AbstractTarget, prompt: Tensor) -> Answer:
    """The target's greedy answer to a prompt, int64 [T], of ANSWER_TOKENS at most; it ends after an end token."""
    ids, cache = prompt[None], target.new_cache(1, len(prompt) + ANSWER_TOKENS + 1)
    new = ids
    for _ in range(ANSWER_TOKENS):
        logits = target.forward(new, cache, logits="last").logits
        assert logits is not None
        new = logits[:, -1].argmax(-1, keepdim=True).to(ids.device)
        ids = torch.cat((ids, new), 1)
        if int(new) in target.shape.eos_token_ids and ids.shape[1] > len(prompt) + 1:
            break
    out = target.forward(ids, target.new_cache(1, ids.shape[1] + 1), logits="none", features=True)
    assert out.taps is not None and out.last is not None
    return Answer(ids[0], out.taps[0], out.last[0], len(prompt))


@torch.no_grad()
def _tapped(target: AbstractTarget, answer: Answer, taps: TapLayers) -> Answer:
    """An answer with the features of other layers."""
    out = target.forward(answer.ids[None], target.new_cache(1, len(answer.ids) + 1), logits="none", features=taps)
    assert out.taps is not None
    return replace(answer, taps=out.taps[0])


def prompts_of(artifact: Target) -> list[Tensor]:
    """The prompts as the target's tokenizer renders them, int64 [T] each.

    Raises UserError where it gives a token that the target has no embedding of.
    """
    tokenizer, size, prompts = open_tokenizer(artifact), int(target_facts(artifact)["shape"]["vocab_size"]), []
    chats = bool(getattr(tokenizer, "chat_template", None))
    for number, question in enumerate(PROMPTS):
        messages = [{"role": "user", "content": question}]
        text = (
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) if chats else question
        )
        ids = tokenizer(text, add_special_tokens=not chats)["input_ids"]
        check_vocabulary(max(ids, default=0), size, str(artifact.info["model"]))
        if len(set(ids)) < FEWEST_TOKENS:
            ids = torch.randint(size, (12,), generator=torch.Generator().manual_seed(number)).tolist()
        prompts.append(torch.tensor(ids))
    return prompts


def _drafted(network: AbstractDraft, answers: list[Answer], depth: int) -> list[Tensor]:
    """The draft tokens at every position of the answers from their second token on, int64 [N, depth] each."""
    drafted = (network.propose_at_every_position(one.ids, one.taps, one.last, depth).tokens for one in answers)
    return [tokens[one.first - 1 : -1] for one, tokens in zip(answers, drafted, strict=True)]


def _accepted(network: AbstractDraft, answers: list[Answer], depth: int) -> Tensor:
    """How many of `depth` draft tokens are the target's, in a row, at every such position: int64 [N]."""
    counts = []
    for one, drafted in zip(answers, _drafted(network, answers, depth), strict=True):
        ids = torch.cat((one.ids[one.first + 1 :], one.ids.new_full((depth,), -1)))
        truth = ids.unfold(0, depth, 1)[: len(drafted)]
        counts.append((drafted == truth).long().cumprod(1).sum(1))
    return torch.cat(counts)


def _mean(counts: Tensor) -> float:
    return float(counts.float().mean())


@contextmanager
def _changed(network: AbstractDraft, change: Change) -> Iterator[None]:
    """The network under another convention, and as it was afterwards."""
    weights = network.state_dict()
    tensors = {name: weights[name].clone() for name in change.tensors}
    attributes = {name: getattr(network, name) for name in change.attributes}
    of_network = vars(network).keys() | network._buffers.keys()
    with torch.no_grad():
        for name, tensor in change.tensors.items():
            weights[name].copy_(tensor)
        for name, value in change.attributes.items():
            setattr(network, name, value)
        try:
            yield
        finally:
            for name, tensor in tensors.items():
                weights[name].copy_(tensor)
            for name, value in attributes.items():
                setattr(network, name, value) if name in of_network else delattr(network, name)


def known_changes(network: AbstractDraft, called: Callable[[str], str] = str) -> Iterator[Change]:
    """The conventions by which other projects may have meant the same tensors."""
    weights = network.state_dict()
    yield from _exchanged(weights, "gate and up exchanged", "gate_proj.weight", "up_proj.weight")
    yield from _exchanged(weights, "norms exchanged", "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight")
    yield from _exchanged(weights, "norms exchanged", "layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight")
    yield from _exchanged(weights, "norms exchanged", "enorm.weight", "hnorm.weight")
    yield from _hidden_first(network, weights)
    yield from _orders_of_taps(network, weights)
    yield from _neighbouring_taps(network)
    yield from _sizes_of_norms(weights, called)
    yield from _transposed(weights, called)
    yield from _heads(weights)
    yield from _positions(network, weights)
    if isinstance(on := getattr(network, "norm_before_residual", None), bool):
        yield Change(f"with norm_before_residual {'off' if on else 'on'}", attributes={"norm_before_residual": not on})
    if isinstance(on := getattr(network, "norm_output", None), bool):
        yield Change(f"with norm_output {'off' if on else 'on'}", attributes={"norm_output": not on}, depth=DEEPER)
    if isinstance(network, BlockDraft):
        width, on = network.settings.block_size, network.settings.sample_from_anchor
        yield Change(f"with sample_from_anchor {'off' if on else 'on'}", attributes={"num_steps": width - on})
    if isinstance(network, (Mtp, MtpNative)):
        other = "pre_norm" if network.settings.first_hidden == "post_norm" else "post_norm"
        settings = network.settings.model_copy(update={"first_hidden": other})
        yield Change(f"with mtp_first_hidden {other}", attributes={"settings": settings})
    if isinstance(network, FeatureDraft):
        before: Callable[[Tensor, Tensor], Tensor] = lambda taps, last: last.float()  # noqa: E731 - takes a method's place
        yield Change("with the target's state before its last norm", attributes={"features": before})
    absolute = network.draft_ids - torch.arange(len(network.draft_ids), device=network.draft_ids.device)
    if len(absolute) > 1 and bool((absolute.diff() > 0).all()):
        yield Change("with d2t as target ids", attributes={"draft_ids": absolute})


def _exchanged(weights: Mapping[str, Tensor], name: str, first: str, second: str) -> Iterator[Change]:
    """Two tensors of each layer in each other's place, by the ends of their names."""
    tensors: dict[str, Tensor] = {}
    for one in weights:
        other = one.removesuffix(first) + second
        if one.endswith(first) and other in weights and weights[one].shape == weights[other].shape:
            tensors |= {one: weights[other].clone(), other: weights[one].clone()}
    if tensors:
        yield Change(f"with {name}", tensors)


def _hidden_first(network: AbstractDraft, weights: Mapping[str, Tensor]) -> Iterator[Change]:
    """Inputs that are an embedding and a hidden state, joined the other way round."""
    hidden, tensors = network.target.shape.hidden_size, {}
    for name, weight in weights.items():
        joins = name.endswith(
            ("q_proj.weight", "k_proj.weight", "v_proj.weight", "eh_proj.weight", "projection.weight")
        )
        if joins and weight.ndim == 2 and weight.shape[1] == 2 * hidden:
            tensors[name] = weight.roll(hidden, 1)
    if isinstance(network, FeatureDraft):
        first, second = network.fc.weight.detach().split(hidden, 1)
        scale = network.token_scale
        tensors["fc.weight"] = torch.cat((second / scale, first * scale), 1)
    if tensors:
        yield Change("with the hidden state before the embedding", tensors)


def _orders_of_taps(network: AbstractDraft, weights: Mapping[str, Tensor]) -> Iterator[Change]:
    """The tapped layers in another order: every one of three, of more those turned round or moved on."""
    hidden, fuse = network.target.shape.hidden_size, weights.get("fc.weight")
    if fuse is None or isinstance(network, FeatureDraft) or fuse.shape[1] % hidden:
        return
    parts = fuse.split(hidden, 1)
    usual = tuple(range(len(parts)))
    orders = set(itertools.permutations(usual)) if len(parts) <= 3 else {usual[i:] + usual[:i] for i in usual}
    for order in sorted((orders | {usual[::-1]}) - {usual}):
        joined = torch.cat([parts[one] for one in order], 1)
        yield Change(f"with the tapped layers in the order {order}", {"fc.weight": joined})


def _neighbouring_taps(network: AbstractDraft) -> Iterator[Change]:
    """Other layers: inputs counted as outputs or the other way round, and the usual ones."""
    taps, shape = network.needs_features, network.target.shape
    if isinstance(taps, bool):
        return
    others = {tuple(one - 1 for one in taps), tuple(one + 1 for one in taps), shape.tap_layers} - {taps}
    for other in sorted(others):
        if len(other) == len(taps) and other[0] >= 1 and other[-1] < shape.num_layers:
            yield Change(f"with hidden_states{list(other)}", taps=other)


def _sizes_of_norms(weights: Mapping[str, Tensor], called: Callable[[str], str]) -> Iterator[Change]:
    """Norms whose weights count from zero, from one or in another size."""
    norms = [name for name, weight in weights.items() if name.endswith("norm.weight") and weight.ndim == 1]
    if norms:
        yield Change("with one added to the weights of norms", {name: weights[name] + 1.0 for name in norms})
        yield Change("with one taken from the weights of norms", {name: weights[name] - 1.0 for name in norms})
    for name in norms:
        yield Change(f"with half of {called(name)}", {name: weights[name] / 2.0})


def _transposed(weights: Mapping[str, Tensor], called: Callable[[str], str]) -> Iterator[Change]:
    """Square weights, whose shape does not show that they are transposed; all of those there are few of."""
    square = [name for name, weight in weights.items() if weight.ndim == 2 and weight.shape[0] == weight.shape[1]]
    for name in square if len(square) <= MOST_SQUARE else []:
        yield Change(f"with {called(name)} transposed", {name: weights[name].T.clone()})


def _heads(weights: Mapping[str, Tensor]) -> Iterator[Change]:
    """Medusa heads in another order, whole or their LM heads alone: another one drafts the first token."""
    first = {name.removeprefix(f"{MEDUSA_HEAD}0."): name for name in weights if name.startswith(f"{MEDUSA_HEAD}0.")}
    head, number = [rest for rest in first if rest.endswith(".weight") and ".linear." not in rest], 1
    while first and all(f"{MEDUSA_HEAD}{number}.{rest}" in weights for rest in first):
        for what, parts in ((f"head {number}", [*first]), (f"the LM head of head {number}", head)):
            tensors = {first[rest]: weights[f"{MEDUSA_HEAD}{number}.{rest}"].clone() for rest in parts}
            if tensors:
                yield Change(f"with {what} first", tensors)
        number += 1


def _positions(network: AbstractDraft, weights: Mapping[str, Tensor]) -> Iterator[Change]:
    """Rotary pairs side by side instead of in halves, the usual rotary base or the target's, no scaling."""
    shape = getattr(network, "shape", None)
    if not isinstance(shape, BlockShape):
        return
    if not shape.qk_norm:
        turned = {}
        for name, weight in weights.items():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                pairs = weight.view(-1, shape.head_dim // 2, 2, weight.shape[1])
                turned[name] = pairs.transpose(1, 2).reshape(weight.shape)
        if turned:
            yield Change("with rotary pairs side by side", turned, depth=DEEPER)
    for theta in sorted({10000.0, network.target.shape.rope_theta} - {shape.rope_theta}):
        if theta > 0:
            yield Change(f"with rope_theta {theta:g}", attributes={"shape": replace(shape, rope_theta=theta)})
    if shape.rope_scaling:
        yield Change("with unscaled positions", attributes={"shape": replace(shape, rope_scaling=())})
