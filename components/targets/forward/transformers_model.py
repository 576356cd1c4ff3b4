"""Any Hugging Face causal LM as a target: slower than our own forward pass, but it runs the model's own code.

Columns reach the model as explicit position_ids, and masks are cut by position, because the slots of
the cache (slot_cache.py) are not positions. Forward hooks catch the outputs of the tapped layers and the input of the
final norm. When a target is opened, a few tokens are run in two ways: at once, and in ragged pieces with tokens dropped
in between. A model whose logits differ is refused, since its drafts could not be verified.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from components.contract import UserError
from components.targets.forward.recurrent import Recorder, StateLayer, find_recurrent_modules
from components.targets.forward.slot_cache import SlotCache, cache_layers, mask_plan
from components.targets.interface import AbstractCache, AbstractTarget, TargetPass, TreeRows
from components.targets.shape import TapLayers, TargetShape
from components.targets.spread import is_share
from components.text import message_of

_MOST_MASKED = 1 << 26
"""Entries of a mask [B, T, S] up to which a pass runs at once; a longer prompt runs in pieces."""
_TOLERANCE = 1e-2
"""Share of the largest logit by which two ways of running the same tokens may differ, but for `_rounded_by`."""


class TransformersTarget(AbstractTarget):
    """A causal LM of transformers behind AbstractTarget."""

    def __init__(self, model: Any, shape: TargetShape, *, location: str) -> None:
        """model: an AutoModelForCausalLM in eval mode on its device.

        Raises UserError (naming `location`) for one that cannot be run in pieces or whose head is not understood.
        """
        self.model, self.shape = model, shape
        self.device, self.dtype = model.device, model.dtype
        self.kernel = "transformers"
        self._config = model.config.get_text_config(decoder=True)
        if why := _why_refused(model, self._config):
            raise UserError(f"{location}: {shape.architecture} {why}")
        self._masks = mask_plan(self._config, location)
        self._location = location
        layers = cache_layers(self._config, location)
        self.verifies_trees = not any(isinstance(layer, StateLayer) for layer in layers)
        self._bytes_per_token = 0
        self._recorder = Recorder([])
        self._caught: dict[int | str, Tensor] = {}
        self._catching = False
        self._scale, self._cap = head_scaling(self._config)
        self._head = model.get_output_embeddings()
        ids = torch.arange(_TRIAL).clamp(max=shape.vocab_size - 1)[None]
        try:
            self._find_parts(ids, location, layers)
            cache = self.new_cache(1, _TRIAL)
            whole = self.forward(ids, cache, features=True)
            self._bytes_per_token = cache.num_bytes() // _TRIAL
            assert whole.logits is not None and whole.last is not None
            in_pieces = self._run_in_pieces(ids)
            if self._recorder.modules and not _close(in_pieces, whole.logits):
                self._recorder.continues = False
                in_pieces = self._run_in_pieces(ids)
            recomputed = self.unembed(self.final_norm(whole.last))
        except UserError:
            raise
        except Exception as error:  # sizes that do not match break each architecture in its own way
            raise UserError(f"{location}: transformers cannot run it ({message_of(error)})") from error
        if not bool(torch.isfinite(whole.logits).all()):
            raise UserError(f"{location}: config.json and the weights give NaN or infinity instead of logits")
        if not _close(recomputed, whole.logits):
            raise UserError(
                f"{location}: {shape.architecture} changes its logits after lm_head in a way that is not known here"
            )
        if not _close(in_pieces, whole.logits, _rounded_by(self.dtype, shape.num_layers)):
            raise UserError(
                f"{location}: {shape.architecture} gives other logits when tokens come in pieces and drafts are"
                " dropped; its layers cannot verify draft tokens"
            )

    def _find_parts(self, ids: Tensor, location: str, empty: list[Any]) -> None:
        """Find the decoder layers, the final norm and the recurrent modules, and hook them; empty: `cache_layers`."""
        decoder = self.model.get_decoder()
        layers = _layers_of(decoder, self.shape.num_layers)
        if layers is None or self._head is None:
            raise UserError(f"{location}: {self.shape.architecture} has no list of decoder layers or no lm_head")
        norm = self._final_norm_of(decoder, layers, ids)
        if norm is None:
            raise UserError(f"{location}: {self.shape.architecture} has no norm between its last layer and lm_head")
        self._norm, factor = norm
        # lm_head is linear: scaling what it reads scales the logits. MiniCPM3 divides there by the logits_scaling that
        # Granite divides by behind the head, and head_scaling counts it already.
        if factor != 1.0 and not getattr(self._config, "logits_scaling", None):
            self._scale *= factor
        self._layers, self._hooked = layers, set[int]()
        self._norm.register_forward_pre_hook(self._norm_catcher())
        if not self.verifies_trees:
            self._recorder = Recorder(find_recurrent_modules(decoder, empty, lambda cache: self._run(ids, cache)))

    @torch.inference_mode()
    def _run(self, ids: Tensor, cache: Any) -> Any:
        return self.model(input_ids=ids.to(self.device), past_key_values=cache, use_cache=True)

    def _final_norm_of(self, decoder: nn.Module, layers: nn.ModuleList, ids: Tensor) -> tuple[nn.Module, float] | None:
        """The module outside the layers whose output, times a factor, is what the head reads."""
        outputs: list[tuple[nn.Module, Tensor]] = []
        read: list[Tensor] = []
        inside = {id(module) for module in layers.modules()}

        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                outputs.append((module, output))

        handles = [m.register_forward_hook(note) for m in decoder.modules() if id(m) not in inside and m is not decoder]
        handles.append(self._head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0])))
        try:
            self._run(ids, None)
        finally:
            for handle in handles:
                handle.remove()
        for module, output in outputs:
            if read and output.shape == read[0].shape:
                taken = read[0].to(output.device)  # layers may be spread over GPUs
                if torch.equal(output.nan_to_num(), taken.nan_to_num()):
                    return module, 1.0
                factor = float((output * taken).sum() / (output * output).sum())
                if torch.allclose(output * factor, taken, rtol=1e-3, atol=1e-3):
                    return module, factor
        return None

    def _hook(self, taps: TapLayers) -> None:
        """Catch the hidden_states of these taps from now on: hidden_states[i] is the output of layer i - 1."""
        for tap in taps:
            if tap not in self._hooked:
                self._hooked.add(tap)
                self._layers[tap - 1].register_forward_hook(self._catcher(tap))

    def _catcher(self, tap: int) -> Any:
        def catch(module: Any, inputs: Any, output: Any) -> None:
            if self._catching:
                self._caught[tap] = output[0] if isinstance(output, tuple) else output

        return catch

    def _norm_catcher(self) -> Any:
        def catch(module: Any, inputs: Any) -> None:
            if self._catching:
                self._caught["last"] = inputs[0]

        return catch

    def _run_in_pieces(self, ids: Tensor) -> Tensor:
        """Logits [1, T, V] of the same tokens, run in pieces of two sequences with dropped tokens in between."""
        cache = self.new_cache(2, 2 * _TRIAL)
        wrong = ids.flip(1)
        first = self.forward(torch.cat([ids[:, :3], wrong[:, :3]]), cache, num_valid=torch.tensor([3, 2])).logits
        self.forward(wrong[:, :3].expand(2, -1), cache)
        cache.truncate(torch.tensor([3, 4]))
        second = self.forward(torch.cat([ids[:, 3:6], wrong[:, :3]]), cache, num_valid=torch.tensor([1, 3])).logits
        third = self.forward(ids[:, 4:].expand(2, -1), cache).logits
        assert first is not None and second is not None and third is not None
        return torch.cat([first[:1], second[:1, :1], third[:1]], dim=1)

    def new_cache(self, batch_size: int, capacity: int) -> SlotCache:
        """As AbstractTarget, but memory grows with use; `capacity` is still enforced."""
        layers = cache_layers(self._config, self._location)
        return SlotCache(layers, batch_size, capacity, self._bytes_per_token, self._recorder)

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        cache: AbstractCache,
        *,
        num_valid: Tensor | None = None,
        logits: Literal["all", "last", "none"] = "all",
        features: bool | TapLayers = False,
        tree: TreeRows | None = None,
    ) -> TargetPass:
        assert isinstance(cache, SlotCache)
        num_sequences, num_rows = ids.shape
        valid = torch.ones(num_sequences, num_rows, dtype=torch.bool)
        if num_valid is not None:
            valid = torch.arange(num_rows) < num_valid[:, None]
        assert int((cache.lengths + valid.sum(dim=1)).max()) <= cache.capacity, "the cache is full"
        assert tree is None or cache.states is None, "recurrent layers verify chains only"
        if tree is None and num_rows > (most := self._rows_at_once(cache, valid)):
            return self._forward_in_pieces(ids, cache, valid.sum(dim=1), logits, features, most)
        columns = cache.lengths[:, None] + (torch.arange(num_rows) if tree is None else tree.depths)
        last_row = (valid.sum(dim=1) - 1).clamp(min=0)
        keep: int | Tensor = 0
        if logits == "last":
            keep = last_row.unique().to(self.device)
        elif logits == "none":
            keep = torch.zeros(1, dtype=torch.int64, device=self.device)
        if cache.states is not None:
            cache.states.protect(num_rows)
        self._catching, taps = True, self.tapped_by(features)
        self._hook(taps)
        try:
            with self._recorder.recording() as calls:
                output = self.model(
                    input_ids=ids.to(self.device),
                    attention_mask=self._attention_mask(cache, valid, columns, tree),
                    position_ids=torch.where(valid, columns, 0).to(self.device),
                    past_key_values=cache.cache,
                    use_cache=True,
                    logits_to_keep=keep,
                )
        finally:
            self._catching = False
            caught, self._caught = self._caught, {}
        cache.append(valid, calls)
        scores = None if logits == "none" else self.silence(output.logits.to(self.device).float())
        if logits == "last":
            assert scores is not None and isinstance(keep, Tensor)
            place = torch.searchsorted(keep, last_row.to(self.device))
            scores = scores[torch.arange(num_sequences, device=self.device), place].unsqueeze(1)
        if not features:
            return TargetPass(scores, None, None)
        if any(caught[tap].shape != caught["last"].shape for tap in taps):
            streams = list(caught[taps[0]].shape)
            raise UserError(
                f"{self._location}: its layers pass on several streams (shape {streams}): there are no auxiliary hidden"
                " states to tap"
            )
        tapped = torch.cat([caught[tap].to(self.device) for tap in taps], dim=-1) if taps else None
        return TargetPass(scores, tapped, caught["last"].to(self.device))

    def _rows_at_once(self, cache: SlotCache, valid: Tensor) -> int:
        """Rows of a pass that may run together: one where states continue by one row; few where masks grow large."""
        num_sequences, num_rows = valid.shape
        if cache.states is not None and not self._recorder.continues and bool(cache.lengths.any()):
            return 1
        num_keys = cache.live.shape[1] + num_rows
        if num_sequences * num_rows * num_keys <= _MOST_MASKED or self._needs_no_mask(cache, valid):
            return num_rows
        return max(1, _MOST_MASKED // (num_sequences * num_keys))

    def _needs_no_mask(self, cache: SlotCache, valid: Tensor) -> bool:
        """Whether every row of a chain sees all columns up to its own, which needs no mask in transformers' kernels."""
        return self._masks.is_full and bool(valid.all()) and bool(cache.live.all())

    def _forward_in_pieces(
        self,
        ids: Tensor,
        cache: SlotCache,
        num_valid: Tensor,
        logits: Literal["all", "last", "none"],
        features: bool | TapLayers,
        size: int,
    ) -> TargetPass:
        """As `forward`, `size` rows at a time. For "last", only pieces with a sequence's last row compute logits."""
        passes = []
        last_row = (num_valid - 1).clamp(min=0)
        for start in range(0, ids.shape[1], size):
            piece = ids[:, start : start + size]
            inside = (num_valid - start).clamp(min=0, max=piece.shape[1])
            has_end = bool(((last_row >= start) & (last_row < start + size)).any())
            asked: Literal["all", "none"] = "all" if logits == "all" or (logits == "last" and has_end) else "none"
            passes.append(self.forward(piece, cache, num_valid=inside, logits=asked, features=features))
        taps, last = (_joined([one.taps for one in passes]), _joined([one.last for one in passes]))
        if logits == "none":
            return TargetPass(None, taps, last)
        if logits == "all":
            return TargetPass(_joined([one.logits for one in passes]), taps, last)
        rows = []
        for sequence, row in enumerate(last_row.tolist()):
            scores = passes[row // size].logits
            assert scores is not None
            rows.append(scores[sequence, row % size])
        return TargetPass(torch.stack(rows).unsqueeze(1), taps, last)

    def _attention_mask(self, cache: SlotCache, valid: Tensor, columns: Tensor, tree: TreeRows | None) -> Any:
        """What the model takes as attention_mask for rows `valid` [B, T] at `columns` [B, T] of this pass."""
        num_rows = valid.shape[1]
        if tree is None and self._needs_no_mask(cache, valid):
            return None
        live = cache.live.unsqueeze(1).expand(-1, num_rows, -1)
        among = torch.ones(num_rows, num_rows, dtype=torch.bool).tril() if tree is None else tree.visible
        seen = torch.cat([live, among & valid.unsqueeze(1)], dim=2)
        keys = torch.cat([cache.positions, columns], dim=1)
        return self._masks.build(seen, columns, keys, self.dtype, self.device)

    def final_norm(self, last: Tensor) -> Tensor:
        """As AbstractTarget; gradients flow to `last`."""
        return self._norm(last).to(self.device)

    def unembed(self, normed: Tensor) -> Tensor:
        """As AbstractTarget; gradients flow to `normed`."""
        logits = self._head(normed).to(self.device).float() * self._scale
        return torch.tanh(logits / self._cap) * self._cap if self._cap else logits

    @property
    def embedding(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight if is_plain(weight) else self._whole_embedding

    @functools.cached_property
    def _whole_embedding(self) -> Tensor:
        """Of a matrix that is quantised or divided among processes."""
        weight = self.model.get_input_embeddings().weight
        if is_share(weight):
            return weight.full_tensor()
        ids = torch.arange(self.shape.vocab_size, device=self.device)
        rows: Tensor = nn.functional.embedding(ids, self.model.get_input_embeddings().weight)
        return rows.to(self.dtype)


def is_plain(tensor: Tensor) -> bool:
    """Whether it holds its own numbers; quantised tensors of torchao are of classes that compute theirs."""
    return type(tensor) in (Tensor, nn.Parameter)


_TRIAL = 9
"""Tokens that a model is tried with when it is opened."""


def head_scaling(config: Any) -> tuple[float, float]:
    """What happens to logits after lm_head: (factor, soft cap); the cap is 0 for none.

    Cohere multiplies by logit_scale, Granite divides by logits_scaling, Falcon-H1 multiplies by lm_head_multiplier;
    Gemma and others cap: cap * tanh(logits / cap).
    """
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)
    return scale, float(getattr(config, "final_logit_softcapping", None) or 0.0)


def _why_refused(model: Any, config: Any) -> str:
    """Why a model cannot be a target, as the end of a sentence; "" where nothing is known against it."""
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return "has no attention layer; such models are not supported"
    if config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
        return "has position biases (ALiBi), which are not supported"
    if config.model_type == "minimax":
        return "keeps a cache of its own kind, which cannot drop rejected draft tokens"
    return ""


def _layers_of(decoder: nn.Module, num_layers: int) -> nn.ModuleList | None:
    """The first list of as many modules as the model has layers."""
    lists = (module for module in decoder.modules() if isinstance(module, nn.ModuleList))
    return next((found for found in lists if len(found) == num_layers), None)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Parts [B, t, ...] of a pass behind each other; None where there are none."""
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors, dim=1) if tensors else None


def _close(one: Tensor, other: Tensor, share: float = _TOLERANCE) -> bool:
    return bool((one - other).abs().max() <= share * other.abs().max().clamp(min=1))


def _rounded_by(dtype: torch.dtype, num_layers: int) -> float:
    """Share of the largest logit by which two ways may differ through rounding alone.

    Each half of a layer rounds, evenly up to half of `eps` up or down (a deviation of eps / sqrt(12)), and each way
    rounds for itself, so that the variances of both add up; the largest of thousands of differences lies four
    deviations out. Measured in bfloat16: a stand-in of Gemma-3-12B, 48 layers of equal weight, differs by up to 2.6 %,
    and by 4.4 % where a processor has no bfloat16 (AVX2), a Qwen3 of 8 layers there by 2.4 %; both by 0.00 % in
    float32, and one whose layers mix tokens outside the cache by more than 70 %.
    """
    return max(_TOLERANCE, 4 * torch.finfo(dtype).eps * (2 * 2 * num_layers / 12) ** 0.5)
