"""Addresses of data sets are taken apart into folder, name, configuration, revision and split."""

from __future__ import annotations

from components.data.sources.addresses import parse_hub_source


def test_hub_ids_are_read_apart() -> None:
    found = parse_hub_source("hf:openai/gsm8k/main@refs/convert/parquet:test")
    assert (found.name, found.config, found.revision, found.split, found.folder) == (
        "openai/gsm8k",
        "main",
        "refs/convert/parquet",
        "test",
        None,
    )
    assert found.label == "gsm8k"
    assert parse_hub_source("hf:openai/gsm8k:train").config is None
