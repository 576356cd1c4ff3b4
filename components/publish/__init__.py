"""Publish drafters: checkpoint formats with exact checks, engine profiles, the model card, and the MLflow model."""

from components.publish.export import export_release
from components.publish.try_release import try_release
from components.publish.upload import upload_release

__all__ = ["export_release", "try_release", "upload_release"]
