"""The tables of the documentation about training: speed and memory beside speculators, processes, batches."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import METHOD_NAMES, markdown, record, records


def training_speed() -> tuple[str, str]:
    """A training step beside that of speculators; every row of the newest record that has it."""
    found, results = record("training-speed", timed=False), {}
    for one in records("training-speed"):
        results.update({name: (result, one["measured_at"][:10]) for name, result in one["results"].items()})
    rows = [
        (
            METHOD_NAMES[name.split()[0]] if " " in name else "EAGLE-3",
            str(result["shape"]["hidden_size"]),
            f"{ours['times_as_fast']:.1f}",
            f"{ours['memory_ratio']:.2f}",
            measured_on,
        )
        for name, (result, measured_on) in results.items()
        for ours in [result.get("ours, LM head frozen") or result["ours"]]
    ]
    return (
        f"A training step beside that of speculators {found['speculators']}; the LM head is frozen on both sides. "
        "Width 192 is the built-in target's shape.",
        markdown(("method", "width", "times as fast", "share of its memory", "measured"), rows),
    )


def training_memory() -> tuple[str, str]:
    """What a training step of an 8B target's drafter holds at its peak; every case of the newest record that has it."""
    found, cases = record("training-memory-8b", timed=False), dict[tuple[str, int], dict[str, Any]]()
    for one in records("training-memory-8b"):
        cases.update({(result["side"], result["tokens"]): result for result in one["results"]})
    names = {"ours": "ours", "recompute": "ours, `recompute: true`", "theirs": f"speculators {found['speculators']}"}
    rows = []
    shown = [result for result in cases.values() if result["side"] in names]
    for result in sorted(shown, key=lambda each: (each["tokens"], list(names).index(each["side"]))):
        failed = "more than there was: it failed" if "failed" in result else ""
        ratio = f"{result['estimate_over_peak']:.2f}" if "estimate_over_peak" in result else ""
        peak = failed or f"{result['peak_bytes'] / 1e9:.1f} GB"
        rows.append((f"{result['tokens']:,}", names[result["side"]], peak, ratio))
    return (
        "The peak of one optimiser step of EAGLE-3 in the shape of Llama-3.1-8B (width 4,096, 32 heads, draft "
        f"vocabulary {found['shape']['draft_vocab_size']:,}, {found['shape']['ttt_steps']} steps), bf16 arithmetic on "
        "float32 weights, AdamW, all on the CPU: resident memory, and how our estimate made beforehand compares.",
        markdown(("tokens", "whose step", "peak", "estimate over peak"), rows),
    )


def dflash_parity() -> tuple[str, str]:
    """DFlash and DSpark held against speculators."""
    found = record("dflash-parity", timed=False)
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for name, case in found["cases"].items():
        method, width = name.split("-")[:2]
        kinds.setdefault((METHOD_NAMES[method], width), []).append(case)
    rows = [
        (
            *kind,
            *(f"{max(case[part] for case in cases):.0e}" for part in ("logits", "loss_difference", "gradients")),
            "{} and {} of {}".format(
                *(sum(case[part] for case in cases) for part in ("accepted", "accepted_theirs", "drafted"))
            ),
        )
        for kind, cases in kinds.items()
    ]
    return (
        f"DFlash and DSpark beside speculators {found['speculators']}, on the same random weights and the same "
        f"{found['num_tokens']} tokens, drafting from the anchor and not: largest differences of logits, of the loss, "
        "and of gradients relative to the largest of a tensor. Then both draft at every position, with weights after "
        "some steps: draft tokens that the target keeps, by our decoding and by their code.",
        markdown(("method", "block", "logits", "loss", "gradients", "kept, ours and theirs"), rows),
    )


def packing() -> tuple[str, str]:
    """Ways of filling a batch."""
    found = record("packing")["results"]
    ways = ("none", "bucket", "pack")
    rows = [(method, *(f"{found[method][way]['times_as_fast_as_none']:.2f}" for way in ways)) for method in found]
    return "Training speed by `packing`, times that of `none`.", markdown(("method", *ways), rows)


def training_processes() -> tuple[str, str]:
    """Two training processes beside one, and what a death costs."""
    timed, died = record("training-processes", timed=False), record("training-deaths", timed=False)
    deaths = died["deaths"]
    return (
        f"EAGLE-3 in the built-in target's shape, batches of {timed['settings']['batch_tokens']} tokens, float32: two "
        "processes with a thread each beside one, in turns. Then one of the two is killed at a random moment.",
        markdown(
            ("what", "number"),
            [
                ("times as fast", f"{timed['times_as_fast']:.2f}"),
                ("largest relative difference of a loss", f"{timed['largest_relative_difference_of_losses']:.0e}"),
                (
                    "runs that a death did not change by a bit",
                    f"{sum(d['same_bits'] for d in deaths)} of {len(deaths)}",
                ),
            ],
        ),
    )
