"""Publish drafters: checkpoint formats with exact checks, engine profiles, the model card, and the MLflow model."""

from components.publish.steps import export_release, reopen_release, try_release, upload_release

__all__ = ["export_release", "reopen_release", "try_release", "upload_release"]
