"""The main job at tiny size, on targets that are not the built-in one: every step real, nothing mocked.

One pipeline, three architectures made from `transformers` configs. Speed is not asserted here (see benchmarks/).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_targets import make_tiny_target

ROOT = Path(__file__).resolve().parents[1]
DRAFTSMITH = str(Path(sys.executable).with_name("draftsmith"))

TINY = """
pipelines:
  tiny:
    about: The main job at tiny size.
    steps:
      target:   {{uses: targets.load_target, with: {{model: "{model}"}}}}
      prompts:
        uses: data.collect_prompts
        with: {{source: python-stdlib, num_train: 24, num_validation: 6, num_test: 4, num_warm_up: 2, max_prompt_tokens: 48}}
      answers:
        uses: data.write_answers
        in: {{target: target, prompts: prompts}}
        with: {{max_new_tokens: 24, batch_size: 8}}
      features: {{uses: data.record_features, in: {{target: target, answers: answers}}}}
      draft:
        uses: drafts.train_draft
        in: {{target: target, features: features}}
        matrix: {{method: [eagle3, mtp]}}
        with: {{method: "${{matrix.method}}", num_steps: 12, draft_vocab_size: 128}}
      acceptance:
        uses: bench.measure_acceptance
        in: {{target: target, draft: draft, prompts: prompts}}
        with: {{max_new_tokens: 16}}
      step_cost:
        uses: bench.measure_step_cost
        in: {{target: target, draft: draft, prompts: prompts}}
        with: {{num_blocks: 5, reps_in_block: 2}}
      depth:    {{uses: speedup.choose_depth, in: {{acceptance: acceptance, cost: step_cost}}}}
      end_to_end:
        uses: bench.compare_end_to_end
        in: {{target: target, drafts: draft, prompts: prompts, policy: depth}}
        with: {{max_new_tokens: 16, num_reps: 1}}
      verdict:  {{uses: speedup.confirm_depth, in: {{policy: depth, end_to_end: end_to_end}}}}
      release:
        uses: publish.export_release
        in: {{target: target, drafts: draft, policy: verdict, acceptance: acceptance, end_to_end: end_to_end}}
      report:
        uses: report.write_page
        in: {{policy: verdict, acceptance: acceptance, cost: step_cost, end_to_end: end_to_end, release: release}}
"""


def draftsmith(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line against its own home, as a user would."""
    environment = {**os.environ, "DRAFTSMITH_HOME": str(home)}
    return subprocess.run(
        [DRAFTSMITH, *arguments], env=environment, capture_output=True, text=True, timeout=500, check=False
    )


def finished(home: Path) -> dict[str, dict[str, object]]:
    """Every finished artifact's record, by key."""
    return {f.parent.name: json.loads(f.read_text()) for f in (home / "store").glob("*/artifact.json")}
