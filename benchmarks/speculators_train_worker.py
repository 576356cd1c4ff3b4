"""The other project: speculators' own trainer makes an EAGLE-3 drafter, inside its own environment, on a CPU.

Imports nothing of Draftsmith. DATA/hidden_states/hs_N.safetensors hold what its vLLM connector writes (token_ids [T],
hidden_states [T, 4, H]: three taps and the last layer's output) and `loss_mask` [T] beside; the dataset and the token
frequencies are written by its own libraries. Its trainer knows accelerators alone: it is told that
its device is the CPU, and that there is nothing to wait for.

    python speculators_train_worker.py DATA [flags of speculators train]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import load_file
from speculators.train import trainer
from speculators.train.cli import main as train
from speculators.train.config import TrainConfig
from speculators.train.vocab_mapping import save_token_frequency_distribution


def write_dataset(folder: Path) -> None:
    """Write the dataset that belongs to the hidden states, in their order, and how often each token is answered."""
    rows = []
    for number in range(len(list((folder / "hidden_states").glob("hs_*.safetensors")))):
        found = load_file(folder / "hidden_states" / f"hs_{number}.safetensors")
        ids = found["token_ids"].tolist()
        rows.append({"input_ids": ids, "loss_mask": found["loss_mask"].long().tolist(), "seq_len": len(ids)})
    dataset = Dataset.from_list(rows)
    dataset.set_format(type="torch")
    dataset.save_to_disk(folder)
    save_token_frequency_distribution(dataset, folder / "token_freq.pt")


def main() -> None:
    """Prepare, train, save."""
    folder, flags = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)  # a second one waits at barriers, which beside other work costs more than it saves
    write_dataset(folder)
    trainer.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda *device: None
    train(TrainConfig.resolve(["--data-path", str(folder), *flags]))
    print(json.dumps({"trained": True}))


if __name__ == "__main__":
    main()
