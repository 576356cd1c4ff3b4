"""Deletes a registered model whole: its versions and aliases go, the promotion log and the history keep what was.

Each alias gets an entry that says it was taken away, and one without an alias says that the model was deleted: a
release made before that moment is not registered again, by whatever command. A release made later makes the model
anew, whose versions count from 1. `draftsmith gc` then frees the files.
"""

from __future__ import annotations

from pathlib import Path

from storage.history.records import new_promotion
from storage.home import MARK
from storage.registry.aliases import DELETE, aliases_of, finish_interrupted, log_external_moves, log_move, mark_of
from storage.registry.fact_tags import tags_of
from storage.registry.model import user_name
from storage.registry.tracking import has_database, mlflow_lock, open_client, translated_errors
from storage.registry.versions import require_model


def delete_model(home: Path, name: str, reason: str) -> int:
    """Delete a registered model; returns how many versions it had. Killed in between, it can be called again.

    Raises:
        UserError: there is no such model.
    """
    client, who = open_client(home), user_name()
    with mlflow_lock(home, "registry"), translated_errors(home):
        require_model(client, name)
        finish_interrupted(home, client)
        log_external_moves(home, client)
        mark, versions = mark_of(home, client), client.search_model_versions(f"name = '{name}'")
        for alias, number in sorted(aliases_of(client, name).items()):
            facts = {**tags_of(client, name, number), MARK: mark}
            log_move(home, new_promotion(name, alias, DELETE, number, None, who, reason, facts))
        log_move(home, new_promotion(name, "", DELETE, None, None, who, reason, {MARK: mark}))
        client.delete_registered_model(name)
    return len(versions)


def delete_experiment(home: Path, name: str) -> None:
    """Delete the experiment of a pipeline, as MLflow does it: its runs can be restored there until they are purged."""
    if has_database(home):
        client = open_client(home)
        experiment = client.get_experiment_by_name(name)
        if experiment is not None and experiment.lifecycle_stage == "active":
            client.delete_experiment(experiment.experiment_id)


def rename_experiment(home: Path, former: str, present: str) -> None:
    """Give the experiment of a pipeline its new name, with all runs that are in it."""
    if has_database(home):
        client = open_client(home)
        experiment = client.get_experiment_by_name(former)
        if experiment is not None and client.get_experiment_by_name(present) is None:
            client.rename_experiment(experiment.experiment_id, present)
