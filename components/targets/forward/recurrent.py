"""Recurrent states of a transformers model (linear attention, Mamba, short convolutions) that can go back.

A recurrent layer keeps a state instead of all positions, and a state cannot forget a rejected draft token. So the
cache keeps the states from before the last passes, and the inputs of the recurrent layers in these passes. To go back
to fewer tokens, it runs those layers alone, from the kept states, over the tokens that stay. Padding is dropped
likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

LONGEST_REPLAY = 64
"""Rows of recent passes whose inputs are kept: truncation goes back at least half as far. A prompt's are not kept."""


class StateLayer(LinearAttentionLayer):
    """A layer's states, replaced by each update, where transformers' own layer writes into the old ones."""

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """As LinearAttentionLayer: the columns of this pass behind those kept from before."""
        width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        before = self.conv_states[state_idx]
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:-1], width)
            self.dtype, self.device, self.conv_kernel_size[state_idx] = before.dtype, before.device, width
        columns = torch.cat([before, conv_states], dim=-1)
        self.conv_states[state_idx] = columns[..., -self.conv_kernel_size[state_idx] :]
        self.is_conv_states_initialized[state_idx] = self.has_previous_state[state_idx] = True
        return columns

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        """As LinearAttentionLayer."""
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states

    def states(self) -> dict[tuple[str, int], Tensor]:
        """The states by kind and number; {} before the first pass."""
        kinds: Mapping[str, Mapping[int, Tensor | None]] = {
            "conv": self.conv_states,
            "recurrent": self.recurrent_states,
        }
        return {
            (kind, number): state
            for kind, by_number in kinds.items()
            for number, state in by_number.items()
            if state is not None
        }

    def set_states(self, states: Mapping[tuple[str, int], Tensor]) -> None:
        """Make these the states, all of which exist already or come from another layer of the same module."""
        for (kind, number), state in states.items():
            if kind == "conv":
                self.conv_states[number], self.conv_kernel_size[number] = state, state.shape[-1]
                self.is_conv_states_initialized[number] = self.has_previous_state[number] = True
                self.dtype, self.device = state.dtype, state.device
            else:
                self.recurrent_states[number] = state
                self.is_recurrent_states_initialized[number] = True


class StateAndAttentionLayer(StateLayer, DynamicLayer):
    """A layer with a recurrent state and with keys and values of all positions."""

    is_compileable = False

    def __init__(self, number_of_states: int = 1) -> None:
        DynamicLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """As DynamicLayer; states need none."""
        DynamicLayer.lazy_initialization(self, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """As DynamicLayer: of keys and values alone."""
        DynamicLayer.crop(self, tokens_to_remove)


@dataclass(frozen=True)
class RecurrentModule:
    """A module of the model that reads and writes the states of one layer."""

    module: nn.Module
    layer: int


@dataclass
class _Call:
    """The arguments of a recurrent module in one pass over [B, T] rows."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


RecurrentCalls = dict[int, _Call]
"""The calls of one pass, by the place of the module in `Recorder.modules`."""


@dataclass
class _Pass:
    """One pass: for each recurrent module (by its place) its call, and which rows count, bool [B, T]."""

    calls: RecurrentCalls
    valid: Tensor


States = dict[int, dict[tuple[str, int], Tensor]]
"""By layer, the states [B, ...] of a whole batch."""


class _NotingCache(DynamicCache):
    """A cache that notes which module updates a state: the innermost one that runs."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.layers = list(layers)
        self.running: list[nn.Module] = []
        self.users: dict[int, RecurrentModule] = {}

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        self._note(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        self._note(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def _note(self, layer: int) -> None:
        user = self.running[-1]
        self.users.setdefault(id(user), RecurrentModule(user, layer))


def find_recurrent_modules(
    decoder: nn.Module, layers: Sequence[Any], run: Callable[[Cache], Any]
) -> list[RecurrentModule]:
    """The modules that update the states of a cache of these layers while `run` runs the decoder over it."""
    cache = _NotingCache(layers)
    handles = []
    for module in decoder.modules():
        handles.append(module.register_forward_pre_hook(lambda module, _: cache.running.append(module)))
        handles.append(module.register_forward_hook(lambda *_: cache.running.pop() and None, always_call=True))
    try:
        run(cache)
    finally:
        for handle in handles:
            handle.remove()
    return sorted(cache.users.values(), key=lambda user: user.layer)


class Recorder:
    """Catches the inputs of the recurrent modules of one model while a pass runs."""

    def __init__(self, modules: Sequence[RecurrentModule]) -> None:
        self.modules = modules
        self.continues = True  # whether the modules continue from their states by several rows at once
        self._calls: RecurrentCalls | None = None
        for place, user in enumerate(modules):
            user.module.register_forward_pre_hook(self._catcher(place), with_kwargs=True)

    def _catcher(self, place: int) -> Any:
        def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._calls is not None:
                self._calls[place] = _Call(args, dict(kwargs))

        return catch

    @contextmanager
    def recording(self) -> Iterator[RecurrentCalls]:
        """The calls of the passes in the block, by the module's place."""
        calls: RecurrentCalls = {}
        self._calls = calls
        try:
            yield calls
        finally:
            self._calls = None


@dataclass
class RecurrentStates:
    """The states of a batch, with what is needed to go back a few tokens.

    anchor: the states at `anchor_lengths` tokens [B]; passes: those since then.
    """

    recorder: Recorder
    cache: DynamicCache
    anchor: States = field(default_factory=dict)
    anchor_lengths: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    passes: list[_Pass] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._older: tuple[States, Tensor, list[_Pass]] | None = None

    def layers(self) -> Iterator[tuple[int, StateLayer]]:
        """The layers with states, by number."""
        for number, layer in enumerate(self.cache.layers):
            if isinstance(layer, StateLayer):
                yield number, layer

    def current(self) -> States:
        """The states as they are; {} before the first pass."""
        return {number: states for number, layer in self.layers() if (states := layer.states())}

    def protect(self, num_rows: int) -> None:
        """Before a pass: a pass of one row may write into the states in place, so it gets copies."""
        if num_rows == 1:
            for _, layer in self.layers():
                layer.set_states({name: state.clone() for name, state in layer.states().items()})

    def append(self, calls: RecurrentCalls, valid: Tensor, lengths: Tensor) -> None:
        """After a pass. valid: bool [B, T], its rows that count. lengths: int64 [B], the tokens before it."""
        if not self.anchor:  # the first pass began with states of zeros
            zeros = {n: {name: torch.zeros_like(s) for name, s in by.items()} for n, by in self.current().items()}
            self.anchor, self.anchor_lengths = zeros, lengths.clone()
        self.passes.append(_Pass(calls, valid))
        after = lengths + valid.sum(dim=1)
        self._replay(after, ~valid.all(dim=1))
        rows = sum(one.valid.shape[1] for one in self.passes)
        if rows >= LONGEST_REPLAY // 2:
            self._anchor_here(after, keep_older=rows <= LONGEST_REPLAY)

    def truncate(self, lengths: Tensor, before: Tensor) -> None:
        """Go back from `before` to `lengths` tokens (both int64 [B])."""
        if bool((lengths == before).all()):
            return
        if not bool(lengths.any()):
            for number, layer in self.layers():
                self.cache.layers[number] = type(layer)(layer.number_of_states)
            self.anchor, self.passes, self._older = {}, [], None
            return
        self._replay(lengths, lengths < before)
        self._anchor_here(lengths, keep_older=False)

    def _anchor_here(self, lengths: Tensor, *, keep_older: bool) -> None:
        self._older = (self.anchor, self.anchor_lengths, self.passes) if keep_older else None
        self.anchor, self.anchor_lengths, self.passes = self.current(), lengths.clone(), []

    def _replay(self, lengths: Tensor, which: Tensor) -> None:
        """Make the states of the sequences `which` (bool [B]) those after `lengths` tokens (int64 [B])."""
        if not bool(which.any()):
            return
        emptied = lengths == 0
        if self._older is not None and bool((which & (lengths < self.anchor_lengths) & ~emptied).any()):
            older, older_lengths, older_passes = self._older
            self.anchor, self.anchor_lengths, self.passes = older, older_lengths, older_passes + self.passes
            self._older = None
        left = torch.where(emptied | ~which, 0, lengths - self.anchor_lengths)
        assert bool((left >= 0).all()), "recurrent states cannot go back so far"
        counts = []  # of rows to take from each pass, [B] each
        for one in self.passes:
            counts.append(torch.minimum(left, one.valid.sum(dim=1)))
            left = left - counts[-1]
        assert not bool(left.any())
        groups: dict[tuple[int, ...], list[int]] = {}
        for sequence in which.nonzero().flatten().tolist():
            groups.setdefault(tuple(int(count[sequence]) for count in counts), []).append(sequence)
        states = {n: {name: state.clone() for name, state in by.items()} for n, by in self.current().items()}
        for group, sequences in groups.items():
            for number, by_name in self._replayed(group, sequences).items():
                for name, state in by_name.items():
                    states[number][name][sequences] = state
        for number, layer in self.layers():
            for state in states[number].values():
                state[emptied.to(state.device)] = 0
            layer.set_states(states[number])

    def _replayed(self, counts: Sequence[int], sequences: list[int]) -> States:
        """The states of `sequences` after the first counts[p] rows of each pass p, from the anchor."""
        places = torch.tensor(sequences)
        shell = DynamicCache()
        shell.layers = [
            StateLayer(one.number_of_states) if isinstance(one, StateLayer) else one for one in self.cache.layers
        ]
        for number, by_name in self.anchor.items():
            layer = shell.layers[number]
            assert isinstance(layer, StateLayer)
            layer.set_states({name: state[places.to(state.device)] for name, state in by_name.items()})
        if any(counts):
            for place, user in enumerate(self.recorder.modules):
                calls = [
                    (one.calls[place], one.valid.shape, n) for one, n in zip(self.passes, counts, strict=True) if n
                ]
                args, kwargs = _joined(calls, places, shell)
                step = sum(counts) if self.recorder.continues else 1
                for row in range(0, sum(counts), step):
                    user.module(*_rows(args, row, step), **_rows(kwargs, row, step))
        return {number: layer.states() for number, layer in enumerate(shell.layers) if isinstance(layer, StateLayer)}

    def select(self, sequences: Sequence[int], lengths: Tensor) -> None:
        """Keep only these sequences, in this order; `lengths` [B] are their tokens. The states go back no further."""
        places = torch.tensor(list(sequences))
        for _, layer in self.layers():
            layer.set_states({name: state[places.to(state.device)] for name, state in layer.states().items()})
        self._anchor_here(lengths, keep_older=False)

    def put(self, sequences: Sequence[int], other: RecurrentStates, lengths: Tensor) -> None:
        """Replace these sequences by those of `other`; `lengths` [B] are the tokens of all sequences afterwards."""
        new = other.current()
        for number, layer in self.layers():
            states = layer.states()
            for name, state in new[number].items():
                old = states.get(name)
                if old is None:
                    old = state.new_zeros(len(lengths), *state.shape[1:])
                old = old.clone()
                old[list(sequences)] = state
                states[name] = old
            layer.set_states(states)
        self._anchor_here(lengths, keep_older=False)


def _joined(
    calls: Sequence[tuple[_Call, Sequence[int], int]], sequences: Tensor, cache: DynamicCache
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one call over the first n rows of several calls, for some sequences, with another cache."""

    def join(values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, Cache):
            return cache
        if isinstance(first, tuple):
            return tuple(join(parts) for parts in zip(*values, strict=True))
        if not isinstance(first, Tensor) or first.ndim < 2:
            return values[-1]
        parts = []
        for value, (_, shape, n) in zip(values, calls, strict=True):
            assert value.shape[1] == shape[1], "a recurrent layer's argument without an axis of rows"
            rows = value[:, :n]
            parts.append(rows if len(value) == 1 else rows[sequences.to(value.device)])
        return torch.cat(parts, dim=1)

    args = tuple(join(values) for values in zip(*(call.args for call, _, _ in calls), strict=True))
    return args, {name: join([call.kwargs[name] for call, _, _ in calls]) for name in calls[0][0].kwargs}


def _rows(value: Any, start: int, count: int) -> Any:
    """The arguments of a recurrent module for `count` of its rows."""
    if isinstance(value, dict):
        return {name: _rows(part, start, count) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_rows(part, start, count) for part in value)
    return value[:, start : start + count] if isinstance(value, Tensor) and value.ndim > 1 else value
