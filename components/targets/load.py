"""Opens a Target as a model that decodes: with our own forward pass where it applies, else with transformers."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from components.contract import Target, UserError
from components.machine import free_ram
from components.targets.config import facts_of, has_text_part, read_config, resolve_dtype, suppressed_tokens
from components.targets.forward.architecture import check_shapes, ends_of, is_supported
from components.targets.forward.llama import FastTarget
from components.targets.forward.transformers_model import TransformersTarget, is_plain
from components.targets.interface import AbstractTarget
from components.targets.quantised import check_all_read, check_loader, check_scales, own_dtype, quantisation_of
from components.targets.shape import TargetShape, check_tap_layers, shape_of
from components.targets.source import open_record
from components.targets.spread import Spread, check_all_on_gpus, own_part
from components.tensor_files import headers_in
from components.text import message_of

_LAYER: Final = re.compile(r"\.layers\.(\d{1,9})\.")
CHECKED_AT_ONCE: Final = 1 << 22
"""Numbers of a tensor that are checked at once."""
_TRIAL_TEXT: Final = "def add(a, b):\n    return a + b  # Grüße, 你好 1234\n"


def open_target(
    target: Target | Path,
    *,
    device: str = "cpu",
    dtype: Literal["float32", "bfloat16", "auto"] = "auto",
    kernel: str = "auto",
    tapped: bool = True,
    tap_layers: Sequence[int] | None = None,
    layers: bool = True,
) -> AbstractTarget:
    """Load a target's weights.

    target: a Target artifact, its directory, or any folder in Hugging Face format.
    dtype: "auto" is the dtype that `load_target` recorded (for a plain folder: float32 on a CPU, as stored on CUDA).
    kernel: "plain" and "prepacked" fix the linear kernel. "auto" times them on this machine, so the last bits of
        float32 may differ between processes: steps whose files must repeat bit for bit use "steady", which is "plain"
        or, where PyTorch's own product in bfloat16 is slow, "streamed". "thorough" times longer. The `kernel` string
        of an opened target opens another one with the same kernels. "transformers" runs the model's own code; models
        that our forward pass does not cover always run there.
    tapped: False for a model that is not itself a target: a draft model may have too few layers for feature taps, and
        says every token of its vocabulary, as it does in engines.
    tap_layers: the layers whose states are the features, as HF hidden_states indices; None: those of shape.taps_of.
    layers: False reads nothing but embedding, final norm and LM head, mapped from their files where the dtype is the
        stored one: enough to train a drafter from features, and it runs no passes. A target that `is_read_whole`
        is read whole.
    A target that `load_target` spreads over GPUs (spread.py) runs the model's own code, but for those three tensors.
    Raises UserError when files are missing, damaged or changed since the artifact was made.
    """
    folder, record = open_record(target if isinstance(target, Path) else target.path)
    location, trust = str(record["model"]), bool(record["trust_remote_code"])
    config = read_config(folder, location=location, trust_remote_code=trust)
    check_loader(config, location)
    shape = shape_of(config, location, tapped=tapped)
    taps = shape.tap_layers if tap_layers is None else check_tap_layers(tap_layers, shape.num_layers, location)
    silent = _suppressed(folder, shape, location, device) if tapped else None
    files = _tensor_files(folder, location)
    dtype_name = record["dtype"] if dtype == "auto" and record["dtype"] else resolve_dtype(dtype, files.dtype, device)
    torch_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[own_dtype(config) or dtype_name]
    quantised = bool(quantisation := quantisation_of(config))
    check_scales(files.dtypes, quantisation, location)
    spread = Spread.of_record(record)
    is_spread = spread.by_layers(device) or spread.tp_size > 1
    if kernel != "transformers" and not (is_spread and layers) and _has_own_pass(config, shape, files, layers):
        check_shapes(config, shape, files.shapes, location)
        if layers and device == "cpu":
            _check_room(files, torch_dtype, location)
        reader = _Reader(files.by_name, torch_dtype, location, is_mapped=not layers or device != "cpu")
        fast = FastTarget(
            config,
            shape,
            reader,
            device=torch.device(device),
            dtype=torch_dtype,
            kernel=kernel,
            has_lm_head="lm_head.weight" in files.by_name and not config.tie_word_embeddings,
            layers=layers,
            read_rows=reader.table if layers and device == "cpu" else None,
        )
        if layers:
            _check_rotations(fast, location)
        fast.folder, fast.tap_layers, fast.suppressed = folder, taps, silent
        return fast
    _check_layers(shape, files.by_name, location)
    if not quantised:
        _check_types(files.dtypes, location)
    spread.check_processes(location)
    placed: Any = {"": device} if quantised and device != "cpu" else None  # some loaders cannot be moved afterwards
    if is_spread:
        placed = spread.placement()
    model = transformers_model(folder, config, torch_dtype, trust, location, placed)
    model = model if placed else model.to(device)
    wrapped = TransformersTarget(model.eval().requires_grad_(False), shape, location=location)
    wrapped.folder, wrapped.tap_layers = folder, taps
    wrapped.suppressed = None if silent is None else silent.to(wrapped.device)
    return wrapped


def _suppressed(folder: Path, shape: TargetShape, location: str, device: str) -> Tensor | None:
    ids = suppressed_tokens(folder, shape, location)
    return torch.tensor(ids, device=device) if ids else None


def is_read_whole(target: Target | Path) -> bool:
    """Whether a target is read whole even without `layers`: where its ends are not known to be Llama's."""
    folder, record = open_record(target if isinstance(target, Path) else target.path)
    location = str(record["model"])
    config = read_config(folder, location=location, trust_remote_code=bool(record["trust_remote_code"]))
    shape = shape_of(config, location, tapped=False)
    return not _has_own_pass(config, shape, _tensor_files(folder, location), layers=False)


def _has_own_pass(config: Any, shape: TargetShape, files: _TensorFiles, layers: bool) -> bool:
    """Whether our own forward pass covers it; without layers: what stands before them and behind."""
    names = set(files.by_name)
    if quantisation_of(config):
        return False
    return is_supported(config, shape, names) or (not layers and ends_of(config, names) is not None)


def _check_room(files: _TensorFiles, dtype: torch.dtype, location: str) -> None:
    """Raises UserError where the weights alone need more memory than is free."""
    needed, free = sum(map(math.prod, files.shapes.values())) * dtype.itemsize, free_ram()
    if needed > free:
        smaller = "open it with dtype: bfloat16, or " if dtype == torch.float32 else ""
        raise UserError(
            f"{location}: its weights take {needed / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')}, and"
            f" {free / 1e9:.1f} GB of memory are free: {smaller}take a machine with more, or end what holds it"
        )


def _check_rotations(fast: FastTarget, location: str) -> None:
    """Raises UserError where transformers cannot compute finite rotations from the rotary settings."""
    try:
        finite = all(bool(torch.isfinite(torch.view_as_real(table)).all()) for table in fast.rotations(2))
    except Exception as error:  # a value of another type breaks each kind of rotation in its own way
        raise UserError(f"{location}: config.json's rotary settings cannot be used ({message_of(error)})") from error
    if not finite:
        raise UserError(f"{location}: config.json's rotary settings give NaN or infinity")


def _check_layers(shape: TargetShape, names: Iterable[str], location: str) -> None:
    """Raises UserError where config.json states more layers than the weight files hold."""
    numbers = [int(match[1]) for name in names if (match := _LAYER.search(name))]
    if numbers and max(numbers) + 1 < shape.num_layers:
        message = f"config.json says {shape.num_layers} layers, and its weight files hold {max(numbers) + 1}"
        raise UserError(f"{location}: {message}; download it again")


def _check_types(dtypes: Mapping[str, str], location: str) -> None:
    """Raises UserError where a weight is stored as integers or complex numbers, which transformers would accept."""
    for name, dtype in dtypes.items():
        if name.endswith(".weight") and not dtype.startswith(("F", "BF")):
            raise UserError(f"{location}: {name} is of {dtype}, which no weight is; download it again")


def transformers_model(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    trust: bool,
    location: str,
    placed: dict[str, str] | str | DistributedConfig | None = None,
) -> Any:
    """The model as transformers loads it, onto device_map `placed` or divided among processes.

    Raises UserError for a missing weight, which it would initialise, and for scales that it does not read.
    """
    kind = AutoModelForImageTextToText if has_text_part(config) else AutoModelForCausalLM
    where = {"distributed_config" if isinstance(placed, DistributedConfig) else "device_map": placed}
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # the errors below say it in one line
    try:
        model, loaded = kind.from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=trust,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **where,
        )
    except Exception as error:  # foreign files break each architecture in its own way
        raise UserError(f"{location}: transformers cannot load it ({message_of(error)})") from error
    finally:
        logging.set_verbosity(verbosity)
    if quantisation_of(config) and not getattr(model, "is_quantized", False):
        for weight in model.parameters():  # not the buffers: rotations stay in float32
            weight.data = weight.data.to(dtype)  # a loader that dequantises leaves bfloat16
    if missing := sorted(loaded["missing_keys"]):
        raise UserError(
            f"{location}: its weight files lack {len(missing)} of the tensors that config.json asks for, first"
            f" {missing[0]}; download it again"
        )
    check_all_read(loaded["unexpected_keys"], location)
    check_all_on_gpus(model, location)
    for name, tensor in model.state_dict().items():
        check_finite(own_part(tensor), f"{location}: {name}")
    return model


def check_finite(tensor: Tensor, name: str) -> None:
    """Raises UserError for a weight with NaN or infinity: greedy decoding would always give the first token."""
    if not is_plain(tensor) or not tensor.is_floating_point() or tensor.itemsize == 1:
        return
    # The sum needs no mask; only where it is not finite (it may have overflowed) each number is checked. A part at a
    # time, since it makes float32 of what it adds.
    rows = max(1, CHECKED_AT_ONCE * len(tensor) // tensor.numel()) if tensor.dim() and tensor.numel() else 1
    parts = tensor.split(rows) if tensor.dim() else (tensor,)
    if any(
        not bool(torch.isfinite(part.sum(dtype=torch.float32))) and not bool(torch.isfinite(part).all())
        for part in parts
    ):
        raise UserError(
            f"{name} holds NaN or infinity in {str(tensor.dtype).removeprefix('torch.')}; download it again"
        )


def target_facts(target: Target) -> dict[str, Any]:
    """num_params, suppressed_tokens and shape (of TargetShape) of any Target, read without loading its weights."""
    facts = target.info
    if any(name not in facts for name in ("num_params", "suppressed_tokens", "shape")):
        folder, record = open_record(target.path)
        trust = bool(record["trust_remote_code"])
        facts = facts_of(folder, location=str(record["model"]), trust_remote_code=trust, dtype="auto", device="cpu")
    return {
        "num_params": int(facts["num_params"]),
        "suppressed_tokens": list(facts["suppressed_tokens"]),
        "shape": dict(facts["shape"]),
    }


def open_tokenizer(target: Target | Path) -> Any:
    """The target's tokenizer (transformers' AutoTokenizer); raises UserError in one line."""
    folder, record = open_record(target if isinstance(target, Path) else target.path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=bool(record["trust_remote_code"]), local_files_only=True
        )
        tokenizer(_TRIAL_TEXT, verbose=False)  # some settings fail only when a text is encoded
    except BaseException as error:  # foreign files break each kind of tokenizer in its own way
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of the tokenizers library
            raise
        raise UserError(f"{record['model']}: its tokenizer cannot be loaded ({message_of(error)})") from error
    return tokenizer


class _TensorFiles(NamedTuple):
    """Per tensor: its file, shape and stored dtype, e.g. "BF16"; `dtype` is the most frequent one."""

    by_name: dict[str, Path]
    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    dtype: str


def _tensor_files(folder: Path, location: str) -> _TensorFiles:
    by_name: dict[str, Path] = {}
    shapes: dict[str, list[int]] = {}
    dtypes: dict[str, str] = {}
    for file, header in headers_in(folder, location):
        for name, entry in header.items():
            by_name[name] = file
            shapes[name] = entry["shape"]
            dtypes[name] = entry["dtype"]
    if not dtypes:
        raise UserError(f"{location}: its weight files hold no tensors; download it again")
    every = list(dtypes.values())
    return _TensorFiles(by_name, shapes, dtypes, max(set(every), key=every.count))


MAPPED: Final = 64 << 20
"""Bytes that are read before a file is opened anew: what was read of it stays in memory for as long as it is open."""
LARGE_TABLE: Final = 32 << 20
"""Bytes of a stored table from which it is left in its file."""


class _Reader:
    """Reads one tensor by name, in `dtype`; KeyError where there is none. Keeps the file it read from last open.

    is_mapped: tensors stored in `dtype` stay in their file, of which as much is in memory as is used. Else they are
    copied: what is made of them would be in memory beside them, since a part of a mapped file holds the whole.
    """

    def __init__(self, by_name: dict[str, Path], dtype: torch.dtype, location: str, *, is_mapped: bool) -> None:
        self._by_name, self._dtype, self._location, self._is_mapped = by_name, dtype, location, is_mapped
        self._open: tuple[Path, Any] | None = None
        self._read = 0
        self._checked: set[str] = set()

    def __call__(self, name: str) -> Tensor:
        stored, at = self._stored(name)
        tensor = stored.to(self._dtype, copy=not self._is_mapped)
        check_finite(tensor, at)
        self._checked.add(name)
        return tensor

    def table(self, name: str) -> Tensor | None:
        """A large tensor as it is stored, in its file: in memory is what is read of it. None for a small one."""
        stored, at = self._stored(name)
        if stored.nbytes < LARGE_TABLE:
            return None
        if name not in self._checked:
            check_finite(stored, at)
        self._open = None  # what was read of it, too
        return self._stored(name)[0]

    def _stored(self, name: str) -> tuple[Tensor, str]:
        """The tensor in its file, and its name in errors."""
        file = self._by_name[name]
        at = f"{self._location}/{file.name}"
        try:
            if self._open is None or self._open[0] != file or self._read > MAPPED:
                self._open, self._read = (file, safe_open(file, framework="pt")), 0
            stored: Tensor = self._open[1].get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"{at}: {name} cannot be read ({message_of(error)}); download it again") from error
        if not stored.is_floating_point():
            raise UserError(f"{at}: {name} is of {str(stored.dtype).removeprefix('torch.')}, which no weight is")
        self._read += stored.nbytes
        return stored, f"{at}: {name}"


@functools.lru_cache(maxsize=1)
def cached_target(folder: Path, device: str, dtype: Literal["float32", "bfloat16", "auto"] = "auto") -> AbstractTarget:
    """The target in this artifact directory, opened at the first call, so that consecutive shards share it.

    Its kernel is "steady": a timed choice would change the last bits of shards that any process may write. Raises as
    `open_target`.
    """
    return open_target(folder, device=device, dtype=dtype, kernel="steady")


SMALL_TARGET: Final = 50_000_000
"""Parameters below which one thread is enough."""


def threads_for(num_params: int, num_threads: int) -> int:
    """One thread for a small target, else all of `num_threads`.

    A pass of a small model is hundreds of operators of a few microseconds: a second thread saves little of each and
    waits at a barrier after each, which on a busy machine costs far more (measured: 31 CPU seconds instead of 3 for one
    shard of answers of the built-in target). The count depends on no measurement, so files repeat bit for bit.
    """
    return 1 if num_params < SMALL_TARGET else num_threads
