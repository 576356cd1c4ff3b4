"""A linear layer that picks its kernel by the number of rows: decoding has 1 row, verification k + 1.

Six kernels compute x W^T; they differ in the layout of the weight they read and in how they grow with the rows:
  plain       `F.linear` on [out, in]: on x86 a matrix-vector product, then a jump of up to two at the second row;
  transposed  on a contiguous [in, out]: the quickest for 1 to 3 rows of some small layers;
  columns     (W x^T)^T on [out, in]: one row in blocks of W, in float32 the quickest there is; then it grows;
  streamed    our own on [out, in]: W is read once for up to 8 rows, which without AVX-512 nothing else does;
  prepacked   oneDNN's linear layer on a blocked layout: a dispatch of about 8 us, then nearly flat from 3 rows on;
  convolved   oneDNN's convolution of width one, on another: a dispatch of 20 us, flat from 2 to 8 rows of large layers;
              with AVX-512 alone.
Several are slower with one or two rows than with three or four. So rows may be padded with zeros to a number that is
quicker: what plain decoding pays, too, for it is the baseline.

Which wins depends on shape, dtype, rows and machine, so `calibrate` times them, on one weight of each shape where
weights are large, and kernel_times.py remembers. A small model may hold a weight in several layouts, each for the
numbers of rows for which it is the quickest; a large one holds every weight once. Packing uses private operators of
PyTorch; where they are missing or refuse, the others remain; `streamed` needs a C compiler.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from components.machine import give_memory_back
from components.targets.forward.compiled import compiled_functions
from components.targets.forward.kernel_times import (
    PACKED,
    PROBED_ROWS,
    Kernel,
    Shape,
    Times,
    recall_times,
    remember_times,
)
from components.targets.forward.streamed import MOST_ROWS, can_stream, streamed

Kernels = tuple[Kernel | int, ...]
"""The kernel for 1 row, 2 rows, ...; the last one serves every larger number. A number: padded to so many rows."""

PLAIN: Final[Kernels] = ("plain",)
PASSES: Final = 6
"""Passes that each kernel has for each number of rows and placement, taking turns."""
HOPELESS: Final = 1.5
"""A kernel that took this many times the quickest one's time in the first pass that counts has no more passes."""
FAR_TOO_SLOW: Final = 8.0
"""A kernel that took this many times the quickest one's time on one layer is not timed on the others: without AVX-512,
oneDNN's product in bfloat16 is one, and opening a target would take a minute."""
LARGE_ENOUGH: Final = 1 << 20
"""Bytes of a weight beside which what calling a kernel costs does not matter."""
THOROUGH_PLACEMENTS: Final = 3
"""Copies of the weights that are timed: the place in memory makes a kernel a few per cent faster or slower."""
WORTH_A_LAYOUT: Final = 0.97
"""A kernel replaces the plain one, or the one chosen for a row less, only if it needs less than this share of its time:
equally good kernels would otherwise flip from run to run."""
WORTH_PADDING: Final = 0.95
"""Rows are padded only if that needs less than this share of the time without, in which padding itself counts."""
PADDING_MICROSECONDS: Final = 4.0
SAVED_MICROSECONDS: Final = 40.0
"""What `streamed` saves for each linear layer that runs with others as one call."""
WORTH_LEAVING: Final = 0.9
"""Another kernel is taken in the place of that only if it needs less than this share of its time: it takes the layers
beside it out of the call too, and times of one row differ by a tenth from one opening to the next."""
LAYOUTS: Final[tuple[tuple[Kernel, ...], ...]] = (
    ("plain", "columns", "streamed"),
    ("transposed",),
    ("prepacked",),
    ("convolved",),
)
"""Kernels that read the same layout."""
HELD_TWICE: Final = 256 << 20
"""Bytes of weights above which each is held in two layouts at most."""
HELD_ONCE: Final = 1 << 30
"""Bytes of weights above which each is held in one layout only."""
ONE_ROW_PRICE: Final = 1.25
"""What one row may take with the layouts that are held, times its least: flat verification is worth so much, not more.
"""
_LETTERS: Final[dict[str, Kernel]] = {
    "p": "plain",
    "t": "transposed",
    "c": "columns",
    "s": "streamed",
    "o": "prepacked",
    "v": "convolved",
}
STREAMED_IN_PIECES: Final = 32
"""Rows up to which `streamed` takes eight at a time. A plain product of more is quicker, where there is a quick one."""
PACKED_FOR: Final = 8
"""Rows that oneDNN is told of when it packs: told of one row, it leaves the layout as it is."""
MOST_CONVOLVED: Final = 32
"""Rows of a convolution: 64 at once take twenty times as long as 32, since oneDNN then cuts the image otherwise."""
BLOCK: Final = 64
"""Outputs of a block of `columns`, where they divide by it."""
TOO_SMALL: Final = 1 << 14
"""Elements below which the kernel does not matter and nothing is timed."""
SAMPLED_BYTES: Final = 64 << 20
"""Most bytes of weights that are timed; more than caches hold."""
SAMPLED_BYTES_OF_ONE: Final = 32 << 20
"""Most bytes timed of one weight (its first rows): oneDNN keeps workspace as large as the weight for every kernel and
number of rows that it ran, which for the head of a large vocabulary comes to gigabytes."""
CACHE_BYTES: Final = 32 << 20
"""Bytes read between two passes over weights that fit the caches: in decoding, other weights are read in between."""


class Linear:
    """y = x W^T + b for x [N, in] -> contiguous [N, out], from a plain weight [out, in]; no gradients.

    kernels: see Kernels; what this weight cannot have, packed by oneDNN or streamed, falls back to "plain". in_one:
    whether it runs with others as one call (layers.py) where all of them are streamed.
    """

    __slots__ = (
        "_by_rows",
        "bias",
        "in_features",
        "in_one",
        "kernels",
        "out_features",
        "packed",
        "weight",
        "weight_t",
    )

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, kernels: Kernels = PLAIN, in_one: bool = False
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias, self.in_one = bias, in_one
        self.weight: Tensor | None = weight
        self.use(kernels)

    def use(self, kernels: Kernels) -> None:
        """Lay the weight out for these kernels and drop layouts that they do not need. Call it once per layer."""
        weight = self.weight
        assert weight is not None, "the plain weight is gone: this layer's kernels have been chosen"
        self.packed: dict[Kernel | int, Any] = {kernel: pack(weight, kernel) for kernel in PACKED if kernel in kernels}
        if None in self.packed.values():
            kernels = tuple("plain" if self.packed.get(kernel, weight) is None else kernel for kernel in kernels)
        if "streamed" in kernels and not can_stream(weight):
            kernels = tuple("plain" if kernel == "streamed" else kernel for kernel in kernels)
        self.kernels = kernels
        self.weight = weight if {"plain", "columns", "streamed"} & set(kernels) else None
        self.weight_t = weight.t().contiguous() if "transposed" in kernels else None
        # Functions of the class: bound methods would be reference cycles, and the weights would live until the garbage
        # collector runs.
        of: dict[Kernel, _Product] = {
            "plain": Linear._plain,
            "transposed": Linear._transposed,
            "columns": Linear._columns,
            "streamed": Linear._streamed,
            "prepacked": Linear._prepacked,
            "convolved": Linear._convolved,
        }
        by_rows = [
            _padded(of[kernels[kernel - 1]], kernel) if isinstance(kernel, int) else of[kernel]  # type: ignore[index]
            for kernel in kernels
        ]
        self._by_rows = (by_rows[0], *by_rows)  # [0]: no rows at all

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.out_features, self.in_features

    def is_streamed(self, rows: int) -> bool:
        """Whether so many rows, 1 or more, go through `streamed` as they are."""
        return self._kernel_for(rows) == "streamed"

    def _kernel_for(self, rows: int) -> Kernel | int:
        return self.kernels[min(rows, len(self.kernels)) - 1]

    def __call__(self, x: Tensor) -> Tensor:
        return self._by_rows[min(x.shape[0], len(self._by_rows) - 1)](self, x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x), in one kernel where that is quicker."""
        kernel = self._kernel_for(x.shape[0])
        if self.bias is None and kernel == "plain":
            return torch.addmm(residual, x, self.weight.t())  # type: ignore[union-attr]
        if self.bias is None and kernel == "transposed":
            return torch.addmm(residual, x, self.weight_t)  # type: ignore[arg-type]
        return residual + self(x)

    def _plain(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        if self.bias is None:
            return torch.mm(x, self.weight.t())
        return torch.addmm(self.bias, x, self.weight.t())

    def _transposed(self, x: Tensor) -> Tensor:
        assert self.weight_t is not None
        return torch.mm(x, self.weight_t) if self.bias is None else torch.addmm(self.bias, x, self.weight_t)

    def _columns(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        if x.shape[0] == 1 and self.out_features % BLOCK == 0:
            blocks = self.weight.view(-1, BLOCK, self.in_features)
            y = torch.bmm(blocks, x.t().expand(len(blocks), -1, -1)).view(1, -1)
        else:
            y = torch.mm(self.weight, x.t()).t()
        return y.contiguous() if self.bias is None else (self.bias + y).contiguous()

    def _streamed(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        rows = x.shape[0]
        if rows == 0 or (rows > STREAMED_IN_PIECES and _has_quick_product(x.dtype)):
            return self._plain(x)
        if rows <= MOST_ROWS:
            return streamed(x, self.weight, self.bias)
        return torch.cat([streamed(piece, self.weight, self.bias) for piece in x.split(MOST_ROWS)])

    def _prepacked(self, x: Tensor) -> Tensor:
        operators = _linear_operators()
        assert operators is not None
        y: Tensor = operators[1](x, self.packed["prepacked"], self.bias, "none", [], "")
        return y

    def _convolved(self, x: Tensor) -> Tensor:
        if x.shape[0] > MOST_CONVOLVED:
            return torch.cat([self._convolved(rows) for rows in x.split(MOST_CONVOLVED)])
        operators = _convolution_operators()
        assert operators is not None
        # Rows are the places of one image, features its channels: channels last is how rows lie anyway.
        image = x.reshape(1, 1, -1, self.in_features).permute(0, 3, 1, 2)
        y: Tensor = operators[1](image, self.packed["convolved"], self.bias, *_WIDTH_ONE, "none", [], "")
        return y.permute(0, 2, 3, 1).reshape(-1, self.out_features)


_Product = Callable[[Linear, Tensor], Tensor]
_WIDTH_ONE: Final = ([0, 0], [1, 1], [1, 1], 1)
"""Padding, stride, dilation and groups of a convolution that is a linear layer."""


def _padded(product: _Product, rows: int) -> _Product:
    """The product of x with rows of zeros after it, without them."""

    def run(layer: Linear, x: Tensor) -> Tensor:
        return product(layer, F.pad(x, (0, 0, 0, rows - x.shape[0])))[: x.shape[0]]

    return run


def can_convolve() -> bool:
    """Whether oneDNN convolves any number of rows quickly.

    Without AVX-512, 1, 2, 5, 6, 9, 10 and about ten more numbers up to 32 took hundreds of times as long (AMD's Zen 3).
    """
    return "AVX512" in torch.backends.cpu.get_cpu_capability()


@functools.cache
def _has_quick_product(dtype: torch.dtype) -> bool:
    """Whether PyTorch's product of many rows is quick; in bfloat16 it is where the processor or oneDNN knows it."""
    knows_bfloat16 = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # private: a build may lack it
    return dtype == torch.float32 or (knows_bfloat16 is not None and bool(knows_bfloat16()))


def steady_kernel(dtype: torch.dtype) -> Kernel:
    """The kernel for any number of rows that no timing chooses, so that all processes of a machine take the same one.

    It is "streamed" where PyTorch's product takes as long for each of many rows as for one, else "plain".
    """
    return "plain" if _has_quick_product(dtype) else "streamed"


def pack(weight: Tensor, kernel: Kernel) -> Any | None:
    """The weight in the layout of this kernel of oneDNN, or None where this build, device or dtype cannot."""
    operators = _linear_operators() if kernel == "prepacked" else _convolution_operators() if can_convolve() else None
    if operators is None or weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    reorder, run = operators
    weight = weight.detach().contiguous()
    num_out, num_in = weight.shape
    try:
        if kernel == "prepacked":
            packed = reorder(weight, PACKED_FOR)
            run(weight.new_zeros(PACKED_FOR, num_in), packed, None, "none", [], "")
        else:
            packed = reorder(weight.view(num_out, num_in, 1, 1), *_WIDTH_ONE, [1, num_in, 1, PACKED_FOR])
            run(weight.new_zeros(1, num_in, 1, PACKED_FOR), packed, None, *_WIDTH_ONE, "none", [], "")
    except (RuntimeError, NotImplementedError):  # e.g. bf16 on a CPU without avx512: plain then
        return None
    return packed


def calibrate(
    layers: Sequence[Linear],
    *,
    placements: int = 1,
    known: Mapping[Shape, Times] | None = None,
    num_bytes: int | None = None,
) -> dict[Shape, Times]:
    """Give each shape of these plain layers its quickest kernels; returns the times that were measured for it.

    known: times of shapes that are not measured again. placements: how often the weights are copied to another place in
    memory. num_bytes: of the weights of the whole model, where these layers are a part of it.
    """
    known = known or {}
    timed = _time_kernels([layer for layer in layers if layer.shape not in known], placements)
    if num_bytes is None:
        num_bytes = sum(layer.weight.nbytes for layer in layers if layer.weight is not None)
    most = 1 if num_bytes > HELD_ONCE else 2 if num_bytes > HELD_TWICE else len(LAYOUTS)
    in_one = {layer.shape for layer in layers if layer.in_one}
    kernels_of = {
        shape: choose_kernels(times, most_layouts=most, in_one=shape in in_one)
        for shape, times in {**known, **timed}.items()
    }
    give_memory_back()
    for layer in layers:
        layer.use(kernels_of.get(layer.shape, PLAIN))
    return timed


def choose_kernels(times: Times, *, most_layouts: int = len(LAYOUTS), in_one: bool = False) -> Kernels:
    """The quickest kernel for each number of rows, of equally good ones that of a row less, and padding where it pays.

    most_layouts: that may be held of a weight; see `_of_layouts`. in_one: see Linear; it takes `streamed`
    unless another is quicker by WORTH_LEAVING, and pads no rows of that: one call does not.
    """
    in_one = in_one and "streamed" in times
    if in_one:
        times = {**times, "streamed": [max(time - SAVED_MICROSECONDS, 0.0) for time in times["streamed"]]}
    times = _of_layouts(times, most_layouts)
    worth = WORTH_LEAVING if in_one else WORTH_A_LAYOUT
    chosen: list[Kernel] = []
    for rows in range(PROBED_ROWS):
        fastest = min(times, key=lambda name: times[name][rows])
        candidates: list[Kernel] = ["streamed"] if in_one else [*chosen[-1:], "plain"]
        others = [name for name in candidates if name in times]
        chosen.append(next((name for name in others if times[fastest][rows] >= worth * times[name][rows]), fastest))
    spent = [times[kernel][rows] for rows, kernel in enumerate(chosen)]
    kernels: list[Kernel | int] = []
    for rows, kernel in enumerate(chosen):
        quickest = min(range(rows, PROBED_ROWS), key=lambda more: spent[more])
        is_worth_it = spent[quickest] + PADDING_MICROSECONDS < WORTH_PADDING * spent[rows]
        kernels.append(quickest + 1 if is_worth_it and not (in_one and kernel == "streamed") else kernel)
    return tuple(kernels)


def _of_layouts(times: Times, most: int) -> Times:
    """The times of the kernels that read the best layouts, at most so many.

    They have the least time over all numbers of rows, of those with which one row, the pass that drafting is compared
    with, takes at most ONE_ROW_PRICE of what it takes with any.
    """
    timed_layouts = [names for layout in LAYOUTS if (names := tuple(name for name in layout if name in times))]
    least: dict[tuple[Kernel, ...], list[float]] = {}
    for layouts in itertools.combinations(timed_layouts, min(most, len(timed_layouts))):
        names = tuple(name for layout in layouts for name in layout)
        as_they_are = [min(times[name][rows] for name in names) for rows in range(PROBED_ROWS)]
        least[names] = [min(as_they_are[rows:]) for rows in range(PROBED_ROWS)]
    one_row = min(of_names[0] for of_names in least.values())
    allowed = [names for names, of_names in least.items() if of_names[0] <= ONE_ROW_PRICE * one_row]
    best = min(allowed, key=lambda names: sum(least[names]))
    first = allowed[0]  # with the plain layout, if that is allowed
    return {name: times[name] for name in (first if WORTH_A_LAYOUT * sum(least[first]) <= sum(least[best]) else best)}


def _time_kernels(layers: Sequence[Linear], placements: int) -> dict[Shape, Times]:
    """Time every kernel for 1 to PROBED_ROWS rows on a sample of plain layers that has every shape worth timing.

    The layers run in the order of a decoding pass, since a kernel that wins on a weight in the nearest cache can lose
    on one that is streamed. Kernels take turns pass by pass, so that other work on the machine affects all alike, and
    their quickest calls count, since other work only makes calls longer.
    """
    shapes: set[Shape] = set()
    sample: list[_Piece] = []
    sampled_bytes = 0
    for layer in layers:
        assert layer.weight is not None
        if layer.weight.numel() >= TOO_SMALL and (layer.shape not in shapes or sampled_bytes < SAMPLED_BYTES):
            piece = _piece_of(layer)
            sample.append(piece)
            sampled_bytes += piece.weight.nbytes
            shapes.add(layer.shape)
    if not sample:
        return {}
    evicted = torch.zeros(CACHE_BYTES // 4) if sampled_bytes < CACHE_BYTES else None
    sums: dict[Shape, dict[Kernel, list[float]]] = {shape: {} for shape in shapes}
    with torch.inference_mode():
        for _ in range(placements):
            for name, rows, shape, spent in _time_placement(sample, evicted):
                of_kernel = sums[shape].setdefault(name, [0.0] * PROBED_ROWS)
                of_kernel[rows - 1] += 1e6 * spent / placements
    return dict(sums)


def _time_placement(sample: Sequence[_Piece], evicted: Tensor | None) -> Iterator[tuple[Kernel, int, Shape, float]]:
    """(kernel, rows, shape, seconds) of one copy of the sample, of which each layout is in memory once, for so long."""
    copies = [piece._replace(weight=piece.weight.clone()) for piece in sample]
    names: list[Kernel] = ["plain", "transposed", "columns"]
    names += ["streamed"] if compiled_functions() is not None else []
    names += [kernel for kernel in PACKED if pack(copies[0].weight, kernel) is not None]
    trials = {
        name: [(piece.shape, Linear(piece.weight, piece.bias, kernels=(name,))) for piece in copies] for name in names
    }
    for rows in range(1, PROBED_ROWS + 1):
        for name, of_shape in _quick_seconds(trials, rows, copies[0].weight.dtype, evicted).items():
            for shape, spent in of_shape.items():
                yield name, rows, shape, spent


class Layouts:
    """Gives plain layers their kernels as they are read, once enough of them are there to be timed.

    kernel: "auto" takes the kernels that this machine remembers or times them, "thorough" times them anew and more
    often, "plain" leaves them, "steady" is `steady_kernel`; else what `finish` once returned. num_bytes: of the weights
    of all layers to come.
    """

    def __init__(self, kernel: str, num_bytes: int) -> None:
        self._kernel, self._num_bytes = kernel, num_bytes
        self._kernels_of = parse_kernels(kernel) if kernel not in ("auto", "thorough", "plain", "steady") else None
        self._layers: list[Linear] = []
        self._waiting: list[Linear] = []
        self._timed: dict[Shape, Times] = {}
        give_memory_back()

    def add(self, layers: Sequence[Linear]) -> None:
        """Take the next layers, which are laid out now or when there is a sample."""
        self._layers += layers
        if self._kernels_of is not None:
            for layer in layers:
                layer.use(self._kernels_of(layer.shape))
        elif self._kernel == "steady":
            for layer in layers:
                assert layer.weight is not None
                layer.use((steady_kernel(layer.weight.dtype),))
        elif self._kernel != "plain":
            self._waiting += layers
            if self._timed or sum(_piece_of(layer).weight.nbytes for layer in self._waiting) >= SAMPLED_BYTES:
                self._lay_out_waiting()
        if self._num_bytes > SAMPLED_BYTES:
            give_memory_back()  # what reading them took beside them

    def finish(self) -> str:
        """Lay out what is left; returns a description that gives the same layers the same kernels elsewhere."""
        self._lay_out_waiting()
        give_memory_back()
        return describe_kernels(self._layers)

    def _lay_out_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        weights = [layer.weight for layer in waiting if layer.weight is not None and layer.weight.device.type == "cpu"]
        if not weights:
            return
        dtype, thorough = weights[0].dtype, self._kernel == "thorough"
        new = {layer.shape for layer in waiting} - self._timed.keys()
        self._timed |= {} if thorough else recall_times(dtype, new)
        placements = THOROUGH_PLACEMENTS if thorough else 1
        timed = calibrate(waiting, placements=placements, known=self._timed, num_bytes=self._num_bytes)
        remember_times(dtype, timed)
        self._timed |= timed


def lay_out(layers: Sequence[Linear], kernel: str = "auto") -> str:
    """Give plain layers their kernels, all at once; returns their description. kernel: see Layouts."""
    layouts = Layouts(kernel, sum(layer.weight.nbytes for layer in layers if layer.weight is not None))
    layouts.add(layers)
    return layouts.finish()


def describe_kernels(layers: Sequence[Linear]) -> str:
    """ "plain", "prepacked", or every shape's kernels, a letter for each of 1 to 8 rows: "mixed[1152x192:33tccooo]".

    p plain, t transposed, c columns, s streamed, o prepacked and v convolved (oneDNN); a digit: padded to so many rows.
    """
    used = {layer.shape: layer.kernels for layer in layers}
    names = {name for kernels in used.values() for name in kernels}
    letters: dict[Kernel | int, str] = {name: letter for letter, name in _LETTERS.items()}
    if len(names) == 1:
        return str(next(iter(names)))
    shapes = [
        f"{out}x{in_}:{''.join(letters.get(name, str(name)) for name in kernels)}"
        for (out, in_), kernels in sorted(used.items())
    ]
    return f"mixed[{','.join(shapes)}]"


def parse_kernels(kernel: str) -> Callable[[tuple[int, int]], Kernels]:
    """The inverse of `describe_kernels`: a function from a layer's shape to its kernels.

    A shape that the description does not name is plain. Raises ValueError for any other string.
    """
    whole = next((name for name in _LETTERS.values() if name == kernel), None)
    if whole is not None:
        return lambda shape: (whole,)
    if not (kernel.startswith("mixed[") and kernel.endswith("]")):
        raise ValueError(f"{kernel} describes no kernels")
    by_shape: dict[tuple[int, int], Kernels] = {}
    for part in kernel[len("mixed[") : -1].split(","):
        shape, _, letters = part.partition(":")
        rows, _, columns = shape.partition("x")
        by_shape[int(rows), int(columns)] = tuple(
            int(letter) if letter.isdigit() else _LETTERS[letter] for letter in letters
        )
    return lambda shape: by_shape.get(shape, PLAIN)


@functools.cache
def _linear_operators() -> tuple[Any, Any] | None:
    return _onednn("_reorder_linear_weight", "_linear_pointwise")


@functools.cache
def _convolution_operators() -> tuple[Any, Any] | None:
    return _onednn("_reorder_convolution_weight", "_convolution_pointwise")


def _onednn(reorder: str, run: str) -> tuple[Any, Any] | None:
    """Two private operators of PyTorch, or None where they are missing."""
    try:
        operators = getattr(torch.ops.mkldnn, reorder).default, getattr(torch.ops.mkldnn, run).default
    except (AttributeError, RuntimeError):
        return None
    return operators if torch.backends.mkldnn.is_available() else None


class _Piece(NamedTuple):
    """The part of a layer that is timed. shape: (out_features, in_features) of the whole layer."""

    shape: tuple[int, int]
    weight: Tensor
    bias: Tensor | None


def _piece_of(layer: Linear) -> _Piece:
    """The whole layer, or the first rows of a large weight."""
    assert layer.weight is not None
    num_rows = max(1, SAMPLED_BYTES_OF_ONE * layer.out_features // layer.weight.nbytes)
    return _Piece(layer.shape, layer.weight[:num_rows], None if layer.bias is None else layer.bias[:num_rows])


def _quick_seconds(
    trials: Mapping[Kernel, Sequence[tuple[Shape, Linear]]],
    rows: int,
    dtype: torch.dtype,
    evicted: Tensor | None,
) -> dict[Kernel, dict[Shape, float]]:
    """Kernel -> shape -> seconds of one call: the mean of its quickest tenth, of all layers and passes."""
    inputs = {layer.in_features: torch.ones(rows, layer.in_features, dtype=dtype) for _, layer in trials["plain"]}
    slowness = _slowness(trials, inputs)
    hopeful = {(name, shape) for name, layers in trials.items() for shape, _ in layers if slowness[name] < FAR_TOO_SLOW}
    times: dict[Kernel, dict[Shape, list[float]]] = {name: {} for name in trials}
    for number in range(PASSES + 1):
        if number == 2:
            quickest = _quickest(times)
            hopeful = {(name, at) for name, at in hopeful if min(times[name][at]) <= HOPELESS * quickest[at]}
        for name, layers in trials.items():
            if evicted is not None:
                evicted.sum()
            for shape, layer in layers:
                if (name, shape) in hopeful:
                    spent = _seconds(layer, inputs[layer.in_features])
                    if number:
                        times[name].setdefault(shape, []).append(spent)
    quickest = _quickest(times)
    return {
        name: {
            shape: _mean_of_quickest(times[name][shape]) if shape in times[name] else slowness[name] * quickest[shape]
            for shape, _ in layers
        }
        for name, layers in trials.items()
    }


def _slowness(
    trials: Mapping[Kernel, Sequence[tuple[Shape, Linear]]], inputs: Mapping[int, Tensor]
) -> dict[Kernel, float]:
    """How many times the quickest one's time each kernel takes on the smallest layer that is large enough to tell."""
    itemsize = next(iter(inputs.values())).itemsize
    num_bytes = [layer.out_features * layer.in_features * itemsize for _, layer in trials["plain"]]
    chosen = num_bytes.index(min((size for size in num_bytes if size >= LARGE_ENOUGH), default=max(num_bytes)))
    spent: dict[Kernel, float] = {}
    for name, layers in trials.items():
        layer = layers[chosen][1]
        layer(inputs[layer.in_features])  # oneDNN compiles a kernel at its first call
        spent[name] = _seconds(layer, inputs[layer.in_features])
    return {name: of_kernel / min(spent.values()) for name, of_kernel in spent.items()}


def _seconds(layer: Linear, x: Tensor) -> float:
    started = time.perf_counter()
    layer(x)
    return time.perf_counter() - started


def _quickest(times: Mapping[Kernel, Mapping[Shape, Sequence[float]]]) -> dict[Shape, float]:
    """The quickest call of each shape, with any kernel."""
    shapes = {shape for of_kernel in times.values() for shape in of_kernel}
    return {shape: min(min(of_kernel[shape]) for of_kernel in times.values() if shape in of_kernel) for shape in shapes}


def _mean_of_quickest(seconds: Sequence[float]) -> float:
    """The mean of the quickest tenth, of at least two."""
    quick = sorted(seconds)[: max(2, len(seconds) // 10)]
    return sum(quick) / len(quick)
