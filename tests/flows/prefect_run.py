"""Runs one pipeline as the command line does: prefect_run.py FILE HOME PIPELINE."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from components.contract import UserError  # noqa: E402
from flows.execution.messages import StepFailed  # noqa: E402
from flows.orchestration.prefect_server import prefect_server  # noqa: E402
from flows.planning.plan import RunOptions, plan_run  # noqa: E402

if __name__ == "__main__":
    options = RunOptions(
        file=Path(sys.argv[1]), home=Path(sys.argv[2]), device="cpu", packages=("toybox", "decisionbox")
    )
    try:
        plan, store = plan_run(sys.argv[3], {"num_rows": 5} if sys.argv[3] == "toys" else {}, options)
        with prefect_server(store.home) as server:
            from flows.orchestration.flow import run_with_prefect

            outcome = run_with_prefect(plan, store, options, lambda step, event: None, server)
    except (UserError, StepFailed) as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
    else:
        sys.stdout.write(f"{outcome.run_id} {sorted(outcome.artifacts)} {list(outcome.problems)}\n")
    sys.stdout.write(f"torch in the flow process: {'torch' in sys.modules}\n")
