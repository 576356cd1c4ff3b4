"""A drafter that goes out in a format of ours and is imported again drafts the same, and goes out again the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from foreign_drafts import FORMS, IDS, Pair, make_pair
from safetensors.torch import load_file, save_file
from torch import Tensor

from components.contract import UserError
from components.drafts.importing.imported_draft import READERS
from components.drafts.steps import DraftLayout
from components.publish.formats.registry import read_drafter_state, write_format


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.set_num_threads(1)
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize(("form", "method", "settings", "draft_ids"), FORMS, ids=IDS)
def test_an_imported_drafter_is_the_one_that_was_exported(
    form: str, method: str, settings: dict[str, Any], draft_ids: Tensor, pair: Pair, tmp_path: Path
) -> None:
    network: Any = pair.network(method, settings, draft_ids)
    pair.write(form, network, settings, tmp_path / "out")
    draft = pair.adopt(tmp_path / "out", tmp_path / "draft")
    assert (draft.info["method"], draft.info["imported_layout"]) == (method, form)
    again = pair.opens(draft)
    assert torch.equal(again.draft_ids, draft_ids)
    mine, theirs = pair.guesses(network), pair.guesses(again)
    assert torch.equal(mine[0], theirs[0]) and mine[1] == theirs[1]
    text = pair.text()[0]
    depth = min(3, network.max_depth)
    assert torch.equal(pair.run(again, text, depth), theirs[0][:, :depth]), "its cached decoding drafts the same"
    write_format(form, read_drafter_state(draft.path), pair.source, tmp_path / "again")
    (before,), (after,) = ((tmp_path / name).glob("*.safetensors") for name in ("out", "again"))
    first, second = load_file(before), load_file(after)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-6, atol=1e-7, msg=name)


def test_what_is_no_drafter_is_said_in_one_line(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "config.json").write_text('{"model_type": "llama"}')
    save_file({"weights": torch.ones(3)}, tmp_path / "table" / "model.safetensors")
    with pytest.raises(UserError, match="no drafter in a format that is read here") as error:
        pair.adopt(tmp_path / "table", tmp_path / "draft")
    assert "\n" not in str(error.value)


def test_a_layout_can_be_named_and_every_one_of_them_has_a_reader() -> None:
    assert [reader.layout for reader in READERS] == list(get_args(DraftLayout))[1:]
