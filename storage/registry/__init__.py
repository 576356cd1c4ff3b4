"""The MLflow registry: tracking, versions, aliases, evidence and the promotion gate."""
