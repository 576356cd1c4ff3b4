"""A server's address is a URL without credentials, and its key leaves this machine in a header alone."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from components.contract import UserError
from components.engines.server_address import ServerAddress


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://host/path/v1", "http://[::1]:8000/v1/"])
def test_the_root_is_the_address_without_v1(url: str) -> None:
    root = ServerAddress(base_url=url).root
    assert url.startswith(root) and not root.endswith(("/", "/v1"))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://user:secret@host", "http://host/?key=1", "http://host/#a"])
def test_credentials_queries_and_bare_hosts_are_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        ServerAddress(base_url=url)


def test_the_key_is_in_the_header_and_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    address = ServerAddress(base_url="http://host", api_key_variable="SERVER_KEY")
    with pytest.raises(UserError, match=r"http://host: \$SERVER_KEY is not set"):
        address.headers()
    monkeypatch.setenv("SERVER_KEY", ' se"cret ')
    assert address.headers() == {"Authorization": 'Bearer se"cret'}
    assert address.without_key('refused:\n{"key": "se\\"cret"} of se"cret') == 'refused: {"key": "***"} of ***'
    monkeypatch.setenv("SERVER_KEY", "line\nend")
    with pytest.raises(UserError, match="is no key") as error:
        address.headers()
    assert "line" not in str(error.value)
