"""From a Target to a model that decodes: picks our own forward pass where it applies, transformers elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from components.contract import Target, UserError
from components.targets.fast import FastTarget
from components.targets.fast_families import is_supported
from components.targets.inspect_files import facts_of, one_line, read_config, resolve_dtype
from components.targets.model import AbstractTarget
from components.targets.shape import shape_of
from components.targets.source import open_record
from components.targets.transformers_model import TransformersTarget
from components.tensor_headers import read_header


def open_target(
    target: Target | Path,
    *,
    device: str = "cpu",
    dtype: Literal["float32", "bfloat16", "auto"] = "auto",
    kernel: str = "auto",
    tapped: bool = True,
) -> AbstractTarget:
    """Load a target's weights.

    target: a Target artifact, its directory, or any folder in Hugging Face format.
    dtype: "auto" is what `load_target` settled on (for a plain folder: float32 on a CPU, as stored on a GPU).
    kernel: "plain" and "prepacked" fix the linear kernel; "auto" times both on this machine, so that the last bits of
        float32 may differ from one process to the next: steps whose files must repeat bit for bit say "plain";
        "thorough" times longer. What an opened target says in its own `kernel` opens another with the same kernels.
        "transformers" runs the model's own code. What our forward pass does not cover runs there whatever is asked.
    tapped: False for a model that is no target itself (a draft model): one of few layers has no three feature taps.
    Raises UserError when files are missing, damaged or changed since the artifact was made.
    """
    folder, record = open_record(target if isinstance(target, Path) else target.path)
    where, trust = str(record["model"]), bool(record["trust_remote_code"])
    config = read_config(folder, where=where, trust_remote_code=trust)
    shape = shape_of(config, where, tapped=tapped)
    files = _tensor_files(folder, where)
    chosen = record["dtype"] if dtype == "auto" and record["dtype"] else resolve_dtype(dtype, files["dtype"], device)
    torch_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[chosen]
    by_name: dict[str, Path] = files["by_name"]
    if kernel != "transformers" and is_supported(config, set(by_name)):
        read = _Reader(by_name)
        fast = FastTarget(
            config,
            shape,
            read,
            device=torch.device(device),
            dtype=torch_dtype,
            kernel=kernel,
            has_lm_head="lm_head.weight" in by_name and not config.tie_word_embeddings,
        )
        fast.folder = folder
        return fast
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch_dtype, trust_remote_code=trust, use_safetensors=True, local_files_only=True
        )
    except Exception as error:  # a stranger's files break each architecture in its own way
        raise UserError(f"{where}: transformers cannot load it ({one_line(error)})") from error
    opened = TransformersTarget(model.to(device).eval().requires_grad_(False), shape, where=where)
    opened.folder = folder
    return opened


def target_facts(target: Target) -> dict[str, Any]:
    """num_params and shape (the fields of TargetShape) of any Target, whichever step made it, without its weights."""
    facts = target.info
    if "shape" not in facts or "num_params" not in facts:
        folder, record = open_record(target.path)
        trust = bool(record["trust_remote_code"])
        facts = facts_of(folder, where=str(record["model"]), trust_remote_code=trust, dtype="auto", device="cpu")
    return {"num_params": int(facts["num_params"]), "shape": dict(facts["shape"])}


def open_tokenizer(target: Target | Path) -> Any:
    """The target's tokenizer (transformers' AutoTokenizer); raises UserError in one line."""
    from transformers import AutoTokenizer

    folder, record = open_record(target if isinstance(target, Path) else target.path)
    try:
        return AutoTokenizer.from_pretrained(
            folder, trust_remote_code=bool(record["trust_remote_code"]), local_files_only=True
        )
    except Exception as error:  # a stranger's files break each kind of tokenizer in its own way
        raise UserError(f"{record['model']}: its tokenizer cannot be loaded ({one_line(error)})") from error


def _tensor_files(folder: Path, where: str) -> dict[str, Any]:
    by_name: dict[str, Path] = {}
    dtypes: list[str] = []
    for file in sorted(folder.glob("*.safetensors")):
        for name, entry in read_header(file, f"{where}/{file.name}").items():
            by_name[name] = file
            dtypes.append(entry["dtype"])
    return {"by_name": by_name, "dtype": max(set(dtypes), key=dtypes.count)}


class _Reader:
    """Reads one tensor by name; KeyError where the checkpoint has none. Keeps the file it read from last open."""

    def __init__(self, by_name: dict[str, Path]) -> None:
        self._by_name = by_name
        self._open: tuple[Path, Any] | None = None

    def __call__(self, name: str) -> Tensor:
        file = self._by_name[name]
        if self._open is None or self._open[0] != file:
            self._open = (file, safe_open(file, framework="pt"))
        tensor: Tensor = self._open[1].get_tensor(name)
        return tensor
