"""Which environment variables of deploy/ somebody reads: we, Prefect, MLflow, or programs of other images."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Of programs that are not in our environment: the images of PostgreSQL and MinIO, libraries of an extra, the C library.
OF_OTHERS = {
    *("POSTGRES_USER", "POSTGRES_PASSWORD", "PGPASSWORD", "MINIO_ROOT_USER", "MINIO_ROOT_PASSWORD", "MC_HOST_team"),
    *("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "TMPDIR", "DO_NOT_TRACK"),
    "HF_TOKEN",
}


def read_by_nobody(names: Iterable[str]) -> list[str]:
    """Variables that neither we, nor Prefect or MLflow, nor any of OF_OTHERS reads."""
    from prefect.settings import Settings
    from prefect.settings.legacy import _get_valid_setting_names

    of_prefect = _get_valid_setting_names(Settings)
    ours = "".join(
        path.read_text(encoding="utf-8") for room in ("flows", "storage") for path in (ROOT / room).rglob("*.py")
    )
    found = find_spec("mlflow")  # its import takes seconds
    assert found is not None and found.origin is not None
    package = Path(found.origin).parent
    sources = (
        package / "environment_variables.py",
        package / "cli" / "__init__.py",
        package / "telemetry" / "utils.py",
    )
    of_mlflow = "".join(path.read_text(encoding="utf-8") for path in sources)
    known = {
        "DRAFTSMITH": lambda name: f'"{name}"' in ours,
        "PREFECT": lambda name: name in of_prefect,
        "MLFLOW": lambda name: f'"{name}"' in of_mlflow,
    }
    return [name for name in names if not known.get(name.split("_")[0], OF_OTHERS.__contains__)(name)]
