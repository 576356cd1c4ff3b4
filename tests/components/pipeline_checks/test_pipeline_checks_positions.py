"""`check` says which measurement does not fit the positions of its target, before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_targets import make_tiny_target
from usual_pipeline import usual

from components.contract import UserError
from components.pipeline_checks.positions import positions_of
from flows.planning.wiring import check_spec
from flows.spec.schema import load_spec


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 128 positions."""
    folder = make_tiny_target("llama", tmp_path_factory.mktemp("short") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    return folder


def test_each_setting_that_asks_for_too_many_is_a_line(model: Path, tmp_path: Path) -> None:
    file, short = tmp_path / "pipelines.yaml", {"max_new_tokens": 32}
    pipeline = usual("short", model)
    file.write_text(pipeline.text)
    with pytest.raises(UserError) as refused:
        check_spec(load_spec(file), outside=lambda name: "Draft")
    lines = str(refused.value).splitlines()
    assert len(lines) == 2
    assert "step 'cost': setting 'kv_lengths': 128 tokens" in lines[0] and "at most 47" in lines[0]
    assert "step 'end_to_end': setting 'max_new_tokens': 96 new tokens and 65 for drafts" in lines[1]
    fits = pipeline.with_setting("cost", kv_lengths=[47], tokens_per_block=16).with_setting("end_to_end", **short)
    file.write_text(fits.text)
    check_spec(load_spec(file), outside=lambda name: "Draft")


def test_positions_are_read_where_models_state_them() -> None:
    assert positions_of({"text_config": {"max_position_embeddings": 64}}) == 64
    assert positions_of({"n_positions": 1024}) == 1024
    assert positions_of({"max_position_embeddings": "many"}) is positions_of(None) is positions_of({}) is None
