"""An agent on another node: it trains along with every step that asks for nodes, one by one, until it is ended.

    DRAFTSMITH_RENDEZVOUS=HOST:PORT python -m components.drafts.training.node

The step's own node is HOST. Both read the same folders: DRAFTSMITH_HOME is on a file system of all nodes, under one
path. What the step is told, its store tells the agent. An agent that fails meets the others again.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import time

from torch.distributed import DistNetworkError

from components.contract import UserError
from components.drafts.training.processes import JOB, Job, connect, rendezvous, run_agent


def main() -> None:
    """Wait for a step, train along, wait for the next."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # run_agent then ends the agent
    host, port = rendezvous("training on another node")
    done = ""
    while True:
        try:
            with socket.create_connection((host, port), timeout=10) as connection:
                address = connection.getsockname()[0]
            job = Job(**json.loads(connect(f"{host}:{port}").get(JOB)))
        except (OSError, DistNetworkError):  # no step trains
            time.sleep(1)
            continue
        if job.run == done:  # it is about to end
            time.sleep(0.1)
        elif run_agent(job, f"{host}:{port}", address) == 0:
            done = job.run


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
