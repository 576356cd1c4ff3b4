"""Every method has the command of each engine that serves it, with the words that this engine reads."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from components.engines.depth_settings import settings_for
from components.engines.launch import launch_lines


def test_vllms_medusa_is_told_one_depth_whatever_the_batch() -> None:
    told = settings_for("medusa", {1: 3, 8: 1})
    assert told["vllm"]["speculative_config"] == {"method": "medusa", "num_speculative_tokens": 3}
    older = settings_for("eagle3", {1: 2, 8: 4})
    (line, *_) = launch_lines("medusa", 2, older, "target", {"medusa": "medusa"})
    assert "per_batch" not in line[1] and "per_batch" in str(older)
    assert '"num_speculative_tokens": 2' in line[1], "the chosen depth, not the deepest of any batch"


@pytest.mark.parametrize(
    ("method", "folders", "settings", "words"),
    [
        (
            "ngram",
            {},
            {"min_ngram": 2, "max_ngram": 4},
            ['"prompt_lookup_max": 4', "NGRAM", "prompt_lookup_num_tokens=3"],
        ),
        (
            "suffix",
            {},
            {"max_tree_depth": 48, "max_spec_factor": 2.0, "min_token_prob": 0.2, "cached_tokens": 0},
            [
                '"method": "suffix"',
                '"suffix_decoding_max_tree_depth": 48',
                '"suffix_decoding_max_spec_factor": 2.0',
                '"suffix_decoding_min_token_prob": 0.2',
                '"suffix_decoding_max_cached_requests": 0',
            ],
        ),
        ("lookahead", {}, {}, ["draftsmith generate"]),
        ("p-eagle", {"speculators": "speculators"}, {}, ['"parallel_drafting": true', '"method": "eagle3"']),
        (
            "mtp",
            {"mimo": "mimo"},
            {},
            ['"num_speculative_tokens": 1', "./mimo", "--hf-overrides '{\"num_nextn_predict_layers\": 1}'"],
        ),
        ("mtp", {"stitched": "stitched"}, {}, ["vllm serve ./stitched", "--model-path ./stitched"]),
        ("draft-model", {"gguf": "gguf"}, {}, ["./gguf/draft.gguf", "--spec-type draft-simple"]),
        ("draft-model", {}, {"model": "a/b"}, ['"model": "a/b"', "--speculative-draft-model-path a/b"]),
        ("medusa", {"medusa": "medusa"}, {}, ['"method": "medusa"']),
        (
            "dflash",
            {"dflash": "dflash", "z-lab": "z-lab", "gguf": "gguf"},
            {},
            ['"./dflash"', "./z-lab --speculative-algorithm DFLASH", "./gguf/draft.gguf --spec-type draft-dflash"],
        ),
        (
            "dspark",
            {"dflash": "dflash", "z-lab": "z-lab"},
            {},
            ["--speculative-dspark-block-size 3", "./dflash --target-model-dir target --outfile dspark.gguf"],
        ),
        ("mtp-parallel", {}, {}, []),
    ],
)
def test_every_method_has_the_launch_lines_of_the_engines_that_serve_it(
    method: str, folders: dict[str, str], settings: dict[str, Any], words: list[str]
) -> None:
    lines = launch_lines(method, 3, settings_for(method, {1: 3}), "target", folders, settings)
    said = "\n".join(command for _, command in lines)
    assert all(word in said for word in words), said
    assert bool(lines) == bool(words)
    assert launch_lines(method, 0, settings_for(method, {1: 3}), "target", folders, settings) == []


def test_a_given_draft_model_at_a_revision_is_named_as_each_engine_is_told_it() -> None:
    engines = settings_for("draft-model", {1: 3})
    launch = dict(launch_lines("draft-model", 3, engines, "a folder", {}, {"model": "acme/small@v1"}))
    told = json.loads(shlex.split(launch["vLLM"])[-1])
    assert (told["model"], told["revision"], told["method"]) == ("acme/small", "v1", "draft_model")
    assert "--speculative-draft-model-path acme/small --speculative-draft-model-revision v1 " in launch["SGLang"]
    assert launch["vLLM"].startswith("vllm serve 'a folder' --speculative-config")
    launch = dict(launch_lines("draft-model", 3, engines, "acme/big", {}, {"model": "/models/small@home"}))
    assert json.loads(shlex.split(launch["vLLM"])[-1])["model"] == "/models/small@home"
