"""A private target stays private: no file names it however it is spelt, and no format takes its weights unsaid."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_formats import FORMS, drafter_state

from components.contract import UserError
from components.publish.formats.interface import Source
from components.publish.formats.registry import layout_of
from components.publish.release.public_copy import (
    formats_with_target_weights,
    holds_target,
    private_names,
    refuse_leaks,
)


@pytest.mark.parametrize(("format", "method", "settings"), FORMS)
def test_what_has_a_row_of_the_targets_embedding_or_head_is_said_to(
    format: str, method: str, settings: dict[str, Any], networks: Callable[..., Any], source: Source
) -> None:
    """None of these networks has a weight as it began, so a row of the target's was copied by the layout."""
    tensors = layout_of(format).lay_out(drafter_state(networks(method, settings, format), settings), source).tensors
    rows = torch.cat((source.embedding(), source.head())).float()
    width = rows.shape[1]
    copied = [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.ndim == 2 and tensor.shape[1] == width
        if bool((torch.cdist(tensor.float(), rows, p=float("inf")).amin(1) == 0.0).any())
    ]
    held = holds_target(format, method, settings, width)
    assert held or not copied, copied
    assert bool(copied) == held or method == "draft-model", "it would be refused without a reason"


@pytest.mark.parametrize(("width", "held"), [(None, True), (0, True), (32, True), (16, False)])
def test_a_draft_model_of_the_targets_width_starts_from_its_embedding(width: int | None, held: bool) -> None:
    settings = {} if width is None else {"hidden_size": width}
    for format in ("causal-lm", "gguf"):
        assert holds_target(format, "draft-model", settings, 32) is held


def test_a_release_that_is_too_old_to_say_is_taken_to_hold_what_settings_decide() -> None:
    told = {
        name: {"format": format, "method": method}
        for name, format, method in (
            ("eagle3", "eagle3", "eagle3"),
            ("medusa", "medusa", "medusa"),
            ("causal-lm", "causal-lm", "draft-model"),
            ("speculators", "speculators", "p-eagle"),
        )
    }
    assert set(formats_with_target_weights(told)) == {"medusa", "causal-lm", "speculators"}
    told["medusa"]["holds_target"] = False  # type: ignore[assignment]
    assert set(formats_with_target_weights(told)) == {"causal-lm", "speculators"}


@pytest.mark.parametrize(
    ("model", "folder", "told", "names"),
    [
        ("acme/secret", "/x/models--acme--secret/snapshots/" + "a" * 40, "ours", ("acme/secret", "secret")),
        ("acme/secret@v2", "/x/yard", "ours", ("acme/secret", "secret", "yard")),
        ("acme/model", "/x/models--acme--model/snapshots/" + "a" * 40, "ours", ("acme/model",)),
        ("/m/secret-llm/checkpoint-1200", "/m/secret-llm/checkpoint-1200", "ours", ("secret-llm",)),
        ("/m/secret-llm/final", "/m/secret-llm/final", "ours", ("secret-llm",)),
        ("/c/models--acme--secret/snapshots/" + "b" * 40, "", "ours", ("acme/secret", "secret")),
        ("/m/tiny-llama", "/m/tiny-llama", "meta/Tiny-Llama", ()),
        ("/m/secret-llm", "/m/secret-llm", "meta/Tiny-Llama", ("secret-llm",)),
        ("/m/secret-llm", "/m/secret-llm", "secret-llm", ("secret-llm",)),
        ("/h/.draftsmith/store/" + "c" * 64, "/h/.draftsmith/store/" + "c" * 64, "c" * 64, ()),
        ("builtin", "builtin", "builtin", ()),
        ("/home/model", "/home/model", "ours", ()),
    ],
)
def test_a_target_is_called_by_what_tells_something(
    model: str, folder: str, told: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "draftsmith").mkdir()
    (tmp_path / "draftsmith" / "target.json").write_text(json.dumps({"model": model, "folder": folder}))
    assert private_names(tmp_path, {"target": {"model": told}}) == names


@pytest.mark.parametrize(
    "file", ["secret_llm-chats.txt", "card.md", "provenance.json", "tokenizer_config.json", "a/config.json"]
)
def test_a_file_that_names_it_in_any_way_is_refused(file: str, tmp_path: Path) -> None:
    release, copy = tmp_path / "release", tmp_path / "copy"
    for folder in (release / "draftsmith", copy / "a"):
        folder.mkdir(parents=True)
    (release / "draftsmith" / "target.json").write_text(json.dumps({"model": "acme/secret-llm", "folder": ""}))
    (copy / "SHA256SUMS").write_text("")
    (copy / file).write_text("nothing here")
    if "secret" not in file:
        refuse_leaks(copy, release, ["secret-llm"])
        (copy / file).write_text('{"name_or_path": "acme%2Fsecret%2Dllm"}')
    with pytest.raises(UserError, match="names the private target 'secret-llm'"):
        refuse_leaks(copy, release, ["secret-llm"])
