"""Nightly retraining at tiny size: a first drafter, and nights over a folder of served traffic."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tiny_targets import make_tiny_target

FIRST = """
pipelines:
  first:
    about: A first drafter at tiny size.
    steps:
      target:   {{uses: targets.load_target, with: {{model: "{model}"}}}}
      prompts:
        uses: data.collect_prompts
        with: {{source: "{folder}/first.jsonl", num_train: 16, num_validation: 6, num_test: 6, num_warm_up: 2}}
      answers:
        uses: data.write_answers
        in: {{target: target, prompts: prompts}}
        with: {{max_new_tokens: 24, batch_size: 8, shard_size: 8}}
      features: {{uses: data.record_features, in: {{target: target, answers: answers}}}}
      draft:
        uses: drafts.train_draft
        in: {{target: target, features: features}}
        with: {{method: mtp, num_steps: 30, draft_vocab_size: 128, settings: {{mtp: {{mtp_modules: 2}}}}}}
      acceptance:
        uses: bench.measure_acceptance
        in: {{target: target, draft: draft, prompts: prompts}}
        with: {{max_new_tokens: 16}}
      cost:
        uses: bench.measure_step_cost
        in: {{target: target, drafts: draft, prompts: prompts}}
        with: {{tokens_per_block: 16, num_threads: 1, seconds: 1, num_processes: 1}}
      depth: {{uses: speedup.choose_depth, in: {{acceptance: acceptance, cost: cost}}}}
"""
STEPS = """
  {name}:
    about: A night at tiny size.
    steps:
      traffic:
        uses: data.collect_traffic
        in: {{seen: "{prompts}"}}
        with:
          source: "{folder}/traffic"
          num_train: 16
          num_validation: 4
          num_test: 6
          min_new: 12
          evaluation_percent: 40
      now:
        uses: bench.measure_acceptance
        in: {{target: "{target}", draft: "{champion}", prompts: traffic}}
        with: {{max_new_tokens: 16}}
      then:
        uses: bench.measure_acceptance
        in: {{target: "{target}", draft: "{champion}", prompts: "{prompts}"}}
        with: {{max_new_tokens: 16}}
      drift: {{uses: speedup.measure_drift, in: {{then: then, now: now}}}}
      mix:
        uses: data.mix_prompts
        in: {{new: traffic, old: "{prompts}"}}
        with: {{old_share: 0.5, num_validation: 6, num_test: 6, num_warm_up: 2}}
      answers:
        uses: data.write_answers
        in: {{target: "{target}", prompts: mix}}
        with: {{max_new_tokens: 24, batch_size: 8, shard_size: 8}}
      features: {{uses: data.record_features, in: {{target: "{target}", answers: answers}}}}
      draft:
        uses: drafts.train_draft
        in: {{target: "{target}", features: features, start_from: "{champion}"}}
        with:
          method: mtp
          num_steps: 10
          peak_lr: 5.0e-4
          draft_vocab_size: 128
          settings: {{mtp: {{mtp_modules: 2}}}}
          eval_every: 2
"""
DECISION = """
      acceptance:
        uses: bench.measure_acceptance
        in: {{target: "{target}", draft: draft, prompts: mix}}
        with: {{max_new_tokens: 16}}
      champion_acceptance:
        uses: bench.measure_acceptance
        in: {{target: "{target}", draft: "{champion}", prompts: mix}}
        with: {{max_new_tokens: 16}}
      cost:
        uses: bench.measure_step_cost
        in: {{target: "{target}", drafts: [draft, "{champion}"], prompts: mix}}
        with: {{tokens_per_block: 16, num_threads: 1, seconds: 1, num_processes: 1}}
      depth:
        uses: speedup.choose_depth
        in: {{acceptance: [acceptance, champion_acceptance], cost: cost, champion: "{served}"}}
      end_to_end:
        uses: bench.compare_end_to_end
        in: {{target: "{target}", drafts: [draft, "{champion}"], prompts: mix, policy: depth}}
        with: {{max_new_tokens: 16, num_prompts: 6, seconds: 4, num_processes: 2, num_threads: 1}}
      verdict:
        uses: speedup.confirm_depth
        in: {{policy: depth, end_to_end: end_to_end, challenger: draft, champion: "{champion}"}}
      release:
        uses: publish.export_release
        in: {{target: "{target}", drafts: [draft], policy: verdict, acceptance: [acceptance], end_to_end: end_to_end}}
      report:
        uses: report.write_page
        in:
          policy: verdict
          acceptance: [acceptance, champion_acceptance]
          cost: cost
          end_to_end: end_to_end
          release: release
          drift: drift
"""
WORDS = ("read", "write", "queue", "path", "item", "value", "sorted", "list", "open", "line", "name", "size", "folder")


def write_first(folder: Path) -> Path:
    """A tiny target, the prompts of a first drafter and its pipelines.yaml; returns the file."""
    model = make_tiny_target("llama", folder / "model")
    write_chats(folder / "first.jsonl", 60, seed=0)
    (folder / "traffic").mkdir()
    file = folder / "pipelines.yaml"
    file.write_text(FIRST.format(model=model, folder=folder), encoding="utf-8")
    return file


def add_night(file: Path, name: str, keys: dict[str, str], *, decide: bool) -> None:
    """Add a night over `folder/traffic` that goes on from the artifacts of `keys` (target, prompts, champion)."""
    named = {kind: f"store:{key}" for kind, key in keys.items()}
    text = (STEPS + (DECISION if decide else "")).format(name=name, folder=file.parent, **named)
    file.write_text(file.read_text(encoding="utf-8") + text, encoding="utf-8")


def write_chats(file: Path, count: int, *, seed: int, strange: bool = False) -> None:
    """Chats of a few words of code; strange: of digits and signs instead, which a drafter has never seen."""
    source = random.Random(seed)
    with file.open("w", encoding="utf-8") as out:
        for number in range(count):
            words = (
                [source.choice(WORDS) for _ in range(6)] if not strange else [str(source.random()) for _ in range(4)]
            )
            text = f"{' '.join(words)} {seed}-{number}"
            out.write(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n")
