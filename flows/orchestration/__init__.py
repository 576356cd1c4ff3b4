"""Prefect: flows, deployments, events, approval and artifacts of the UI."""
