"""Publish drafters: checkpoint formats with exact checks, engine profiles, the model card, and the MLflow model."""

from components.publish.release.dry_run import try_release
from components.publish.release.export import export_release
from components.publish.release.upload import upload_release

__all__ = ["export_release", "try_release", "upload_release"]
