"""Runs one pipeline as the command line does: prefect_run.py FILE HOME PIPELINE."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from components.contract import UserError  # noqa: E402
from flows.execution.engine import StepFailed  # noqa: E402
from flows.execution.local_run import RunOptions  # noqa: E402
from flows.orchestration.flow import run_with_prefect  # noqa: E402

if __name__ == "__main__":
    options = RunOptions(
        file=Path(sys.argv[1]), home=Path(sys.argv[2]), device="cpu", packages=("toybox", "decisionbox")
    )
    try:
        outcome = run_with_prefect(sys.argv[3], {"num_rows": 5} if sys.argv[3] == "toys" else {}, options)
    except (UserError, StepFailed) as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
    else:
        sys.stdout.write(f"{outcome.run_id} {sorted(outcome.artifacts)} {list(outcome.problems)}\n")
    sys.stdout.write(f"torch in the flow process: {'torch' in sys.modules}\n")
