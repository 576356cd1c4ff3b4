"""A real vLLM on this machine's CPU serves the target and our drafters: the same tokens, rounds and counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import engine_vllm
from benchmarks.engine_cases import DEPTH, EngineCases, Served, make_context
from benchmarks.engine_vllm import counters_equal_answers, measured, timed, vllm
from benchmarks.engine_vllm_synthetic import measure, plugin, speculation, without_plugin
from components.bench import measure_acceptance
from components.bench.settings import EngineServer
from components.contract import Measurements
from components.rows import EngineAcceptance, EngineComparison, QualityFlag, read_rows
from components.speedup import compare_engines

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200), pytest.mark.usefixtures("vllm_ready")]


def test_plain_vllm_says_what_we_say(cases: EngineCases, tmp_path: Path) -> None:
    with vllm(cases.target_folder, tmp_path / "log", None) as address:
        made = measured(
            cases, [EngineServer(base_url=address)], tmp_path / "measured", concurrency=[1, 4], num_prompts=8
        )
    rows = timed(made)
    assert {(row.engine, row.method, row.depth_k) for row in rows} == {("vllm", "none", 0)}
    assert all(row.identical or row.tie for row in rows) and len(rows) == 16
    assert read_rows(made.path, EngineAcceptance) == []


def test_prompt_lookup_in_vllm_is_counted_alike_by_its_counters_and_its_answers(
    cases: EngineCases, tmp_path: Path
) -> None:
    lookup = {"method": "ngram", "num_speculative_tokens": DEPTH, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    with vllm(cases.target_folder, tmp_path / "log", lookup) as address:
        made = measured(cases, [EngineServer(base_url=address, method="ngram")], tmp_path / "measured", num_prompts=8)
    rows = timed(made)
    assert {(row.method, row.depth_k) for row in rows} == {("ngram", DEPTH)}
    assert all(row.identical or row.tie for row in rows) and sum(row.num_accepted for row in rows) > 0
    assert counters_equal_answers(made)


@pytest.fixture(scope="module")
def eagle3(cases: EngineCases) -> tuple[Served, Measurements]:
    """Our EAGLE-3 export, served."""
    told = {"method": "eagle3", "model": str(cases.exported("eagle3", "eagle3"))}
    return engine_vllm.serve(cases, "EAGLE-3, midlayer.*", "eagle3", told)


def assert_ours(served: Served) -> None:
    """Tokens but at a tie, and every round of every answer that is ours."""
    assert served.same_text and served.compared >= served.prompts // 2
    assert served.different == 0, served
    assert served.same_rounds and 0 < served.engine_accepted[0] < served.engine_rounds, served


def test_our_eagle3_export_drafts_in_vllm_round_for_round_as_in_our_loop(eagle3: tuple[Served, Measurements]) -> None:
    served, made = eagle3
    assert served.prompts == 24
    assert_ours(served)
    assert counters_equal_answers(made)


def test_the_step_that_compares_engines_finds_vllm_equal_and_a_wrong_drafter_a_mismatch(
    eagle3: tuple[Served, Measurements], cases: EngineCases, tmp_path: Path
) -> None:
    """Against replayed maps of our own, made without vLLM; then against those of another drafter."""
    maps = measure_acceptance(
        cases.target, cases.draft("eagle3"), cases.prompts, max_new_tokens=64, ctx=make_context(tmp_path / "maps")
    )
    made = compare_engines([eagle3[1]], acceptance=[maps], ctx=make_context(tmp_path / "compared"))
    row = next(one for one in read_rows(made.path, EngineComparison) if one.workload == "all")
    assert (row.verdict, row.num_different, row.our_rounds_from) == ("equal", 0, "maps"), made.info
    assert read_rows(made.path, QualityFlag) == []
    other = compare_engines([eagle3[1]], acceptance=[_off_by_one(maps, tmp_path)], ctx=make_context(tmp_path / "other"))
    assert [flag.code for flag in read_rows(other.path, QualityFlag)] == ["engine_mismatch"]


def _off_by_one(maps: Measurements, folder: Path) -> Measurements:
    """Maps as a drafter would have them whose guesses are kept one token less far."""
    import dataclasses

    from components.rows import AcceptanceMap, write_rows

    path = folder / "less"
    path.mkdir()
    rows = read_rows(maps.path, AcceptanceMap)
    write_rows(path, [dataclasses.replace(row, accepted=[max(0, kept - 1) for kept in row.accepted]) for row in rows])
    return Measurements(key="less", path=path)


@pytest.mark.parametrize(
    ("layout", "method", "form", "told"),
    [
        ("EAGLE-3, speculators", "eagle3", "speculators", {"method": "eagle3"}),
        ("Medusa", "medusa", "medusa", {"method": "medusa"}),
        ("EAGLE-1", "eagle1", "eagle1", {"method": "eagle"}),
        ("DFlash, speculators", "dflash", "dflash", {"method": "dflash"}),
    ],
)
def test_other_formats_draft_in_vllm_as_in_our_loop(
    cases: EngineCases, layout: str, method: str, form: str, told: dict[str, Any]
) -> None:
    told = {**told, "model": str(cases.exported(method, form))}
    served, made = engine_vllm.serve(cases, layout, method, told)
    assert_ours(served)
    assert counters_equal_answers(made)


def test_a_model_s_own_fine_tuned_mtp_module_drafts_in_vllm_as_in_our_loop(glm: EngineCases) -> None:
    served, _ = engine_vllm.serve(glm, "MTP, GLM-4.5", "mtp", {"method": "mtp"}, model=glm.stitched)
    assert_ours(served)


def test_a_small_causal_lm_drafts_in_vllm_as_in_our_loop_once_that_reads_the_first_token_too(
    cases: EngineCases,
) -> None:
    """vLLM's draft model reads the whole text; our loop shows a drafter x_1 and what follows, never x_0."""
    told = {"method": "draft_model", "model": str(cases.exported("draft-model", "causal-lm"))}
    served, _ = engine_vllm.serve(cases, "a small causal LM", "draft-model", told)
    assert_ours(served)


def test_vllm_on_a_cpu_imposes_acceptance_only_with_the_branch_that_its_kernel_lacks(
    cases: EngineCases, tmp_path: Path
) -> None:
    """When the first part fails, the kernel has it: benchmarks/vllm_imposed_worker.py is then to go."""
    assert "not supported with CPU sampling" in without_plugin(cases)
    rates = (0.6, 0.36)
    with plugin(tmp_path / "plugin"), vllm(cases.target_folder, tmp_path / "log", speculation(cases, rates)) as address:
        made = measure(cases, [EngineServer(base_url=address, imposed=rates)], "imposed", 8, 1)
    assert {(row.method, row.depth_k) for row in timed(made)} == {("imposed 1.96", 2)}
    counted = [row for row in read_rows(made.path, EngineAcceptance) if row.source == "prometheus"]
    accepted, rounds = sum(row.num_accepted for row in counted), sum(row.num_rounds for row in counted)
    assert counted[0].imposed == list(rates) and accepted / rounds == pytest.approx(0.96, rel=0.15)
