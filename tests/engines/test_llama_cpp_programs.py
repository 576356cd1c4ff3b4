"""Real llama.cpp programs and llama-server run the target and our drafters: the same text, the rounds of our replay."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving_engine import free_port, served

from benchmarks import engine_llama_cpp
from benchmarks.engine_cases import DEPTH, MAX_NEW_TOKENS, EngineCases, make_context
from components.bench import measure_server
from components.bench.settings import EngineServer
from components.rows import Request, read_rows

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200), pytest.mark.usefixtures("llama_cpp")]


@pytest.mark.parametrize(
    ("method", "form"), [("eagle3", "eagle3"), ("eagle3", "speculators"), ("dflash", "dflash"), ("dspark", "dflash")]
)
def test_the_programs_say_what_we_say_and_keep_what_our_map_says_one_token_earlier(
    cases: EngineCases, method: str, form: str
) -> None:
    line, made = engine_llama_cpp.serve(cases, f"{method}, {form}", cases.exported(method, form), f"draft-{method}")
    rows = [row for row in read_rows(made.path, Request) if not row.is_warmup]
    assert {(row.method, row.depth_k) for row in rows} == {("none", 0), (method, DEPTH)}
    assert all(row.identical for row in rows) and line.prompts == line.compared == 24
    assert line.same_rounds, line
    assert all(row.decode_ns > 0 and row.tokens_kept == MAX_NEW_TOKENS for row in rows if row.status == "ok")


def test_a_small_causal_lm_drafts_in_its_programs_as_our_map_says(cases: EngineCases) -> None:
    checkpoint = cases.exported("draft-model", "causal-lm")
    line, _ = engine_llama_cpp.serve(cases, "a small causal LM", checkpoint, "draft-simple")
    assert line.identical == line.prompts == 24
    assert line.compared == 24 and line.same_rounds, line


@pytest.mark.parametrize("kind", list(engine_llama_cpp.BROKEN))
def test_a_broken_checkpoint_is_refused_by_our_validator_and_by_llama_cpp(cases: EngineCases, kind: str) -> None:
    ours, theirs = engine_llama_cpp.refusals(cases, kind)
    assert ours and "\n" not in ours, f"our validator takes a checkpoint with {kind}"
    assert theirs, f"llama.cpp takes a checkpoint with {kind}"


def test_llama_server_is_measured_by_its_own_timings(cases: EngineCases, llama_cpp: Path, tmp_path: Path) -> None:
    """It makes the first token from the prompt, as we do: its rounds are ours."""
    files = (tmp_path / "target.gguf", tmp_path / "draft.gguf")
    engine_llama_cpp.convert(cases.target_folder, files[0])
    engine_llama_cpp.convert(cases.exported("eagle3", "eagle3"), files[1], target=cases.target_folder)
    port = free_port()
    command = [str(llama_cpp / "bin" / "llama-server"), "-m", str(files[0]), "-md", str(files[1]), "-c", "1024"]
    command += ["-np", "1", "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(DEPTH), "-t", "2"]
    with served([*command, "--host", "127.0.0.1", "--port", str(port)], tmp_path / "log"):
        made = measure_server(
            cases.target,
            cases.prompts,
            servers=[EngineServer(base_url=f"http://127.0.0.1:{port}", method="eagle3", depth_k=DEPTH)],
            num_prompts=4,
            max_new_tokens=MAX_NEW_TOKENS,
            num_compared=4,
            wait_s=120,
            ctx=make_context(tmp_path / "server"),
            machine=cases.machine,
        )
    rows = [row for row in read_rows(made.path, Request) if not row.is_warmup]
    assert all(row.status in ("ok", "eos") and row.identical for row in rows), [row.error for row in rows]
    assert {(row.engine, row.method, row.depth_k) for row in rows} == {("llama.cpp", "eagle3", DEPTH)}
    assert all(row.num_rounds == row.tokens_kept - 1 - row.num_accepted for row in rows)
    assert sum(row.num_accepted for row in rows) > 0
