"""MLflow's server with report pages, behind our guard (`uvicorn --factory flows.services.mlflow_server:create_app`).

`mlflow server` would start a second process that only waits for the first (190 MB and one more slow import), and its
database must be ready before it opens it: concurrent first use destroys a fresh one. So this does what that command
does, without the extra process: it prepares the database under its lock, then is MLflow's own app.
"""

from __future__ import annotations

import os
import sys

from mlflow.environment_variables import _MLFLOW_SGI_NAME
from mlflow.server import constants
from mlflow.server.handlers import initialize_backend_stores
from starlette.types import ASGIApp

from flows.services.client import PASSWORD_VARIABLE
from flows.services.report_pages import ReportPages
from flows.services.server_guard import guarded_mlflow
from storage.artifacts.store import default_home
from storage.registry.tracking import ensure_database


def create_app() -> ASGIApp:
    """MLflow's pages and API, on the database that the environment names, and the reports of the home."""
    home, database = default_home(), os.environ["MLFLOW_BACKEND_STORE_URI"]
    if database.startswith("sqlite:"):  # flows/services/databases.py has prepared any other
        ensure_database(home)

    os.environ |= {
        _MLFLOW_SGI_NAME.name: "uvicorn",
        constants.BACKEND_STORE_URI_ENV_VAR: database,
        constants.REGISTRY_STORE_URI_ENV_VAR: database,
        constants.ARTIFACT_ROOT_ENV_VAR: "mlflow-artifacts:/",
        constants.ARTIFACTS_DESTINATION_ENV_VAR: os.environ["MLFLOW_ARTIFACTS_DESTINATION"],
        constants.SERVE_ARTIFACTS_ENV_VAR: "true",
    }
    initialize_backend_stores(database, database, "mlflow-artifacts:/")
    # MLflow's own users, whom nobody wants here: without Flask-WTF each search of runs would try to import them anew,
    # and one of two searches at once would find half a module and fail.
    sys.modules["mlflow.server.auth"] = None  # type: ignore[assignment]
    from mlflow.server.fastapi_app import app  # it reads the variables above when it is imported

    return guarded_mlflow(ReportPages(app, home), os.environ.pop(PASSWORD_VARIABLE))
