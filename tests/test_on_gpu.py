"""What holds on a CPU holds on a GPU: the rooms' contracts and the main job, on a CUDA device. Run by `make test-gpu`.

DRAFTSMITH_TEST_DEVICE names another device; "cpu" tries the tests themselves where there is no GPU.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model  # type: ignore[import-untyped]
from safetensors.torch import load_file
from tiny_pipeline import artifacts, draftsmith, rows, write_pipeline
from tiny_targets import Family, make_tiny_target
from torch import Tensor
from transformers import AutoModelForCausalLM

from components.bench.clock import clock_for, stopwatch_for
from components.bench.end_to_end.identity import compare
from components.contract import Context
from components.data import collect_prompts, record_features, write_answers
from components.decoding.batch import decode_batch
from components.decoding.chain import decode
from components.decoding.session import Session
from components.drafts.interface import AbstractDraft, CommittedPositions, Sampling
from components.drafts.methods.ngram import Ngram
from components.drafts.methods.one_block import GraphedChain, OneBlockDraft
from components.drafts.storage.files import build_draft
from components.machine import describe_machine
from components.targets import load_target
from components.targets.forward.cuda_graphs import GraphedTarget
from components.targets.forward.llama import FastTarget
from components.targets.forward.transformers_model import TransformersTarget
from components.targets.generate import continue_batch, row_generator
from components.targets.interface import AbstractTarget
from components.targets.load import open_target

DEVICE = os.environ.get("DRAFTSMITH_TEST_DEVICE", "cuda")
FAMILIES: tuple[Family, ...] = ("llama", "qwen3", "deepseek_v3")
METHODS = ("eagle3", "mtp")
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-3}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.startswith("cuda") and not torch.cuda.is_available(), reason="no CUDA device that torch can use"
    ),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    root = tmp_path_factory.mktemp("gpu-targets")
    return {family: make_tiny_target(family, root / family) for family in FAMILIES}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, folders: dict[Family, Path]) -> tuple[AbstractTarget, AbstractTarget]:
    """The same target on the CPU and on the device, in float32."""
    folder = folders[request.param]
    here = open_target(folder, dtype="float32", kernel="plain")
    there = open_target(folder, dtype="float32", device=DEVICE)
    assert there.device.type == torch.device(DEVICE).type
    return here, there


def some_ids(num_sequences: int, num_rows: int, seed: int = 1) -> Tensor:
    return torch.randint(1, 384, (num_sequences, num_rows), generator=torch.Generator().manual_seed(seed))


def drafter_on(target: AbstractTarget, method: str) -> AbstractDraft:
    """A drafter with the same decided weights on whatever device its target is."""
    ids = torch.arange(0, target.shape.vocab_size, 2, device=target.device)
    draft: AbstractDraft = build_draft(method, target, {}, ids)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if weight.ndim == 2 and name != "lm_head.weight":
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)
    return draft


def assert_close(theirs: Tensor | None, ours: Tensor | None) -> None:
    assert theirs is not None and ours is not None
    torch.testing.assert_close(theirs.cpu(), ours, **CLOSE)


def test_a_target_says_the_same(pair: tuple[AbstractTarget, AbstractTarget]) -> None:
    """Prefill, one row, a block of rows, after forgetting a tail: logits and features within 1e-3."""
    ids = some_ids(2, 30)
    caches = [target.new_cache(2, 40) for target in pair]
    for start, stop in ((0, 17), (17, 18), (18, 26)):
        here, there = (t.forward(ids[:, start:stop], c, features=True) for t, c in zip(pair, caches, strict=True))
        for ours, theirs in zip(here, there, strict=True):
            assert_close(theirs, ours)
    for cache in caches:
        cache.truncate(torch.tensor([20, 20]))
    here, there = (t.forward(ids[:, 20:], c, logits="last") for t, c in zip(pair, caches, strict=True))
    assert_close(there.logits, here.logits)


def test_a_ragged_batch_says_the_same(pair: tuple[AbstractTarget, AbstractTarget]) -> None:
    ids, lengths = some_ids(3, 12), torch.tensor([12, 1, 7])
    passes = []
    for target in pair:
        cache = target.new_cache(3, 40)
        target.forward(ids, cache, num_valid=lengths, logits="last")
        passes.append(target.forward(ids[:, :4], cache, num_valid=torch.tensor([4, 2, 0])).logits)
        passes.append(target.forward(ids[:, 4:5], cache, logits="last").logits)
    for row, kept in enumerate((4, 2, 0)):
        assert passes[0] is not None and passes[2] is not None
        assert_close(passes[2][row, :kept], passes[0][row, :kept])
    assert_close(passes[3], passes[1])


def test_sampled_answers_follow_the_seed(pair: tuple[AbstractTarget, AbstractTarget]) -> None:
    """Generators live on the CPU: a seed means the same tokens wherever the logits were made."""
    prompts = [[5, 9, 2], [7], [11, 4, 4, 8]]
    answers = [
        continue_batch(
            target,
            prompts,
            max_new_tokens=8,
            temperatures=[0.0, 0.8, 0.8],
            generators=[row_generator(3, str(row)) for row in range(3)],
        )
        for target in pair
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_in_two_places_say_the_same(family: Family, folders: dict[Family, Path]) -> None:
    """Half of the layers run on the CPU and half on the device, as on two GPUs under `device_map: auto`."""
    whole = open_target(folders[family], dtype="float32", kernel="transformers")
    model = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32)
    places: dict[str, Any] = {"model.embed_tokens": "cpu", "model.norm": DEVICE, "lm_head": DEVICE}
    places |= {f"model.layers.{n}": "cpu" if n < 4 else DEVICE for n in range(8)} | {"model.rotary_emb": "cpu"}
    placed = dispatch_model(model, places, main_device="cpu", force_hooks=True).eval().requires_grad_(False)
    apart = TransformersTarget(placed, whole.shape, location="tiny")
    ids, caches = some_ids(2, 20), [one.new_cache(2, 40) for one in (whole, apart)]
    for start, stop in ((0, 12), (12, 13), (13, 20)):
        here, there = (
            one.forward(ids[:, start:stop], c, features=True) for one, c in zip((whole, apart), caches, strict=True)
        )
        for ours, theirs in zip(here, there, strict=True):
            assert_close(theirs, ours)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("way", [{"device_map": "auto"}, {"tp_size": 2}])
def test_two_gpus_hold_a_target_together(way: dict[str, Any], tmp_path: Path) -> None:
    """Features of a target that is spread are those of one GPU."""
    model, features = make_tiny_target("llama", tmp_path / "model"), {}
    for name, settings in (("one", {}), ("two", way)):
        contexts = [
            Context(key=name, out=tmp_path / name / part, scratch=tmp_path / name, device="cuda") for part in "abcd"
        ]
        for ctx in contexts:
            ctx.out.mkdir(parents=True)
        target = load_target(model=str(model), dtype="float32", **settings, ctx=contexts[0])
        prompts = collect_prompts(num_train=8, num_validation=2, num_test=2, ctx=contexts[1])
        answers = write_answers(target, prompts, max_new_tokens=16, ctx=contexts[2])
        features[name] = load_file(record_features(target, answers, ctx=contexts[3]).path / "shard-00000.safetensors")
    assert torch.equal(features["one"]["ids"], features["two"]["ids"])
    for states in ("taps", "last"):
        torch.testing.assert_close(features["two"][states], features["one"][states], rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_drafting_everywhere_equals_proposing(pair: tuple[AbstractTarget, AbstractTarget], method: str) -> None:
    _, target = pair
    draft, ids = drafter_on(target, method), some_ids(1, 24).to(target.device)
    out = target.forward(ids, target.new_cache(1, 24), logits="none", features=True)
    assert out.taps is not None and out.last is not None
    depth = draft.num_steps
    everywhere = draft.propose_at_every_position(ids[0], out.taps[0], out.last[0], depth).tokens
    for sizes in ([1] * 23, [5, 1, 3, 2, 4, 1, 7], [23]):
        state, done = draft.new_state(32), 0
        for size in sizes:
            stop = done + size
            columns = CommittedPositions(ids[0, done + 1 : stop + 1], out.taps[0, done:stop], out.last[0, done:stop])
            proposal = draft.propose(state, columns, depth, Sampling(), torch.Generator())
            done = stop
            assert proposal.tokens.tolist() == everywhere[done - 1].tolist()


@pytest.mark.parametrize("method", METHODS)
def test_the_training_graph_says_the_same(pair: tuple[AbstractTarget, AbstractTarget], method: str) -> None:
    """Loss and gradients in float32 are those of the CPU; in bfloat16 the loss is close."""
    from components.drafts.interface import Batch

    ids = some_ids(2, 24)
    out = pair[0].forward(ids, pair[0].new_cache(2, 24), logits="none", features=True)
    assert out.taps is not None and out.last is not None
    batch = Batch(ids, torch.arange(24).expand(2, -1) >= 6, out.taps.clone(), out.last.clone(), torch.tensor([24, 24]))
    found = []
    for target in pair:
        draft = drafter_on(target, method)
        mine = Batch(*(part.to(target.device) for part in batch[:5]))
        loss = draft.losses(mine).loss
        loss.backward()
        gradients = {name: weight.grad for name, weight in draft.named_parameters()}
        with torch.autocast(target.device.type, dtype=torch.bfloat16):
            rough = float(draft.losses(mine).loss.detach())
        assert rough == pytest.approx(float(loss.detach()), rel=0.05)
        found.append((loss.detach(), gradients))
    assert_close(found[1][0], found[0][0])
    for name, gradient in found[0][1].items():
        assert_close(found[1][1][name], gradient)


@pytest.mark.parametrize("method", [*METHODS, "ngram"])
def test_speculative_output_is_that_of_plain_decoding(pair: tuple[AbstractTarget, AbstractTarget], method: str) -> None:
    _, target = pair
    proposer = Ngram() if method == "ngram" else drafter_on(target, method)
    session = Session(target)
    prompts = some_ids(3, 12, seed=4).tolist()
    for prompt in prompts:
        plain = decode(target, None, prompt, max_new_tokens=32, ignore_eos=True, session=session)
        for depth in (1, 3):
            run = decode(target, proposer, prompt, max_new_tokens=32, depth=depth, ignore_eos=True, session=session)
            verdict = compare(target, prompt, plain.tokens, run.tokens, depth + 1)
            assert verdict.identical or verdict.tie, verdict
            sampled = [
                decode(
                    target,
                    proposer,
                    prompt,
                    max_new_tokens=8,
                    depth=depth,
                    sampling=Sampling(temperature=1.0, top_p=0.9),
                    rng=torch.Generator().manual_seed(1),
                    session=session,
                ).tokens
                for _ in range(2)
            ]
            assert sampled[0] == sampled[1]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_recorded_passes_and_proposals_say_the_same(folders: dict[Family, Path], family: Family) -> None:
    """CUDA graphs of one row, of a verification and of a whole proposal, alone and in a batch that shrinks."""
    target = open_target(folders[family], dtype="float32", device=DEVICE)
    drafter = drafter_on(target, "eagle3")
    assert isinstance(target, FastTarget) and isinstance(drafter, OneBlockDraft)
    graphed, chain, prompts = GraphedTarget(target), GraphedChain(drafter), some_ids(3, 12, seed=4).tolist()
    for _ in range(2):  # the second time on memory that graphs are bound to
        for depth in (0, 1, 3):
            runs = decode_batch(graphed, chain, prompts, max_new_tokens=32, depth=depth, ignore_eos=True)  # type: ignore[arg-type]
            for prompt, run in zip(prompts, runs, strict=True):
                plain = decode(target, None, prompt, max_new_tokens=32, ignore_eos=True)
                alone = decode(graphed, chain, prompt, max_new_tokens=32, depth=depth, ignore_eos=True)  # type: ignore[arg-type]
                for one in (run, alone):
                    verdict = compare(target, prompt, plain.tokens, one.tokens, depth + 1)
                    assert verdict.identical or verdict.tie, verdict


def test_a_stopwatch_of_events_orders_moments_and_counts_the_work_between() -> None:
    device = torch.device(DEVICE)
    watch, clock, a = stopwatch_for(device), clock_for(device), torch.randn(1024, 1024, device=device)
    begun, moments = clock(), [watch.mark()]
    for _ in range(3):
        a = (a @ a).clamp(-1, 1)
        moments.append(watch.mark())
    spent = clock() - begun
    read = watch.read(moments)
    assert read == sorted(read) and 0 < read[-1] - read[0] <= spent


def test_the_clock_waits_for_the_device() -> None:
    """A reading taken right after a long queue of work was started includes that work."""
    device = torch.device(DEVICE)
    clock, a = clock_for(device), torch.randn(2048, 2048, device=device)
    clock()
    start = clock()
    for _ in range(20):
        a = (a @ a).clamp(-1, 1)
    queued = time.perf_counter_ns()
    finished = clock()
    rest = clock()
    assert finished - start >= queued - start
    assert rest - finished < (finished - start) / 2, "work was still running when the clock was read"


def test_the_machine_is_named_after_its_device() -> None:
    machine = describe_machine(DEVICE)
    assert machine.device == DEVICE
    if DEVICE.startswith("cuda"):
        assert machine.device_name == torch.cuda.get_device_name(DEVICE)
        assert machine.machine_id != describe_machine("cpu").machine_id


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_the_main_job_runs_there(tmp_path: Path, family: Family) -> None:
    """Every step on the device; both drafters decode token for token like the target alone."""
    file = write_pipeline(family, tmp_path)
    done = draftsmith(tmp_path / "home", "run", "tiny", "--direct", "--file", str(file), "--device", DEVICE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    decoded = rows(
        tmp_path / "home", "SELECT method, identical, tie FROM request WHERE method <> 'none' AND NOT is_warmup"
    )
    assert {method for method, _, _ in decoded} == {"eagle3", "mtp", "ngram"}
    assert all(identical or tie for _, identical, tie in decoded)


def test_training_repeats_bit_for_bit(tmp_path: Path) -> None:
    file = write_pipeline("llama", tmp_path)
    weights = []
    for name in ("one", "two"):
        done = draftsmith(
            tmp_path / name, "run", "tiny", "--direct", "--file", str(file), "--to", "draft", "--device", DEVICE
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        drafts = sorted(key for key, record in artifacts(tmp_path / name).items() if record["kind"] == "Draft")
        weights.append([(tmp_path / name / "store" / key / "model.safetensors").read_bytes() for key in drafts])
    assert len(weights[0]) == 2
    assert weights[0] == weights[1]
