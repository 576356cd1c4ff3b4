"""The settings of a server: its address holds no credentials, and its key is shown to nobody."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from components.bench.settings import EngineServer
from components.contract import UserError


@pytest.mark.parametrize("held", ["sk-secret\n", "  sk-secret\r\n"])
def test_a_key_is_sent_without_the_line_feed_its_file_ends_on(held: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", held)
    server = EngineServer(base_url="http://127.0.0.1:8000", api_key_variable="ENGINE_KEY")
    assert server.headers() == {"Authorization": "Bearer sk-secret"}
    assert server.without_key("x" * 295 + "sk-secret") == "x" * 295 + "***"


@pytest.mark.parametrize("held", ["sk-se\ncret", "sk-secr\u00e9t", "sk-\x7fsecret"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(held: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", held)
    with pytest.raises(UserError, match="ENGINE_KEY is no key: only printable ASCII") as told:
        EngineServer(base_url="http://127.0.0.1:8000", api_key_variable="ENGINE_KEY").headers()
    assert "sk-" not in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize("address", ["http://me:secret@host:1", "http://host?key=1", "http://host/v1#a", "http://a b/"])
def test_an_address_holds_no_credentials(address: str) -> None:
    with pytest.raises(ValidationError, match="base_url"):
        EngineServer(base_url=address)
    assert EngineServer(base_url="https://host:8000/base/v1/").root == "https://host:8000/base"


def test_imposed_acceptance_names_its_own_arm() -> None:
    server = EngineServer(base_url="http://host", imposed=(0.6, 0.36))
    assert (server.arm_method, server.arm_depth) == ("imposed 1.96", 2)
    plain = EngineServer(base_url="http://host", method="none")
    assert (plain.arm_method, plain.arm_depth) == ("none", 0)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"imposed": [0.3, 0.6]}, "no rate exceeds the one before"),
        ({"imposed": [1.2]}, "less than or equal to 1"),
        ({"imposed": [0.3], "method": "eagle3"}, "without method and draft_key"),
        ({"imposed": [0.3], "draft_key": "d"}, "without method and draft_key"),
        ({"imposed": [0.3], "depth_k": 2}, "a rate for each of depth_k drafts"),
    ],
)
def test_imposed_acceptance_is_no_drafter_s(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        EngineServer(base_url="http://host", **settings)
