"""What llama.cpp's programs print is read as it is printed: the samples are theirs (0.5.0-dev, commit 0c1e570)."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.bench.engines.acceptance import Acceptance
from components.bench.engines.llama_cpp import (
    ProgramOutput,
    Run,
    SessionFacts,
    Settings,
    Tools,
    measure_llama_cpp_fingerprint,
    read_plain,
    read_speculative,
    read_version,
    version_output,
)
from components.bench.prompts import EncodedPrompt
from components.contract import UserError

SPECULATIVE = """\
0.01.446.437 I encoded   26 tokens in    0.043 seconds, speed:  609.513 t/s
0.01.446.454 I decoded   48 tokens in    0.294 seconds, speed:  163.427 t/s
0.01.446.466 I
0.01.446.477 I n_draft   = 3
0.01.446.488 I n_predict = 48
0.01.446.499 I n_drafted = 83
0.01.446.510 I n_accept  = 20
0.01.446.521 I accept    = 24.096%
"""
STATISTICS = (
    "spec common_specu: statistics     draft-eagle3: #calls(b,g,a) =    1     28     28, #gen drafts =     28, "
    "#acc drafts =    11, #gen tokens =     83, #acc tokens =    20, #mean acc len = 1.71, "
    "#acc rate/pos = (0.393, 0.179, 0.143), dur(b,g,a) = 0.001, 14.564, 0.016 ms\n"
)
PLAIN = """\
common_perf_print:    sampling time =       0.85 ms
common_perf_print:    samplers time =       0.51 ms /    74 tokens
common_perf_print:        load time =      55.47 ms
common_perf_print: prompt eval time =       7.66 ms /    26 tokens (    0.29 ms per token,  3395.59 tokens per second)
common_perf_print:        eval time =      62.10 ms /    47 runs   (    1.32 ms per token,   756.86 tokens per second)
common_perf_print:       total time =      88.99 ms /    73 tokens
"""


def test_counts_by_position_come_with_the_statistics() -> None:
    counts = Acceptance(28, 83, 20, [11, 5, 4])
    assert read_speculative(SPECULATIVE + STATISTICS) == ProgramOutput(26, 48, 43_000_000, 294_000_000, counts)


def test_without_statistics_rounds_follow_from_the_counts() -> None:
    printed = read_speculative(SPECULATIVE)
    assert printed is not None and printed.acceptance == Acceptance(28, 83, 20)


def test_positions_that_rounding_leaves_in_doubt_are_not_told() -> None:
    doubtful = STATISTICS.replace("#acc tokens =    20", "#acc tokens =    21")
    printed = read_speculative(SPECULATIVE + doubtful)
    assert printed is not None and printed.acceptance is not None and printed.acceptance.per_position is None


def test_plain_decoding_counts_the_token_that_prefill_made() -> None:
    assert read_plain(PLAIN) == ProgramOutput(26, 48, 7_660_000, 62_950_000, None)


@pytest.mark.parametrize("cut", ["", SPECULATIVE[:120], "0.00.354.077 I sched_reserve: reserve took 2.27 ms\n"])
def test_a_log_without_its_end_is_no_measurement(cut: str) -> None:
    assert read_speculative(cut) is None and read_plain(cut) is None


def test_the_version_is_what_the_program_states() -> None:
    text = "version: 0.5.0-dev (build 1, commit 0c1e570)\nbuilt with GNU 12.2.0 for Linux x86_64\n"
    assert read_version(text) == "0.5.0-dev (build 1, commit 0c1e570)"
    assert read_version("") == ""


def test_missing_programs_and_models_are_told_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model: .*no such file"):
        Tools.locate("", str(tmp_path / "absent.gguf"), "", [3])
    model = tmp_path / "model.gguf"
    model.touch()
    with pytest.raises(UserError, match="no llama-completion and no llama-speculative-simple"):
        Tools.locate(str(tmp_path), str(model), "", [3])
    (tmp_path / "llama-cli").touch(mode=0o755)
    assert Tools.locate(str(tmp_path), str(model), "", []).plain == str(tmp_path / "llama-cli")


def test_the_limit_is_passed_as_each_program_counts_it(tmp_path: Path) -> None:
    settings = Settings("m.gguf", "d.gguf", "draft-eagle3", 48, 1024, 2, 60.0)
    tools = Tools("llama-completion", "llama-speculative-simple")
    plain, deep = (settings.command(tools, depth, tmp_path / "p") for depth in (0, 7))
    assert plain[0] == "llama-completion" and plain[plain.index("-n") + 1] == "48"
    assert deep[deep.index("-n") + 1] == "47" and deep[deep.index("--spec-draft-n-max") + 1] == "7"
    assert deep[deep.index("-md") + 1] == "d.gguf" and "--no-escape" in deep


def test_failed_and_overlong_runs_are_rows() -> None:
    prompt = EncodedPrompt("p", "code", [1, 2, 3])
    printed = ProgramOutput(3, 10, 5, 90, Acceptance(6, 18, 4, [3, 1]))
    runs = [
        Run(prompt, 3, 0, False, printed, "one two three four", None),
        Run(prompt, 3, 0, False, None, "", "exit 1 without its counts"),
        Run(prompt, 0, 0, False, ProgramOutput(3, 8, 5, 90, None), "one two", None),
    ]
    facts = SessionFacts("s", "t", "d", "eagle3", "1", "float32", 2, 8)
    rows = facts.requests(runs, {"p": "one two three"})
    assert [(r.status, r.tokens_kept, r.tokens_raw, r.identical) for r in rows] == [
        ("ok", 8, 10, True),
        ("error", 0, 0, None),
        ("ok", 8, 8, False),
    ]
    assert rows[1].error == "exit 1 without its counts" and [r.draft_key for r in rows] == ["d", "d", ""]
    # the speculative program makes its first token within decode_ns: a tenth of ten tokens' time is that one's
    assert [(r.ttft_ns, r.decode_ns) for r in rows] == [(5 + 9, 90 - 9), (0, 0), (5, 90)]
    (counted,) = facts.acceptance(runs)
    assert (counted.num_requests, counted.accepted_per_position) == (1, [3, 1, 0])


def test_the_key_follows_the_libraries_that_the_programs_load(tmp_path: Path) -> None:
    for name in ("model.gguf", "bin/llama-completion", "bin/libggml-cpu.so", "lib/libllama.so.0", "lib/libz.so"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch(mode=0o755)
    settings = {"model": str(tmp_path / "model.gguf"), "programs": str(tmp_path / "bin"), "depths": []}
    before = measure_llama_cpp_fingerprint(settings)
    assert {Path(file).name for file in before} == {
        "model.gguf",
        "llama-completion",
        "libggml-cpu.so",
        "libllama.so.0",
    }
    (tmp_path / "lib" / "libllama.so.0").write_bytes(b"another build")
    assert measure_llama_cpp_fingerprint(settings) != before


def test_a_program_that_hangs_or_cannot_run_is_one_line(tmp_path: Path) -> None:
    program = tmp_path / "llama-completion"
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    program.chmod(0o755)
    with pytest.raises(UserError, match=r"--version did not end within 0\.2 s"):
        version_output(str(program), timeout_s=0.2)
    program.write_bytes(b"\x7fELF of another machine")
    with pytest.raises(UserError, match="cannot be run"):
        version_output(str(program))
