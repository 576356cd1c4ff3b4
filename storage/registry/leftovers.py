"""What the registry still needs of a home, and what MLflow holds for nobody: the two sides that `draftsmith gc` asks.

A version is kept while an alias names it or nights count it as champion, it is one of the newest of its model, or it
bears the tag `draftsmith.keep`. A model that was logged for a version which somebody has deleted in MLflow serves
nobody: its files go.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from components.contract import UserError
from storage import journal
from storage.registry.aliases import aliases_of
from storage.registry.fact_tags import KEEP
from storage.registry.registry import champion_that_counts
from storage.registry.tracking import (
    KEY_TAG,
    MlflowClient,
    has_database,
    mlflow_lock,
    open_client,
    translated_errors,
    uses_home_database,
)

_PAGE = 1000


@dataclass(frozen=True)
class LeftoverModel:
    """A model that MLflow holds and no version needs. folder: of its files."""

    model_id: str
    folder: Path


def kept_releases(home: Path, num_versions: int) -> set[str]:
    """The keys of the releases behind the versions that are kept: of each model also the newest `num_versions`.

    Raises:
        UserError: MLflow cannot be asked, or its database is gone and the promotion log shows that there were versions.
    """
    if not has_database(home):
        if journal.promotions(home):
            raise UserError(
                f"{home / 'mlflow'}: has no database, and the promotion log has versions: draftsmith resync"
            )
        return set()
    client, keys = open_client(home), set[str]()
    with translated_errors(home):
        for model in client.search_registered_models(max_results=_PAGE):
            named = {*aliases_of(client, model.name).values(), champion_that_counts(home, client, model.name)}
            versions = sorted(client.search_model_versions(f"name = '{model.name}'"), key=lambda one: -int(one.version))
            for place, version in enumerate(versions):
                is_marked = version.tags.get(KEEP, "no") != "no"
                if place < num_versions or int(version.version) in named or is_marked:
                    keys.add(version.tags.get(KEY_TAG, ""))
    return keys


def leftover_models(home: Path) -> list[LeftoverModel]:
    """The models in the database of this home that no version needs any more."""
    if not (uses_home_database(home) and has_database(home)):
        return []
    with mlflow_lock(home, "registry"), translated_errors(home):  # nobody is between a model and its version
        return _find_leftovers(home, open_client(home))


def delete_leftovers(home: Path, leftovers: list[LeftoverModel]) -> None:
    """Delete models that no version needs; one that a version has begun to need meanwhile stays."""
    with mlflow_lock(home, "registry"), translated_errors(home):
        client = open_client(home)
        for leftover in set(_find_leftovers(home, client)).intersection(leftovers):
            client.delete_logged_model(leftover.model_id)
            shutil.rmtree(leftover.folder)


def _find_leftovers(home: Path, client: MlflowClient) -> list[LeftoverModel]:
    needed = {client.get_model_version_download_uri(one.name, one.version) for one in client.search_model_versions()}
    experiments = [experiment.experiment_id for experiment in client.search_experiments(max_results=_PAGE)]
    found, token, top = [], None, (home / "mlflow" / "artifacts").absolute()
    while experiments:
        page = client.search_logged_models(experiments, max_results=50, page_token=token)
        for model in page:
            folder = Path(url2pathname(urlsplit(model.artifact_location).path))
            if model.artifact_location not in needed and folder.is_relative_to(top) and folder.is_dir():
                found.append(LeftoverModel(model.model_id, folder))
        token = page.token
        if not token:
            break
    return found
