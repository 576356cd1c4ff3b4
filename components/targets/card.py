"""Writes the model card of a target trained here, from its measured facts."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

_LICENCES = {"PSF-2.0": "Python Software Foundation License 2 (https://docs.python.org/3/license.html)"}


class _CardTexts(NamedTuple):
    """The fixed texts of a card for one kind of corpus. prompt: has {} for the number of tokens."""

    title: str
    opening: str
    prompt: str
    limits: str


_CODE = _CardTexts(
    "Draftsmith's built-in target",
    """A small Llama that continues Python code. It is the large model of every example, test and quickstart that must
run on a laptop without a download; it is not a useful assistant. It was trained from random weights by the pipeline
`build-builtin-target`.""",
    "{} tokens that ends a `def` line of a held-out library file",
    """It writes plausible Python, not correct Python. It has seen nothing but the standard library: no other language,
hardly any prose, no chats, no instructions. End-of-text stands at the end of files only, so a continuation seldom ends
by itself. Greedy text repeats itself more than real code does. The test suite of a held-out module may be in the
training data (files are held out one by one). Do not read its acceptance lengths as those of a large model.""",
)
_CHATS = _CardTexts(
    "A small chat target",
    """A small Llama that answers in chats. It stands in for a large model where a pipeline must show something about
its data (a mix of languages, say) without a download; it is not a useful assistant. It was trained from random weights
by `targets.pretrain_target` on chats.""",
    "at most {} tokens that ends where an answer begins in a held-out chat",
    """It writes plausible sentences, not true ones: it has seen nothing but the chats named above. A turn ends with the
end-of-text token; roles have tokens of their own, and the chat template writes both. Its licence is that of its chats.
Do not read its acceptance lengths as those of a large model.""",
)


def training_machine(num_processes: int, device: str) -> dict[str, Any]:
    """Kind of machine and versions, for the card; nothing that names a particular machine."""
    return {
        "cpu": _cpu_model(),
        "device": device,
        "processes": num_processes,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }


def write_card(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write README.md. facts: the `info` of the Target made by `pretrain_target`."""
    (folder / "README.md").write_text(card_text(facts), encoding="utf-8")


def card_text(facts: Mapping[str, Any]) -> str:
    """The card as Markdown, from the Target's facts alone."""
    layers = facts["plan"]["shape"]["num_layers"]
    window, loops = facts["plan"]["shape"]["max_positions"], facts["loops"]
    texts = _CHATS if facts["corpus"].get("markup") else _CODE
    return f"""# {texts.title}

{texts.opening}

{_table(_model_rows(facts))}

Deep and narrow on purpose: a drafter of one layer then costs about 1/{layers} of the target's layers, as it does for a
large model.

## Training

{_table(_training_rows(facts))}

## Quality

{_table(_quality_rows(facts))}

Held-out loss: windows of {window} tokens, weights as stored. Distinct bigrams / all bigrams of a text, averaged over
{loops["num_measured"]} continuations of {loops["continuation_tokens"]} tokens, each after a prompt of
{texts.prompt.format(loops["prompt_tokens"])}. A continuation ends before the first
end-of-text token ({loops["num_too_short"]} were too short to count).

## Limits

{texts.limits}
"""


def _model_rows(facts: Mapping[str, Any]) -> dict[str, str]:
    shape = facts["plan"]["shape"]
    return {
        "architecture": f"{facts['architecture']}, {shape['num_layers']} layers, width {shape['hidden_size']}, "
        f"feed-forward {shape['intermediate_size']}, tied embeddings",
        "attention": f"{shape['num_heads']} query heads, {shape['num_kv_heads']} key-value heads",
        "key-value cache": f"{_kv_numbers(shape):,} numbers a token ({4 * _kv_numbers(shape):,} bytes in float32)",
        "parameters": f"{facts['num_params']:,} ({facts['weight_bytes'] / 1e6:.1f} MB, {facts['stored_dtype']})",
        "tokenizer": f"byte-level BPE, {shape['vocab_size']} tokens, {facts['characters_per_token']:.2f} characters a "
        "token on held-out text; adds no special tokens by itself",
        "longest text": f"{shape['max_positions']} tokens",
    }


def _kv_numbers(shape: Mapping[str, Any]) -> int:
    """2 n h_kv d: keys and values of every layer, as shape.kv_bytes_per_token counts them."""
    head_dim = shape["hidden_size"] // shape["num_heads"]
    return int(2 * shape["num_layers"] * shape["num_kv_heads"] * head_dim)


def _training_rows(facts: Mapping[str, Any]) -> dict[str, str]:
    corpus, machine, plan = facts["corpus"], facts["trained_on"], facts["plan"]
    against_loops = []
    if plan["repetition_weight"]:
        against_loops.append(f"pseudo-repetition (weight {plan['repetition_weight']:g}) at every step")
    if plan["unlikelihood_weight"]:
        every = plan["unlikelihood_every"]
        against_loops.append(
            f"sequence-level unlikelihood (weight {plan['unlikelihood_weight']:g}) at one step in {every}"
        )
    licence = str(corpus.get("licence", "unknown"))
    if corpus.get("markup"):
        languages = ", ".join(f"{name} {count:,}" for name, count in corpus["languages"]["train"].items())
        source, hashed, unit = f"chats by language: {languages}", "question", "chats"
    else:
        source = f"{corpus.get('source', 'given')}, Python {corpus.get('python_version', '?')}"
        hashed, unit = "path", "files"
    return {
        "corpus": f"{source}: {corpus.get('train_documents', 0):,} {unit}, {facts['corpus_tokens']:,} tokens an epoch",
        "licence of the corpus": _LICENCES.get(licence, licence),
        "held out": f"{corpus.get('held_out_documents', 0):,} {unit} ({corpus.get('held_out_percent', '?')} % by a "
        f"hash of the {hashed}), never trained on",
        "tokens seen": f"{facts['tokens_seen']:,}: {facts['epochs']:.1f} epochs ({_repeats(facts['group_repeats'])}), "
        f"in the decay {facts['decay_epochs']:.1f} ({_repeats(plan['decay_group_repeats'])})",
        "optimiser": "Muon (matrices), AdamW (embeddings, gains); warm-up, stable, linear decay over the last "
        f"{plan['decay_steps']:,} of {plan['num_steps']:,} steps of {plan['tokens_per_step']:,} tokens",
        "against loops, in the decay": "; ".join(against_loops) or "nothing",
        "sequence length": f"{plan['sequence_length']}, in the decay {plan['decay_sequence_length']} tokens",
        "time": f"{facts['training_seconds'] / 60:.0f} minutes, processes: {machine['processes']}, {plan['dtype']}",
        "machine": f"{machine['cpu']}, {machine['device']}",
        "versions": f"Python {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}, "
        f"tokenizers {machine['tokenizers']}",
    }


def _repeats(group_repeats: Mapping[str, int]) -> str:
    named = ", ".join(f"{group} x {times}" for group, times in group_repeats.items())
    return f"of which {named}" if named else "everything once"


def _quality_rows(facts: Mapping[str, Any]) -> dict[str, str]:
    whose = "chats" if facts["corpus"].get("markup") else "files"
    return {
        **{f"held-out loss, {group}": f"{loss:.3f} nats/token" for group, loss in facts["held_out_loss"].items()},
        "distinct bigrams, greedy continuations": f"{facts['loops']['greedy']:.3f}",
        f"distinct bigrams, the {whose}' own continuations": f"{facts['loops']['real']:.3f}",
    }


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
