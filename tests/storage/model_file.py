"""A model file for the registry's tests: it answers with the headline of the release it was given."""

import json
from pathlib import Path

import mlflow
from mlflow.pyfunc import PythonModel


class Headline(PythonModel):
    """The smallest model that reads its release."""

    def load_context(self, context):
        self.release = json.loads((Path(context.artifacts["release"]) / "release.json").read_text())

    def predict(self, context, model_input, params=None):
        return self.release["al"]


mlflow.models.set_model(Headline())
