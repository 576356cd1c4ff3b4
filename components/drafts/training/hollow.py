"""Tensors without contents: what a training step of any size computes and holds, before weights or data exist.

torch's FakeTensorMode runs every operator on shapes alone, on what would be a CPU. What a drafter asks of the values of
masks, indices and draws (how many columns are drafted from, and where they are) is answered all the same: what follows
from known integers, booleans or a few numbers is computed beside its shape. A value of which nothing is known, or that
nothing was written to, is 0, and one that something unknown is written into through a view stays as it was.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from components.targets.interface import AbstractCache, AbstractTarget, TargetPass, TreeRows
from components.targets.shape import TapLayers, TargetShape

MOST_KNOWN = 1 << 26
"""Integers or booleans up to which a tensor is computed as well: those of a mask over 8,192 columns."""
_UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""Operators whose result is whatever the memory held."""
MOST_NUMBERS = 1 << 16
"""Floating-point numbers up to which it is: draws for every column of a batch, and no matrix of weights."""


@contextmanager
def hollow_tensors() -> Iterator[None]:
    """While it lasts, tensors that are made have no contents."""
    fake = FakeTensorMode()
    memo: Any = {}
    fake.fake_tensor_converter.meta_converter.tensor_memo = memo
    gc.collect()
    is_frozen = gc.get_freeze_count() > 0
    gc.freeze()  # so that what is left to collect is what FakeTensorMode leaves behind
    try:
        with fake, _KnownValues(fake, memo):
            yield
    finally:
        if not is_frozen:  # else what was there before stays as it was
            gc.unfreeze()


@final
class _KnownValues(TorchDispatchMode):
    """Computes small values that follow from known ones; each is an attribute of its hollow tensor."""

    def __init__(self, fake: FakeTensorMode, memo: dict[Any, Any]) -> None:
        """memo: what the mode remembers of tensors that it has converted."""
        super().__init__()
        self._fake, self._memo = fake, memo

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        follows = all(_known(each) is not None for each in tensors_in((args, kwargs)))
        if func is torch.ops.aten._local_scalar_dense.default:
            known = _known(args[0])
            return 0 if known is None else self._computed(func, args, kwargs)
        if torch.Tag.dynamic_output_shape in func.tags and follows:
            return tree_map_only(Tensor, self._hollow, self._computed(func, args, kwargs))
        result = func(*args, **kwargs)
        self._memo.clear()  # nn.Module.to moves no weight that something else refers to
        gc.collect(1)  # tensors in circles would count as held
        outputs = [*tensors_in(result)]
        if not follows and func._schema.is_mutable:
            for output in outputs:
                output.known = None  # type: ignore[attr-defined]
        if follows and outputs and all(map(_is_small, outputs)):
            computed = tensors_in(self._computed(func, args, kwargs))
            for output, value in zip(outputs, computed, strict=True):
                output.known = value  # type: ignore[attr-defined]
        return result

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        with unset_fake_temporarily():
            value = func(*tree_map_only(Tensor, _known, args), **tree_map_only(Tensor, _known, kwargs))
            return value.zero_() if func.overloadpacket.__name__ in _UNWRITTEN else value

    def _hollow(self, value: Tensor) -> Tensor:
        hollow = self._fake.from_tensor(value)
        hollow.known = value  # type: ignore[attr-defined]
        return hollow


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors of an operator's arguments or result: in tuples, lists and dictionaries, which is all that they are.

    Every operator of an estimate passes here, and torch's own tree_leaves takes about twice as long.
    """
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for part in tree:
            yield from tensors_in(part)
    elif isinstance(tree, dict):
        yield from tensors_in(tuple(tree.values()))


def _known(tensor: Tensor) -> Tensor | None:
    return getattr(tensor, "known", None) if isinstance(tensor, FakeTensor) else tensor


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= (MOST_NUMBERS if tensor.is_floating_point() or tensor.is_complex() else MOST_KNOWN)


@final
class HollowTarget(AbstractTarget):
    """What training from features reads of a target, without contents: embedding, final norm and head."""

    def __init__(self, shape: TargetShape, dtype: torch.dtype, tap_layers: TapLayers) -> None:
        """To be called, as everything with it, inside `hollow_tensors`."""
        self.shape, self.dtype, self.device, self.kernel = shape, dtype, torch.device("cpu"), "plain"
        self.tap_layers = tap_layers
        self._embedding = torch.empty(shape.vocab_size, shape.hidden_size, dtype=dtype)
        self._head = self._embedding if shape.tie_word_embeddings else torch.empty_like(self._embedding)
        self._norm = torch.empty(shape.hidden_size, dtype=dtype)

    @property
    def embedding(self) -> Tensor:
        return self._embedding

    def final_norm(self, last: Tensor) -> Tensor:
        return F.rms_norm(last, self._norm.shape, self._norm, self.shape.rms_norm_eps)

    def unembed(self, normed: Tensor) -> Tensor:
        return F.linear(normed, self._head).float()

    def new_cache(self, batch_size: int, capacity: int) -> AbstractCache:
        raise NotImplementedError("a hollow target runs no passes")

    def forward(
        self,
        ids: Tensor,
        cache: AbstractCache,
        *,
        num_valid: Tensor | None = None,
        logits: Literal["all", "last", "none"] = "all",
        features: bool | Sequence[int] = False,
        tree: TreeRows | None = None,
    ) -> TargetPass:
        raise NotImplementedError("a hollow target runs no passes")
