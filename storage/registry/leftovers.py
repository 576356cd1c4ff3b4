"""What the registry still needs of a home, and what MLflow holds for nobody: the two sides that `draftsmith gc` asks.

A version is kept while an alias names it, it is or was the champion that counts so that a rollback may go to it, it is
one of the newest of its model, or it bears the tag `draftsmith.keep`. Of any other, the files that MLflow serves it
from go once the store does not keep its release either; the version itself stays, with its facts, its run and its
moves, and says so by a tag (`FILES`). It has its files again when a run makes or finds its release. A model that was
logged for a version which somebody has deleted in MLflow serves nobody: it goes as a whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from components.contract import UserError
from storage import journal
from storage.registry.aliases import aliases_of
from storage.registry.fact_tags import FILES, KEEP
from storage.registry.registry import serving_versions
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
    """A model that MLflow holds and nobody needs. folder: of its files.

    version: (model, number) of the version that has it and stays without files; None: none has, and it goes whole.
    """

    model_id: str
    folder: Path
    version: tuple[str, int] | None = None


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
    with translated_errors(home):
        versions = list(_versions(home, open_client(home), num_versions))
    return {version.tags.get(KEY_TAG, "") for version, is_kept in versions if is_kept}


def leftover_models(home: Path, num_versions: int, kept_keys: Collection[str]) -> list[LeftoverModel]:
    """The models in the database of this home that nobody needs any more.

    num_versions: as for `kept_releases`. kept_keys: the keys of all that the store keeps.
    """
    if not (uses_home_database(home) and has_database(home)):
        return []
    with mlflow_lock(home, "registry"), translated_errors(home):  # nobody is between a model and its version
        return _find_leftovers(home, open_client(home), num_versions, kept_keys)


def delete_leftovers(home: Path, leftovers: Collection[LeftoverModel]) -> set[LeftoverModel]:
    """Delete models that nobody needs; one that was given an alias, a mark or a version meanwhile stays.

    Returns those that have gone.
    """
    with mlflow_lock(home, "registry"), translated_errors(home):
        client = open_client(home)
        deleted = set(_find_leftovers(home, client, 0, ())).intersection(leftovers)
        for leftover in deleted:
            if leftover.version is None:
                client.delete_logged_model(leftover.model_id)
            else:  # first of all: a version whose files are half gone is no damage
                name, number = leftover.version
                notice = f"let go by draftsmith gc on {datetime.now(UTC):%Y-%m-%d}"
                client.set_model_version_tag(name, str(number), FILES, notice)
            shutil.rmtree(leftover.folder)
    return deleted


def _versions(home: Path, client: MlflowClient, num_versions: int) -> Iterator[tuple[Any, bool]]:
    """Every version of every model, and whether it is kept."""
    for model in client.search_registered_models(max_results=_PAGE):
        named = {*aliases_of(client, model.name).values(), *serving_versions(home, client, model.name)}
        versions = sorted(client.search_model_versions(f"name = '{model.name}'"), key=lambda one: -int(one.version))
        for place, version in enumerate(versions):
            is_marked = version.tags.get(KEEP, "no") != "no"
            yield version, place < num_versions or int(version.version) in named or is_marked


def _find_leftovers(
    home: Path, client: MlflowClient, num_versions: int, kept_keys: Collection[str]
) -> list[LeftoverModel]:
    needed, idle, top = set[str](), dict[str, LeftoverModel](), (home / "mlflow" / "artifacts").absolute()
    for version, is_kept in _versions(home, client, num_versions):
        place = client.get_model_version_download_uri(version.name, version.version)
        key = version.tags.get(KEY_TAG)  # a version that people have registered themselves has none
        if is_kept or key is None or key in kept_keys:
            needed.add(place)
        else:
            idle[place] = LeftoverModel("", _folder(place), (version.name, int(version.version)))
    leftovers = [model for place, model in idle.items() if place not in needed]
    experiments = [experiment.experiment_id for experiment in client.search_experiments(max_results=_PAGE)]
    token = None
    while experiments:
        page = client.search_logged_models(experiments, max_results=50, page_token=token)
        places = {model.artifact_location: model.model_id for model in page}
        leftovers += [
            LeftoverModel(model_id, _folder(place))
            for place, model_id in places.items()
            if place not in needed | idle.keys()
        ]
        token = page.token
        if not token:
            break
    return [model for model in leftovers if model.folder.is_relative_to(top) and model.folder.is_dir()]


def _folder(address: str) -> Path:
    return Path(url2pathname(urlsplit(address).path))
