"""From a Target to a model that decodes: picks our own forward pass where it applies, transformers elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from components.contract import Target, UserError
from components.targets.fast import FastTarget
from components.targets.fast_families import check_shapes, is_supported
from components.targets.inspect_files import facts_of, one_line, read_config, resolve_dtype
from components.targets.model import AbstractTarget, TargetShape
from components.targets.shape import shape_of
from components.targets.source import open_record
from components.targets.transformers_model import TransformersTarget
from components.tensor_headers import headers_in

_LAYER: Final = re.compile(r"\.layers\.(\d{1,9})\.")
_TRIED: Final = "def add(a, b):\n    return a + b  # Grüße, 你好 1234\n"


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
        check_shapes(shape, files["shapes"], where)
        fast = FastTarget(
            config,
            shape,
            _Reader(by_name, torch_dtype, where),
            device=torch.device(device),
            dtype=torch_dtype,
            kernel=kernel,
            has_lm_head="lm_head.weight" in by_name and not config.tie_word_embeddings,
        )
        _check_rotations(fast, where)
        fast.folder = folder
        return fast
    _check_layers(shape, by_name, where)
    if not getattr(config, "quantization_config", None):
        _check_types(files["dtypes"], where)
    model = _transformers_model(folder, torch_dtype, trust, where)
    opened = TransformersTarget(model.to(device).eval().requires_grad_(False), shape, where=where)
    opened.folder = folder
    return opened


def _check_rotations(fast: FastTarget, where: str) -> None:
    """A UserError where the rotary settings give no numbers: they are a stranger's, and transformers works them out."""
    try:
        finite = bool(torch.isfinite(torch.view_as_real(fast.rotations(2))).all())
    except Exception as error:  # a value of another type breaks each kind of rotation in its own way
        raise UserError(f"{where}: config.json's rotary settings cannot be used ({one_line(error)})") from error
    if not finite:
        raise UserError(f"{where}: config.json's rotary settings give NaN or infinity")


def _check_layers(shape: TargetShape, names: Iterable[str], where: str) -> None:
    """A UserError where config.json tells of more layers than the files hold, before anything is made of them."""
    numbers = [int(found[1]) for name in names if (found := _LAYER.search(name))]
    if numbers and max(numbers) + 1 < shape.num_layers:
        said = f"config.json says {shape.num_layers} layers, and its weight files hold {max(numbers) + 1}"
        raise UserError(f"{where}: {said}; download it again")


def _check_types(dtypes: Mapping[str, str], where: str) -> None:
    """A UserError where a weight is stored as whole or complex numbers, which transformers would take as they are."""
    for name, dtype in dtypes.items():
        if name.endswith(".weight") and not dtype.startswith(("F", "BF")):
            raise UserError(f"{where}: {name} is of {dtype}, which no weight is; download it again")


def _transformers_model(folder: Path, dtype: torch.dtype, trust: bool, where: str) -> Any:
    """What transformers makes of the folder; a UserError where a weight is missing, which it would draw at random."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    told = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # what it would report at length is said below, in one line
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=trust,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # a stranger's files break each architecture in its own way
        raise UserError(f"{where}: transformers cannot load it ({one_line(error)})") from error
    finally:
        logging.set_verbosity(told)
    if missing := sorted(loaded["missing_keys"]):
        raise UserError(
            f"{where}: its weight files lack {len(missing)} of the tensors that config.json asks for, first"
            f" {missing[0]}; download it again"
        )
    for name, tensor in model.state_dict().items():
        check_finite(tensor, f"{where}: {name}")
    return model


def check_finite(tensor: Tensor, name: str) -> None:
    """A UserError where a weight holds NaN or infinity: every token would come out as the first of the vocabulary."""
    # one pass without a mask; a sum that overflows is looked at again
    odd = (
        tensor.is_floating_point() and tensor.itemsize > 1 and not bool(torch.isfinite(tensor.sum(dtype=torch.float32)))
    )
    if odd and not bool(torch.isfinite(tensor).all()):
        raise UserError(
            f"{name} holds NaN or infinity in {str(tensor.dtype).removeprefix('torch.')}; download it again"
        )


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
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=bool(record["trust_remote_code"]), local_files_only=True
        )
        tokenizer(_TRIED, verbose=False)  # some settings are looked at only when a text comes
    except BaseException as error:  # a stranger's files break each kind of tokenizer in its own way
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of the tokenizers library
            raise
        raise UserError(f"{record['model']}: its tokenizer cannot be loaded ({one_line(error)})") from error
    return tokenizer


def _tensor_files(folder: Path, where: str) -> dict[str, Any]:
    by_name: dict[str, Path] = {}
    shapes: dict[str, list[int]] = {}
    dtypes: dict[str, str] = {}
    for file, header in headers_in(folder, where):
        for name, entry in header.items():
            by_name[name] = file
            shapes[name] = entry["shape"]
            dtypes[name] = entry["dtype"]
    if not dtypes:
        raise UserError(f"{where}: its weight files hold no tensors; download it again")
    every = list(dtypes.values())
    return {"by_name": by_name, "shapes": shapes, "dtypes": dtypes, "dtype": max(set(every), key=every.count)}


class _Reader:
    """Reads one tensor by name, in `dtype`; KeyError where there is none. Keeps the file it read from last open."""

    def __init__(self, by_name: dict[str, Path], dtype: torch.dtype, where: str) -> None:
        self._by_name, self._dtype, self._where = by_name, dtype, where
        self._open: tuple[Path, Any] | None = None

    def __call__(self, name: str) -> Tensor:
        file = self._by_name[name]
        at = f"{self._where}/{file.name}"
        try:
            if self._open is None or self._open[0] != file:
                self._open = (file, safe_open(file, framework="pt"))
            stored: Tensor = self._open[1].get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"{at}: {name} cannot be read ({one_line(error)}); download it again") from error
        if not stored.is_floating_point():
            raise UserError(f"{at}: {name} is of {str(stored.dtype).removeprefix('torch.')}, which no weight is")
        tensor = stored.to(self._dtype)
        check_finite(tensor, f"{at}: {name}")
        return tensor
