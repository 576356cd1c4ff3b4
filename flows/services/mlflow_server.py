"""MLflow's server in one process, after its database is made: `python -m flows.services.mlflow_server HOME PORT`.

`mlflow server` would start a second process that only waits for the first (190 MB and one more slow import), and its
database must be ready before it opens it: concurrent first use destroys a fresh one. So this does what that command
does, without the extra process: it prepares the database under its lock, then serves MLflow's own app on loopback.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import uvicorn
from mlflow.environment_variables import _MLFLOW_SGI_NAME
from mlflow.server import constants
from mlflow.server.handlers import initialize_backend_stores

from flows.services.client import LOOPBACK, PASSWORD_VARIABLE
from flows.services.report_pages import ReportPages
from flows.services.server_guard import guarded_mlflow
from storage.registry.tracking import ensure_database


def main() -> None:
    """Prepare the database, then be the server until SIGTERM."""
    home, port = Path(sys.argv[1]), int(sys.argv[2])
    database = os.environ["MLFLOW_BACKEND_STORE_URI"]
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

    uvicorn.run(
        guarded_mlflow(ReportPages(app, home), os.environ.pop(PASSWORD_VARIABLE)),
        host=LOOPBACK,
        port=port,
        log_level="warning",
        timeout_graceful_shutdown=3,
    )


if __name__ == "__main__":
    main()
