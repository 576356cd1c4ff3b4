"""pipelines.yaml: read, checked and filled in."""
