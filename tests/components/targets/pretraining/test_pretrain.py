"""Pre-training: resume is exact, the decay can be moved, the files load elsewhere, the tokenizer loses nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_pretraining import TINY
from tokenizers import Tokenizer

from components.contract import Context, Corpus, Target, UserError
from components.targets import pretrain_target
from components.targets.pretraining.llama import LeanLlama, LlamaShape, initial_weights, save_model
from components.targets.pretraining.plan import TokenWindows, TrainingPlan, pack_documents, plan_from_json
from components.targets.pretraining.quality import cut_prompts, distinct_bigram_ratio, held_out_windows, until_eos
from components.targets.pretraining.tokenizer import BOS_ID, EOS_ID, PAD_ID, train_byte_bpe
from components.targets.pretraining.training_run import (
    Loops,
    TrainingRun,
    repeated_ngrams,
    repetition_loss,
    synthetic_loops,
    unlikelihood_loss,
)

SHAPE = LlamaShape(
    vocab_size=300, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, max_positions=64
)
PLAN = TrainingPlan(
    shape=SHAPE,
    num_steps=8,
    decay_steps=3,
    warmup_steps=2,
    tokens_per_step=256,
    sequence_length=32,
    decay_sequence_length=64,
    microbatch_tokens=128,
    num_processes=1,
)
SETTINGS: dict[str, Any] = {**TINY, "vocab_size": 300, "repetition_weight": 1.0, "unlikelihood_weight": 1.0}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def stream() -> np.ndarray:
    return np.random.default_rng(0).integers(0, SHAPE.vocab_size, 6000).astype(np.uint16)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    body = "".join(f"    total = total + values[{n}] * weight_{n}  # term {n}\n" for n in range(40))
    for name, count in (("train", 24), ("held_out", 4)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as out:
            for number in range(count):
                group = "stdlib" if number % 2 else "stdlib-tests"
                text = "import math\n" * 60 + f"def {name}_{number}(values):\n{body}    return total\n"
                out.write(json.dumps({"id": f"{name}{number}", "source": f"{group}/{number}.py", "text": text}) + "\n")
    return Corpus(key="corpus", path=folder, info={"licence": "PSF-2.0", "python_version": "3.11"})


def make_context(folder: Path) -> Context:
    for name in ("out", "scratch"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return Context(key="target", out=folder / "out", scratch=folder / "scratch", num_threads=1)


def weights_of(run: TrainingRun) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in run.weights.items()}


def train(plan: TrainingPlan, stream: np.ndarray, scratch: Path, until: int | None = None) -> dict[str, torch.Tensor]:
    scratch.mkdir(exist_ok=True)
    run = TrainingRun(plan, (stream, stream[::-1].copy()), scratch)
    run.train(None, until=until)
    return weights_of(run)


def assert_equal_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("stop", [1, 6, 7])
def test_a_stopped_run_goes_on_bit_for_bit(stop: int, stream: np.ndarray, tmp_path: Path) -> None:
    plan = replace(PLAN, repetition_weight=1.0, unlikelihood_weight=1.0)
    undisturbed = train(plan, stream, tmp_path / "undisturbed")
    train(plan, stream, tmp_path / "stopped", until=stop)
    assert_equal_bits(train(plan, stream, tmp_path / "stopped"), undisturbed)


def test_a_damaged_checkpoint_is_refused_by_its_name(stream: np.ndarray, tmp_path: Path) -> None:
    train(PLAN, stream, tmp_path / "run", until=1)
    file = tmp_path / "run" / "latest.safetensors"
    whole = file.read_bytes()
    tensors = load_file(file)
    for damage in (
        lambda: file.write_bytes(whole[:-9]),
        lambda: file.write_bytes(whole[:2000].replace(b'"step":"1"', b'"step":"x"') + whole[2000:]),
        lambda: save_file({name: tensor * np.nan for name, tensor in tensors.items()}, file, metadata=facts_in(whole)),
        lambda: save_file({"weights/x": torch.zeros(2)}, file, metadata=facts_in(whole)),
    ):
        damage()
        with pytest.raises(UserError, match="delete the file") as refused:
            train(PLAN, stream, tmp_path / "run")
        assert str(file) in str(refused.value) and "\n" not in str(refused.value)


def facts_in(data: bytes) -> dict[str, str]:
    found: dict[str, str] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    return found


@pytest.mark.parametrize("stop", [3, 5, 7])
def test_moving_the_decay_while_stable_equals_a_run_planned_so(stop: int, stream: np.ndarray, tmp_path: Path) -> None:
    other = replace(PLAN, num_steps=10, decay_steps=4, repetition_weight=1.0)
    train(PLAN, stream, tmp_path / "moved", until=stop)  # 7 is inside the first decay: it goes back to its beginning
    assert_equal_bits(train(other, stream, tmp_path / "moved"), train(other, stream, tmp_path / "fresh"))


def test_a_checkpoint_of_another_model_or_data_order_is_not_used(stream: np.ndarray, tmp_path: Path) -> None:
    train(PLAN, stream, tmp_path / "run")
    other = replace(PLAN, seed=1)
    assert_equal_bits(train(other, stream, tmp_path / "run"), train(other, stream, tmp_path / "fresh"))


def test_a_plan_survives_json() -> None:
    assert plan_from_json(json.loads(json.dumps(asdict(PLAN)))) == PLAN


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    repeating = np.tile(np.arange(40, dtype=np.uint16), 200)
    run = TrainingRun(replace(PLAN, num_steps=30, decay_steps=10), (repeating, repeating), tmp_path)
    losses: list[float] = []
    run.train(lambda step, metrics: losses.append(metrics["loss"]))
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.parametrize("length", [7, 256, 300])
def test_the_lean_forward_has_the_logits_and_gradients_of_transformers(length: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shape = replace(SHAPE, max_positions=512)
    weights = initial_weights(shape, seed=3)
    with torch.no_grad():
        for weight in weights.values():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())))
    save_model(tmp_path, shape, weights, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    lean = LeanLlama(shape, weights, torch.float32)
    # the pad token is left out: transformers does not train its embedding
    tokens = torch.randint(PAD_ID + 1, shape.vocab_size, (2, length + 1), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(lean.logits(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    lean.loss(tokens).backward()
    expected = theirs(tokens, labels=tokens).loss
    expected.backward()
    torch.testing.assert_close(lean.loss(tokens), expected, rtol=1e-4, atol=1e-5)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(weights[name].grad, parameter.grad, rtol=2e-3, atol=1e-5, msg=name)


@pytest.fixture(scope="module")
def target(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return pretrain_target(corpus, **SETTINGS, num_processes=2, ctx=make_context(tmp_path_factory.mktemp("made")))


def test_the_saved_model_loads_in_transformers_with_the_logits_it_was_trained_to(target: Target) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target.path)
    weights = {name: weight.float() for name, weight in load_file(target.path / "model.safetensors").items()}
    lean = LeanLlama(LlamaShape(**target.info["plan"]["shape"]), weights, torch.float32)
    tokens = tokenizer("def train(values):\n    total = 0\n", return_tensors="pt").input_ids
    torch.testing.assert_close(lean.logits(tokens), model(tokens).logits, rtol=1e-4, atol=1e-4)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (BOS_ID, EOS_ID, PAD_ID)


def test_the_facts_and_the_card_come_from_what_was_measured(target: Target) -> None:
    info, card = target.info, (target.path / "README.md").read_text(encoding="utf-8")
    assert set(info["held_out_loss"]) == {"stdlib", "stdlib-tests"}
    assert all(f"{loss:.3f} nats/token" in card for loss in info["held_out_loss"].values())
    assert f"{info['loops']['real']:.3f}" in card and f"{info['num_params']:,}" in card
    assert 0 < info["loops"]["real"] <= 1 and 0 <= info["loops"]["greedy"] <= 1
    assert info["tokens_seen"] == SETTINGS["num_steps"] * SETTINGS["tokens_per_step"]
    assert str(target.path) not in json.dumps(dict(info)) + card


def test_two_processes_share_a_step_and_agree_with_one(corpus: Corpus, target: Target, tmp_path: Path) -> None:
    alone = pretrain_target(corpus, **SETTINGS, num_processes=1, ctx=make_context(tmp_path))
    ours, theirs = (load_file(made.path / "model.safetensors") for made in (alone, target))
    for name in ours:
        assert (ours[name].float() - theirs[name].float()).abs().mean() < 0.02, name


def test_a_finished_run_called_again_changes_nothing(corpus: Corpus, tmp_path: Path) -> None:
    ctx = make_context(tmp_path)
    first = pretrain_target(corpus, **SETTINGS, num_processes=1, ctx=ctx)
    files = {path.name: path.read_bytes() for path in ctx.out.iterdir() if path.name != "README.md"}
    again = pretrain_target(corpus, **SETTINGS, num_processes=1, ctx=ctx)
    assert {path.name: path.read_bytes() for path in ctx.out.iterdir() if path.name != "README.md"} == files
    assert again.info["held_out_loss"] == first.info["held_out_loss"]


def test_tokens_that_do_not_divide_evenly_are_refused_in_one_line(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="use a multiple of 512"):
        pretrain_target(corpus, **{**SETTINGS, "tokens_per_step": 640}, num_processes=2, ctx=make_context(tmp_path))


def test_the_built_in_shape_weighs_at_most_sixteen_megabytes(tmp_path: Path) -> None:
    save_model(tmp_path, LlamaShape(), initial_weights(LlamaShape(), seed=0))
    assert (tmp_path / "model.safetensors").stat().st_size <= 16_000_000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_byte_bpe(["def f(x):\n    return x\n" * 50, "class A:\n    pass\n"], 300)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_documents_are_framed_and_repeated_as_asked(corpus: Corpus, tokenizer: Tokenizer) -> None:
    once = pack_documents(corpus.path / "train.jsonl", tokenizer, {})
    twice = pack_documents(corpus.path / "train.jsonl", tokenizer, {"stdlib": 2})
    assert once[0] == BOS_ID and once[-1] == EOS_ID
    assert (once == EOS_ID).sum() == 24 and (twice == EOS_ID).sum() == 36
    assert (held_out_windows(corpus.path / "held_out.jsonl", tokenizer, 64)["stdlib"][:, 0] == BOS_ID).sum() >= 1


@given(length=st.integers(4, 40), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_an_epoch_shows_no_token_twice_and_nearly_all_of_them(length: int, seed: int, epoch: int) -> None:
    windows = TokenWindows(np.arange(1000, dtype=np.uint16), length, seed)
    seen = windows.batch(epoch * windows.per_epoch, windows.per_epoch)
    assert (np.diff(seen, axis=1) == 1).all()
    inputs = seen[:, :-1].ravel()
    assert len(set(inputs.tolist())) == len(inputs) and len(inputs) > 1000 - 3 * length


def test_distinct_bigrams_of_loops_and_of_plain_text() -> None:
    assert distinct_bigram_ratio([1, 2, 3, 4, 5]) == 1.0
    assert distinct_bigram_ratio([7] * 97) == 1 / 96
    assert until_eos([5, 6, EOS_ID, 7]) == [5, 6]


def test_prompts_end_at_def_lines_of_the_asked_group(corpus: Corpus, tokenizer: Tokenizer) -> None:
    prompts, references = cut_prompts(corpus.path / "held_out.jsonl", tokenizer, "stdlib")
    assert prompts.shape == (2, 64) and references.shape == (2, 96)
    assert all(tokenizer.decode(row).endswith("(values):") for row in prompts.tolist())


def test_only_tokens_that_complete_a_repeated_ngram_are_penalised() -> None:
    rows = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 4], [9, 9, 9, 9, 9, 9, EOS_ID, 9, 9]])
    assert repeated_ngrams(rows).int().tolist() == [[0, 0, 0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1, 0, 0, 0]]


def test_unlikelihood_lowers_the_probability_of_a_loop() -> None:
    weights = initial_weights(SHAPE, seed=0)
    lean = LeanLlama(SHAPE, weights, torch.float32)
    prompts, loop = torch.full((1, 8), 7), torch.full((1, 20), 7)
    before = unlikelihood_loss(lean, prompts, loop)
    before.backward()
    with torch.no_grad():
        for weight in weights.values():
            if weight.grad is not None:
                weight.sub_(0.5 * weight.grad)
    assert unlikelihood_loss(lean, prompts, loop) < before


@given(seed=st.integers(0, 10_000), window=st.sampled_from([64, 256]))
def test_a_made_up_loop_is_text_then_one_piece_repeated_to_the_end(seed: int, window: int) -> None:
    stream = np.arange(3000, dtype=np.uint16)
    loops = synthetic_loops(stream, np.random.default_rng(seed), window)
    assert loops.tokens.shape == (4, window) and loops.earlier.shape == (4, window - 1)
    for tokens, earlier in zip(loops.tokens.tolist(), loops.earlier.tolist(), strict=True):
        first = next(i for i, before in enumerate(earlier) if before >= 0)
        piece = first - earlier[first]
        assert len(set(tokens[: first + 1])) == first + 1, "text without a repetition comes first"
        for i in range(first, window - 1):
            assert earlier[i] == i - piece
            assert tokens[i + 1] == tokens[earlier[i] + 1], "an earlier prediction of the same token"


def test_the_repetition_loss_is_nought_where_probability_falls_as_asked() -> None:
    """p of a repeated token halves at each occurrence: with ratio 0.5 there is nothing to mend, with 1.0 there is."""
    probabilities = [0.8, 0.8, 0.4, 0.4, 0.2, 0.2]

    class Falling:
        def logits(self, tokens: torch.Tensor) -> torch.Tensor:
            rows = [
                torch.tensor([p if token == target else (1 - p) / 9 for token in range(10)]).log()
                for p, target in zip(probabilities, [3, 4, 3, 4, 3, 4], strict=True)
            ]
            return torch.stack(rows)[None]

    loops = Loops(torch.tensor([[9, 3, 4, 3, 4, 3, 4]]), torch.tensor([[-1, -1, 0, 1, 2, 3]]))
    falling: Any = Falling()
    assert float(repetition_loss(falling, loops, 0.5)) == pytest.approx(0.0, abs=1e-6)
    expected = np.mean([-np.log(1 - 0.4)] * 2 + [-np.log(1 - 0.2)] * 2)
    assert float(repetition_loss(falling, loops, 1.0)) == pytest.approx(expected, rel=1e-5)
