"""Loads a flow from the catalog by its three spellings, deploys it, lists it, runs it: catalog_round_trip.py NAME."""

import json
import sys
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.exceptions import MissingFlowError
from prefect.flows import Flow, load_flow_from_entrypoint

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    name = sys.argv[1]
    found = {
        spelling: load_flow_from_entrypoint(spelling).version
        for spelling in (f"flows/catalog.py:{name}", f"flows.catalog:{name}", f"flows.catalog.{name}")
    }
    try:
        load_flow_from_entrypoint("flows/catalog.py:nosuch")
    except MissingFlowError as error:
        found["nosuch"] = str(error)
    source = Flow.from_source(source=str(ROOT), entrypoint=f"flows/catalog.py:{name}")
    source.to_deployment(name="by-hand", cron="0 2 * * *").apply()
    with get_client(sync_client=True) as client:
        deployments = client.read_deployments()
    state = load_flow_from_entrypoint(f"flows.catalog:{name}")(num_rows=16, return_state=True)
    wrong = load_flow_from_entrypoint(f"flows.catalog:{name}")(from_step="nosuch", return_state=True)
    answer = {
        "found": found,
        "deployments": [
            [d.name, d.entrypoint, d.parameter_openapi_schema["properties"]["num_rows"]]
            for d in deployments
            if d.name == "by-hand"
        ],
        "state": state.name,
        "wrong": [wrong.name, wrong.message],
    }
    sys.stdout.write(json.dumps(answer) + "\n")
