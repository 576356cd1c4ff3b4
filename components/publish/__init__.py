"""What others can load: one file a format, exact checks, the model card, and the code that MLflow loads by itself."""

from components.publish.export import FORMATS, export_release

__all__ = ["FORMATS", "export_release"]
