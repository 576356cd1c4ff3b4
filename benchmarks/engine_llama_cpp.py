"""llama.cpp, serving the target with a drafter: converted, run by bench.measure_llama_cpp, held against our rounds.

llama-speculative-simple leaves the last token of a prompt to its first round, so its rounds begin one token earlier
than ours, and it shortens the drafts that would reach its limit (program_rounds). That is no excuse for other numbers:
with the prompt cut there and its last token counted to the answer, our own acceptance map says what each of its rounds
must draft and keep.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.engine_cases import DEPTH, MAX_NEW_TOKENS, SHOWN_FIRST, EngineCases, Served, by_position, make_context
from components.bench import measure_llama_cpp
from components.bench.acceptance import acceptance_map
from components.bench.prompts import open_drafter
from components.contract import Measurements, UserError
from components.publish.formats.gguf import name_as_dspark, run_converter
from components.publish.formats.registry import read_folder
from components.rows import EngineAcceptance, Request, read_rows
from components.targets.generate import continue_batch
from tests.engines.engine_homes import LLAMA_CPP_PACKAGE, llama_cpp_home

VERSION = f"({LLAMA_CPP_PACKAGE.replace('==', ' ')})"
EARLIER = "its rounds begin one token earlier and draft less near the limit; ours are replayed so"
METHODS = {
    "draft-eagle3": "eagle3",
    "draft-dflash": "dflash",
    "draft-dspark": "dspark",
    "draft-simple": "draft-model",
}


def convert(model: Path, file: Path, *, target: Path | None = None) -> None:
    """Make a GGUF file in float32 as releases do; raises UserError with the converter's last line."""
    arguments = [str(model), "--outtype", "f32", "--outfile", str(file)]
    arguments += ["--target-model-dir", str(target)] if target is not None else []
    run_converter(llama_cpp_home() / "source", arguments, pre="gpt-2")  # the built-in target splits text as it does


def last_line(text: str) -> str:
    """The last line that says something, shortened."""
    return next((" ".join(line.split())[:200] for line in reversed(text.splitlines()) if line.strip()), "nothing")


def serve(
    cases: EngineCases, layout: str, checkpoint: Path, speculation: str = "draft-eagle3"
) -> tuple[Served, Measurements]:
    """Convert target and drafter, run every test prompt plain and with the drafter, hold rounds against ours.

    checkpoint: the drafter's folder, or the GGUF file that it is already.
    """
    method = METHODS[speculation]
    ready = checkpoint.suffix == ".gguf"
    folder = cases.work / f"gguf-{checkpoint.parent.name if ready else checkpoint.name}"
    folder.mkdir()
    files = (folder / "target.gguf", checkpoint if ready else folder / "draft.gguf")
    convert(cases.target_folder, files[0])
    if not ready:
        if speculation == "draft-dflash":
            checkpoint = Path(shutil.copytree(checkpoint, folder / "base"))
            name_as_dspark(checkpoint)
        convert(checkpoint, files[1], target=None if speculation == "draft-simple" else cases.target_folder)
    made = measure_llama_cpp(
        cases.target,
        cases.prompts,
        model=str(files[0]),
        draft_model=str(files[1]),
        draft_key=cases.draft(method).key,
        speculation=speculation,  # type: ignore[arg-type]
        programs=str(llama_cpp_home() / "bin"),
        depths=[DEPTH],
        num_prompts=cases.num_prompts,
        max_new_tokens=MAX_NEW_TOKENS,
        num_compared=cases.num_prompts,
        dtype="float32",
        ctx=make_context(cases.work / f"measured-{folder.name}"),
        machine=cases.machine,
    )
    return held_against_ours(cases, made, layout, method), made


def held_against_ours(cases: EngineCases, made: Measurements, layout: str, method: str) -> Served:
    """Rounds and tokens of every answer against the replay from one token earlier."""
    every = [row for row in read_rows(made.path, Request) if not row.is_warmup]
    assert every and all(row.status in ("ok", "eos") for row in every), [row.error for row in every]
    rows = [row for row in every if row.depth_k == DEPTH]
    same = [row for row in rows if row.identical]
    expected = {row.prompt_id: earlier_rounds(cases, method, row.prompt_id, row.tokens_raw) for row in same}
    accepted = [one.accepted for rounds in expected.values() for one in rounds]
    (counted,) = read_rows(made.path, EngineAcceptance)
    per_position = tuple(counted.accepted_per_position) if len(same) == len(rows) else ()
    return Served(
        format=layout,
        engine="llama.cpp",
        version=f"{rows[0].engine_version.partition(' (')[0]} {VERSION}",  # its build number is this machine's
        method=method,
        prompts=len(rows),
        identical=sum(bool(row.identical) for row in rows),
        ties=sum(row.tie is True for row in rows),
        compared=len(same),
        different=sum(_counts(row) != _totals(expected[row.prompt_id]) for row in same),
        our_rounds=len(accepted),
        our_accepted=by_position(accepted, DEPTH),
        engine_rounds=sum(row.num_rounds for row in same),
        engine_accepted=per_position,
        note="; ".join((EARLIER, *([SHOWN_FIRST] if method == "draft-model" else []))),
    )


class ProgramRound(NamedTuple):
    """One round of llama-speculative-simple; it emits accepted + 1 tokens."""

    drafted: int
    accepted: int


def program_rounds(accepted: Sequence[int], depth: int, limit: int, num_tokens: int) -> list[ProgramRound]:
    """The rounds that llama-speculative-simple makes of an acceptance map with `-n limit`.

    With e tokens said it drafts at most limit - e - 1 more, so that a round ends at the limit or before it. Its
    drafters take a bound of 0 for none (draft-simple as it drafts, common_speculative_draft for the others), so from
    e = limit - 1 on a draft is whole again. It stops once more than `limit` tokens are said: a round that was shortened
    to end at the limit is followed by another, and a guess that our replay keeps is left to that one.

    accepted: drafts kept by a round that begins with as many tokens said as its index, for every index that is reached.
    num_tokens: tokens that the program said; fewer than the limit where the text ended.
    Source: examples/speculative-simple/speculative-simple.cpp and common/speculative.cpp, llama-cpp-python 0.3.36.
    """
    rounds: list[ProgramRound] = []
    said = 0
    while said < min(num_tokens, limit + 1):
        room = limit - said - 1
        drafted = min(depth, room) if room > 0 else depth
        rounds.append(ProgramRound(drafted, min(accepted[said], drafted)))
        said += rounds[-1].accepted + 1
    return rounds


def _totals(rounds: Sequence[ProgramRound]) -> tuple[int, int, int, int]:
    """(rounds, drafted, accepted, tokens) of an answer."""
    accepted = sum(one.accepted for one in rounds)
    return len(rounds), sum(one.drafted for one in rounds), accepted, len(rounds) + accepted


def _counts(row: Request) -> tuple[int, int, int, int]:
    """The same as the program printed them."""
    return row.num_rounds, row.num_drafted, row.num_accepted, row.tokens_raw


def earlier_rounds(cases: EngineCases, method: str, prompt_id: str, num_tokens: int) -> list[ProgramRound]:
    """Every round of an answer of `num_tokens`, when the first round begins in the prompt.

    A draft model reads the text from its second token on: with the first one said twice it reads all of it, as the
    program has it do.
    """
    prompt, drafter = cases.encoded[prompt_id], open_drafter(cases.draft(method), cases.opened)
    needed = num_tokens + 1 + DEPTH
    answer = continue_batch(cases.opened, [prompt], max_new_tokens=needed, stop_at_eos=False)[0].ids
    earlier = [prompt[-1], *answer]
    read = [*(prompt[:1] if method == "draft-model" else []), *prompt[:-1]]
    found = acceptance_map(cases.opened, drafter, read, earlier, num_tokens + 1, DEPTH)
    return program_rounds(found.accepted, DEPTH, MAX_NEW_TOKENS - 1, num_tokens)  # as Settings.command limits it


Break = Callable[[dict[str, Tensor]], None]


def _drop(name: str) -> Break:
    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return drop


def _add(tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.second_norm.weight"] = tensors["norm.weight"].clone()


def _narrow(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, 1:].contiguous()


def _absolute(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(tensors["d2t"].numel())


def _transpose(tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.mlp.down_proj.weight"] = tensors["midlayer.mlp.down_proj.weight"].T.contiguous()


BROKEN: dict[str, Break] = {
    "a norm missing": _drop("midlayer.hidden_norm.weight"),
    "a tensor too many": _add,
    "fc too narrow": _narrow,
    "a matrix transposed": _transpose,
    "absolute d2t": _absolute,
    "no d2t": _drop("d2t"),
}
"""Kinds of broken EAGLE-3 checkpoints that an engine can be asked to refuse."""


def break_checkpoint(good: Path, folder: Path, kind: str) -> Path:
    """A copy of a good checkpoint, broken in one way."""
    folder.mkdir(parents=True)
    tensors = load_file(good / "model.safetensors")
    BROKEN[kind](tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((good / "config.json").read_bytes())
    return folder


def refusals(cases: EngineCases, kind: str) -> tuple[str, str]:
    """What our validator and llama.cpp say of a broken checkpoint; "" of one that takes it."""
    folder = break_checkpoint(cases.exported("eagle3", "eagle3"), cases.work / "broken" / kind.replace(" ", "-"), kind)
    ours = ""
    try:
        read_folder(folder, cases.opened.shape, "eagle3")
    except UserError as error:
        ours = str(error)
    return ours, _refused_by_llama_cpp(cases, folder)


def _refused_by_llama_cpp(cases: EngineCases, folder: Path) -> str:
    """The converter's refusal, else the loader's."""
    target, file = cases.work / "broken" / "target.gguf", folder / "draft.gguf"
    if not target.is_file():
        convert(cases.target_folder, target)
    try:
        convert(folder, file, target=cases.target_folder)
    except UserError as error:
        return str(error)
    program = str(llama_cpp_home() / "bin" / "llama-speculative-simple")
    command = [program, "-m", str(target), "-md", str(file), "-p", "def add(a, b):", "-n", "8", "--temp", "0"]
    command += ["--spec-type", "draft-eagle3", "--spec-draft-n-max", "3", "-c", "256", "-t", "1"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300, check=False)
    if done.returncode == 0:
        return ""
    said = [line for line in done.stderr.splitlines() if "error" in line.lower() or "failed" in line.lower()]
    return f"llama-speculative-simple: {last_line(said[0] if said else done.stderr)}"
