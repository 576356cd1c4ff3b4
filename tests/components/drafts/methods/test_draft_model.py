"""The draft model, trained or given: its own cache, its own tokens, and a target whose distribution it leaves alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_drafts import batch_of, new_context, new_draft
from tiny_targets import make_tiny_target, make_tiny_tokenizer
from torch import Tensor

from components.contract import Draft, Target, UserError
from components.decoding.chain import decode
from components.drafts import train_draft
from components.drafts.interface import CommittedPositions, Sampling
from components.drafts.methods.draft_model import DraftModel
from components.drafts.network.sampling import probabilities
from components.drafts.storage.files import open_draft
from components.drafts.training.losses import row_loss, teacher_distributions
from components.targets.interface import AbstractTarget

MakeTarget = Callable[[str], AbstractTarget]
Folder = Callable[[str], Path]
NOTHING = torch.empty(0)
GREEDY, RNG = Sampling(), torch.Generator()


def columns(ids: Tensor, start: int, stop: int) -> CommittedPositions:
    return CommittedPositions(ids[start + 1 : stop + 1], NOTHING, NOTHING)


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A given draft model: another family, three layers, the same tokenizer."""
    return make_tiny_target("qwen3", tmp_path_factory.mktemp("given") / "small", num_layers=3, seed=5)


def given(folder: Path, target_folder: Path, root: Path) -> Draft:
    target = Target(key="t", path=target_folder)
    return train_draft(
        target, method="draft-model", settings={"draft-model": {"model": str(folder)}}, ctx=new_context(root)
    )


def test_a_trained_draft_model_is_a_llama_of_its_weights(tiny_target: MakeTarget) -> None:
    """The training graph equals transformers' own Llama given the same tensors, columns read as x_1, x_2, ..."""
    from transformers import LlamaForCausalLM

    from components.drafts.methods.draft_model import _llama_config

    target = tiny_target("llama")
    draft, batch = new_draft(target, "draft-model", num_layers=3, hidden_size=32), batch_of(target)
    assert isinstance(draft, DraftModel)
    model = LlamaForCausalLM(_llama_config(draft.shape, 3, target.shape.vocab_size))
    model.lm_head = torch.nn.Linear(32, 192, bias=False)
    model.load_state_dict(draft.state_dict())
    expected = model.eval()(batch.ids[:, 1:]).logits
    found = next(iter(draft.teacher_forced(batch, torch.arange(23).expand(2, -1))))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_the_loss_is_the_mean_distance_over_reachable_columns(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft, batch = new_draft(target, "draft-model", chain_depth=1), batch_of(target)
    assert isinstance(draft, DraftModel)
    teacher = teacher_distributions(target, batch.last, draft.draft_ids)
    rows = torch.arange(5, 22).expand(2, -1)  # the answer begins at token 6: columns 5 .. 21 guess tokens 7 .. 23
    (logits,) = draft.teacher_forced(batch, rows)
    wanted = teacher.at(rows + 1)
    expected = row_loss("soft_ce", logits, wanted)[wanted.best >= 0].mean()
    torch.testing.assert_close(draft.losses(batch).loss, expected)


def test_a_wider_or_narrower_model_keeps_the_head_size(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft = new_draft(target, "draft-model", hidden_size=48)
    assert isinstance(draft, DraftModel)
    assert (draft.shape.num_attention_heads, draft.shape.num_key_value_heads, draft.shape.head_dim) == (3, 3, 16)
    with pytest.raises(UserError, match="hidden_size 50 is no multiple of the head size 16"):
        new_draft(target, "draft-model", hidden_size=50)


def test_a_given_model_drafts_what_it_says_itself(
    tmp_path: Path, small_folder: Path, tiny_folder: Folder, tiny_target: MakeTarget
) -> None:
    target = tiny_target("llama")
    made = given(small_folder, tiny_folder("llama"), tmp_path)
    record = json.loads((made.path / "draft.json").read_text())
    assert record["num_parameters"] > 10_000 and not record["trained"]
    assert "model.safetensors" in record["settings"]["model_files"]
    draft = open_draft(made, target)
    assert isinstance(draft, DraftModel)
    ids = batch_of(target, num_rows=1).ids[0]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(small_folder, dtype=torch.float32)
    expected = model.generate(ids[None, 1:13], max_new_tokens=4, do_sample=False, eos_token_id=None)[0, 12:]
    state = draft.new_state(64)
    draft.propose(state, columns(ids, 0, 5), 3, GREEDY, RNG)
    assert draft.propose(state, columns(ids, 5, 12), 4, GREEDY, RNG).tokens.tolist() == expected.tolist()
    everywhere = draft.propose_at_every_position(ids, NOTHING, NOTHING, 4).tokens
    assert everywhere.shape == (23, 4) and everywhere[11].tolist() == expected.tolist()


def test_a_given_model_too_small_for_feature_taps_still_drafts(
    tmp_path: Path, tiny_folder: Folder, tiny_target: MakeTarget
) -> None:
    one_layer = make_tiny_target("deepseek_v3", tmp_path / "one", num_layers=1, seed=3)
    draft = open_draft(given(one_layer, tiny_folder("llama"), tmp_path / "out"), tiny_target("llama"))
    ids = batch_of(tiny_target("llama"), num_rows=1).ids[0]
    assert draft.propose(draft.new_state(64), columns(ids, 0, 5), 3, GREEDY, RNG).tokens.shape == (3,)


def test_a_given_model_of_another_tokenizer_or_with_other_files_is_refused(
    tmp_path: Path, small_folder: Path, tiny_folder: Folder, tiny_target: MakeTarget
) -> None:
    other = make_tiny_target("llama", tmp_path / "other", num_layers=2)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[10:12]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"does not share the target's tokenizer \(token .* is \d+ for the target and"):
        given(other, tiny_folder("llama"), tmp_path / "a")
    copy = make_tiny_target("qwen3", tmp_path / "copy", num_layers=2, seed=1)
    made = given(copy, tiny_folder("llama"), tmp_path / "b")
    (copy / "generation_config.json").write_text("{}")
    make_tiny_target("qwen3", copy, num_layers=2, seed=2)
    with pytest.raises(UserError, match="changed since the draft was made"):
        open_draft(made, tiny_target("llama"))
    with pytest.raises(UserError, match="no such folder"):
        given(tmp_path / "nowhere", tiny_folder("llama"), tmp_path / "c")


def test_a_first_token_is_fed_before_all_others(
    tmp_path: Path, small_folder: Path, tiny_folder: Folder, tiny_target: MakeTarget
) -> None:
    target = tiny_target("llama")
    made = given(small_folder, tiny_folder("llama"), tmp_path)
    record = json.loads((made.path / "draft.json").read_text())
    assert record["settings"]["first_token"] is None  # this tokenizer begins no text with a token of its own
    record["settings"]["first_token"] = 7
    (made.path / "draft.json").write_text(json.dumps(record))
    ids = torch.cat((torch.tensor([7]), batch_of(target, num_rows=1).ids[0, 1:]))
    with_bos = open_draft(made, target).propose_at_every_position(ids, NOTHING, NOTHING, 2).tokens
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(small_folder, dtype=torch.float32)
    expected = model(ids[None]).logits[0].argmax(-1)
    assert with_bos[:, 0].tolist() == expected[1:].tolist()


@pytest.mark.parametrize("kind", ["trained", "given"])
def test_branches_follow_their_paths_and_leave_no_trace(
    kind: str, tmp_path: Path, small_folder: Path, tiny_folder: Folder, tiny_target: MakeTarget
) -> None:
    """A node's distribution is that of the chain from the root to it, siblings or not."""
    target = tiny_target("llama")
    draft = new_draft(target, "draft-model")
    if kind == "given":
        draft = open_draft(given(small_folder, tiny_folder("llama"), tmp_path), target)  # type: ignore[assignment]
    assert isinstance(draft, DraftModel)
    ids = batch_of(target, num_rows=1).ids[0]
    state = draft.new_state(64)
    draft.propose(state, columns(ids, 0, 6), 3, GREEDY, RNG)
    branches = draft.begin(state, columns(ids, 6, 12), 3)
    roots = draft.draft_ids[branches.root.topk(2).indices]
    level = branches.expand([-1, -1], roots)
    grown = branches.expand([0, 1, 1], torch.tensor([20, 21, 22]))

    def alone(path: list[int]) -> Tensor:
        fresh = draft.new_state(64)
        longer = torch.cat((ids[:13], torch.tensor(path, dtype=torch.int64)))
        return draft.begin(fresh, columns(longer, 0, 12 + len(path)), 1).root

    for found, path in zip(level, [[int(roots[0])], [int(roots[1])]], strict=True):
        torch.testing.assert_close(found, alone(path), atol=1e-4, rtol=1e-4)
    for found, path in zip(grown, [[int(roots[0]), 20], [int(roots[1]), 21], [int(roots[1]), 22]], strict=True):
        torch.testing.assert_close(found, alone(path), atol=1e-4, rtol=1e-4)
    after = draft.propose(state, columns(ids, 12, 14), 3, GREEDY, RNG).tokens.tolist()
    assert after == draft.propose_at_every_position(ids, NOTHING, NOTHING, 3).tokens[13].tolist()


def test_sampled_decoding_keeps_the_targets_distribution(tiny_target: MakeTarget) -> None:
    """Chi-square of the second output token, the first that is drafted, against the target's exact marginal.

    N = 600 draws into at most 9 cells. The draft model's own tokens, put to the same test, lie far above the 0.1 %
    point of 8 degrees of freedom, so a rule that kept every guess could not pass.
    """
    target = tiny_target("llama")
    draft = new_draft(target, "draft-model")
    prompt, hot, count = [9, 33, 120, 7, 64], Sampling(temperature=1.0, top_k=3), 600

    def after(text: list[int]) -> Tensor:
        logits = target.forward(torch.tensor([text]), target.new_cache(1, 16), logits="last").logits
        assert logits is not None
        return probabilities(logits[0, 0], hot)

    first = after(prompt)
    exact = sum(first[token] * after([*prompt, int(token)]) for token in first.nonzero()[:, 0])
    assert isinstance(exact, Tensor)
    seen, alone = torch.zeros_like(exact), torch.zeros_like(exact)
    for seed in range(count):
        rng = torch.Generator().manual_seed(seed)
        run = decode(target, draft, prompt, max_new_tokens=2, depth=1, sampling=hot, rng=rng, ignore_eos=True)
        seen[run.tokens[1]] += 1
        if seed % 6 == 0:
            columns_so_far = CommittedPositions(torch.tensor([*prompt[1:], run.tokens[0]]), NOTHING, NOTHING)
            alone[draft.propose(draft.new_state(16), columns_so_far, 1, hot, rng).tokens[0]] += 6

    def chi_square(counted: Tensor) -> float:
        likely = exact > 0
        distance = ((counted - count * exact) ** 2)[likely] / (count * exact)[likely]
        return float("inf") if counted[~likely].any() else float(distance.sum())

    assert chi_square(seen) < 26.1
    assert chi_square(alone) > 100


def test_tokenizers_are_compared_token_by_token(tmp_path: Path) -> None:
    from components.drafts.methods.draft_model import vocabulary_difference

    vocab = make_tiny_tokenizer(tmp_path).get_vocab()
    assert vocabulary_difference(vocab, dict(vocab)) == ""
    assert vocabulary_difference({**vocab, "new": 999}, vocab) == "token 'new' is unknown to the target"
    assert vocabulary_difference({}, {"a": 0}) == "token 'a' is 0 for the target and absent for the draft model"
