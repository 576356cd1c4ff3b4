"""Real llama.cpp programs and llama-server run the target and our drafter: the same text, rounds but for the phase."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from measured_alike import DEPTH, MAX_NEW_TOKENS, make_context
from serving_engine import free_port, served

from components.bench import measure_llama_cpp, measure_server
from components.bench.engine_server import EngineServer
from components.contract import Draft, Machine, Prompts, Target
from components.rows import EngineAcceptance, Request, read_rows

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def gguf(
    llama_cpp: Path, target_folder: Path, exported: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str]:
    """(target, drafter) as GGUF files in float32."""
    folder = tmp_path_factory.mktemp("gguf")
    files = (str(folder / "target.gguf"), str(folder / "eagle3.gguf"))
    convert = [sys.executable, str(Path(__file__).with_name("gguf_of_builtin.py")), str(llama_cpp / "source")]
    for model, file, extra in (
        (target_folder, files[0], []),
        (exported, files[1], ["--target-model-dir", str(target_folder)]),
    ):
        command = [*convert, str(model), "--outtype", "f32", "--outfile", file, *extra]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    return files


def test_the_programs_say_what_we_say_and_count_their_rounds(
    llama_cpp: Path,
    gguf: tuple[str, str],
    draft: Draft,
    target: Target,
    prompts: Prompts,
    machine: Machine,
    tmp_path: Path,
) -> None:
    made = measure_llama_cpp(
        target,
        prompts,
        model=gguf[0],
        draft_model=gguf[1],
        draft_key=draft.key,
        programs=str(llama_cpp / "bin"),
        depths=[DEPTH],
        num_prompts=4,
        max_new_tokens=MAX_NEW_TOKENS,
        num_compared=4,
        dtype="float32",
        ctx=make_context(tmp_path / "programs"),
        machine=machine,
    )
    rows = [row for row in read_rows(made.path, Request) if not row.is_warmup]
    assert {(row.method, row.depth_k) for row in rows} == {("none", 0), ("eagle3", DEPTH)} and len(rows) == 8
    assert all(row.status in ("ok", "eos") and row.identical for row in rows), [row.error for row in rows]
    for row in rows:
        assert row.decode_ns > 0 and row.tokens_kept == MAX_NEW_TOKENS
        if row.depth_k:
            assert row.tokens_raw - row.num_accepted >= row.num_rounds > 0
    (counted,) = read_rows(made.path, EngineAcceptance)
    assert sum(counted.accepted_per_position) == counted.num_accepted > 0
    assert sorted(counted.accepted_per_position, reverse=True) == counted.accepted_per_position


def test_llama_server_is_measured_by_its_own_timings(
    llama_cpp: Path, gguf: tuple[str, str], target: Target, prompts: Prompts, machine: Machine, tmp_path: Path
) -> None:
    port = free_port()
    command = [str(llama_cpp / "bin" / "llama-server"), "-m", gguf[0], "-md", gguf[1], "-c", "1024", "-np", "1"]
    command += ["--spec-type", "draft-eagle3", "--spec-draft-n-max", str(DEPTH), "-t", "2"]
    with served([*command, "--host", "127.0.0.1", "--port", str(port)], tmp_path / "log"):
        made = measure_server(
            target,
            prompts,
            servers=[EngineServer(base_url=f"http://127.0.0.1:{port}", method="eagle3", depth_k=DEPTH)],
            num_prompts=4,
            max_new_tokens=MAX_NEW_TOKENS,
            num_compared=4,
            wait_s=120,
            ctx=make_context(tmp_path / "server"),
            machine=machine,
        )
    rows = [row for row in read_rows(made.path, Request) if not row.is_warmup]
    assert all(row.status in ("ok", "eos") and row.identical for row in rows), [row.error for row in rows]
    assert {(row.engine, row.method, row.depth_k) for row in rows} == {("llama.cpp", "eagle3", DEPTH)}
    assert all(row.num_rounds == row.tokens_kept - 1 - row.num_accepted for row in rows)
    assert sum(row.num_accepted for row in rows) > 0
