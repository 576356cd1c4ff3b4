"""A step's process has the secrets that its work needs, and no others."""

from __future__ import annotations

import os

import pytest

from flows.execution.step_worker import forget_secrets, secret_names

SECRETS = {
    "HF_TOKEN": "hf_0123456789",
    "AWS_SECRET_ACCESS_KEY": "aws",
    "OPENAI_API_KEY": "sk-0123456789",
    "WANDB_API_KEY": "wandb",
    "PREFECT_API_AUTH_STRING": "draftsmith:password",
    "MLFLOW_TRACKING_PASSWORD": "password",
    "DRAFTSMITH_STORE_SECRET": "of the team",
    "PREFECT_API_DATABASE_CONNECTION_URL": "postgresql://ada:hidden@db/prefect",
    "DATABASE_URL": "postgresql://ada:hidden@db/other",
}
PLAIN = {"PATH": "/bin", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DRAFTSMITH_HOME": "/home/ada/x"}
OURS = {name for name in SECRETS if name.startswith(("PREFECT_", "MLFLOW_", "DRAFTSMITH_"))}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in (SECRETS | PLAIN).items():
        monkeypatch.setenv(name, value)


def test_secrets_are_known_by_their_names_or_by_the_addresses_that_hold_them() -> None:
    assert secret_names(os.environ) == SECRETS.keys()


@pytest.mark.parametrize("address", ["drafts.train_draft", "bench.measure_acceptance", "speedup.choose_depth"])
def test_a_step_that_fetches_nothing_has_no_secret(address: str) -> None:
    forget_secrets(address, {"model": "x"})
    assert {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} == PLAIN


@pytest.mark.parametrize(
    "address", ["targets.load_target", "data.collect_chats", "publish.upload_release", "mine.step"]
)
def test_a_step_that_may_fetch_has_the_keys_of_hubs_and_none_of_our_servers(address: str) -> None:
    forget_secrets(address, {})
    assert secret_names(os.environ) == SECRETS.keys() - OURS


def test_a_step_has_what_its_own_settings_name() -> None:
    forget_secrets("bench.measure_engine", {"api_key_variable": "OPENAI_API_KEY", "other_variable": ""})
    assert secret_names(os.environ) == {"OPENAI_API_KEY"}
