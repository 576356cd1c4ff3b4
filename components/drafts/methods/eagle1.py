"""EAGLE-1 and HASS: one layer that continues the target's own last features (Li et al. 2024, arXiv:2401.15077).

f_t is the target's last hidden state after its final norm, the input of its LM head. Column t pairs f_t with x_{t+1}:
  x = fc([e(x_{t+1}) ; f_t]) with a bias,   f'_{t+1} = Layer(x),   q = head(f'_{t+1}) drafts x_{t+2},
embedding and head being the target's, frozen (`fc_bias: false` leaves the bias out, for vLLM, which has none). The
layer is the target's kind without its first norm: q, k, v and the residual read x itself. f' takes the place of f at
the next step. EAGLE-2 draws a dynamic tree with the same weights.

Loss (their section 3.2): feature_weight * SmoothL1(f'_{t+1}, f_{t+1}) + token_weight * CE(p_{t+2}, q_{t+2}), with 1.0
and 0.1 as in their code; true features go in, so only the first step is trained. Uniform noise from (-noise, noise) on
the features that go in, 0.1 in the paper (their code also multiplies by 512 / length), teaches the layer to live with
its own errors.

Tensor names are the first release's: fc.{weight,bias}, layers.0.* without input_layernorm; the embedding is not saved.
Deviations: fc reads embeddings scaled to the size of the features (`token_scale`, a number of the target's; an engine
that knows no scale needs fc's first half times it); only columns in M_0 (layers.py) are trained; while drafting, the
head is pruned to the draft vocabulary. The noise of a batch follows from its optimiser step and the seed, so that a
resumed run ends with the same bits.

HASS trains EAGLE-1's network in the context it will meet (Zhang et al. 2025, arXiv:2408.15766). Two changes, none to
the network or tensor names:
  harmonised context alignment (their 3.2): n passes. Pass j reads the output of pass j - 1 at the column before, and
    its queries see the target's features at all columns but the last j - 1, and the drafter's own features of passes
    1 .. j - 1 there: what decoding sees at draft depth j - 1. No gradient flows through those features into the pass
    before; the keys and values computed from them do learn.
  harmonised objective distillation (their 3.1): + top_k_weight * sum over the K tokens the target finds most likely of
    -p log q, at every pass. K = 10, weight 1, n = 3 in their code.
Their figure moves features to the right under fixed columns; training_time_test.py draws the same attention rooted
at a column. Deviations: one backward pass through the mean of all passes' losses instead of one each, the same
gradient; passes weigh step_decay^j, 1 by default as theirs.
"""

from __future__ import annotations

from itertools import islice
from typing import ClassVar, Self, final

import torch
from torch import Tensor, nn

from components.drafts.interface import Batch, CommittedPositions, StepLosses
from components.drafts.methods.one_block import ChainDecoder, OneBlockDraft
from components.drafts.methods.training_time_test import select_rows
from components.drafts.network.cached_block import CachedBlock, TokenTable, linear_kernel
from components.drafts.network.layers import (
    AttentionProjections,
    BlockShape,
    OwnEmbedding,
    RmsNorm,
    SwiGlu,
    TargetHead,
    embedded,
    embedding_of,
    initialise,
    norm_weight_of,
    normed_state,
)
from components.drafts.settings import Eagle1Settings, HassSettings
from components.drafts.training.batches import drawn_by_row
from components.drafts.training.losses import (
    Step,
    StepLossAccumulator,
    Teacher,
    row_loss,
    smooth_l1,
    teacher_for_steps,
    top_k_cross_entropy,
)
from components.targets.forward.linear import lay_out
from components.targets.interface import AbstractTarget


def token_scale_of(target: AbstractTarget) -> float:
    """The factor on a target's embeddings before fc.

    Features are as large as the final norm's weight, embeddings often far smaller (the built-in target: 1.5 and 0.14);
    at one size, both halves of fc learn at one pace.
    """
    feature_size, token_size = (
        float(x.float().square().mean().sqrt()) for x in (norm_weight_of(target), target.embedding)
    )
    return feature_size / max(token_size, 1e-6)


@final
class FeatureLayer(nn.Module):
    """The tensors of `layers.0.*`: a Llama layer without input_layernorm."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.self_attn = AttentionProjections(shape, shape.hidden_size)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = SwiGlu(shape)


class FeatureDraft(OneBlockDraft):
    """The network of EAGLE-1 and HASS; they differ in how many passes are trained and by which loss.

    Trained parameters: fc, layers.0.
    """

    def __init__(self, target: AbstractTarget, settings: Eagle1Settings, draft_ids: Tensor) -> None:
        super().__init__(target, settings, draft_ids, settings.chain_depth)
        self.feature_weight, self.token_weight = settings.feature_weight, settings.token_weight
        self.feature_noise, self.noise_seed = settings.feature_noise, settings.init_seed or 0
        self.num_passes, self.top_k, self.top_k_weight = 1, 0, 0.0
        self.head = TargetHead.of(target)
        self.pruned_head = self.head.rows(draft_ids)
        self.token_scale = token_scale_of(target)
        self.fc = nn.Linear(2 * self.shape.hidden_size, self.shape.hidden_size, bias=settings.fc_bias)
        self.layers = nn.ModuleList([FeatureLayer(self.shape)])
        self.embed_tokens = OwnEmbedding(target) if settings.own_embedding else None

    @classmethod
    def build(cls, target: AbstractTarget, settings: Eagle1Settings, draft_ids: Tensor) -> Self:
        """As AbstractDraft."""
        draft = cls(target, settings, draft_ids)
        initialise(draft, torch.Generator().manual_seed(draft.noise_seed))
        draft._start_as_identity()
        return draft.to(target.device)

    @torch.no_grad()
    def _start_as_identity(self) -> None:
        """fc starts as the identity on f, with the token beside it."""
        hidden = self.shape.hidden_size
        if self.fc.bias is not None:
            self.fc.bias.zero_()
        self.fc.weight[:, hidden:] += torch.eye(hidden).to(self.fc.weight)

    @property
    def block(self) -> FeatureLayer:
        return self.layers[0]  # type: ignore[return-value]

    def features(self, taps: Tensor, last: Tensor) -> Tensor:
        """f: the target's last-layer output after its final norm, [..., H] -> float32 [..., H]."""
        return normed_state(self.target, last)

    def attention_inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As OneBlockDraft: the embedding first, then the feature."""
        tokens_in = embedded(self.target, tokens, self.embed_tokens) * self.token_scale
        joined = self.fc(torch.cat((tokens_in, hidden), -1)).float()
        return joined, joined

    def next_step_input(self, output: Tensor) -> Tensor:
        """As OneBlockDraft: no gradient flows into the features of the pass before (HASS, appendix A.1)."""
        return output.detach()

    def draft_logits(self, output: Tensor) -> Tensor:
        logits: Tensor = self.pruned_head(output)
        return logits

    @property
    def student_ids(self) -> None:
        """As AbstractDraft: the head is pruned for drafting alone."""

    def losses(self, batch: Batch) -> StepLosses:
        """The training graph: `num_passes` passes over all reachable columns, teacher-forced."""
        self._decoder = None
        features = self.features(batch.taps, batch.last)
        teacher = teacher_for_steps(self.target, batch, None)
        accumulator = StepLossAccumulator(batch, teacher, self.num_passes, self.settings.normaliser)
        outputs = self.unroll(batch, self._noisy(features, batch), accumulator.roots.rows)
        accumulator.add_steps(
            Step((output, select_rows(features, accumulator.target_columns(step=k))), self._judge)
            for k, output in enumerate(islice(outputs, self.num_passes))
        )
        return accumulator.result(self.settings.step_decay)

    def _judge(self, output: Tensor, feature: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
        """Outputs and the features that they predict [B, R, H] -> the weighted loss [B, R] and logits [B, R, V]."""
        distance, logits = smooth_l1(output, feature), self.head(output)
        loss = self.feature_weight * distance + self.token_weight * row_loss(self.settings.loss, logits, teacher)
        if self.top_k_weight > 0:
            loss = loss + self.top_k_weight * top_k_cross_entropy(logits, teacher.probs, self.top_k)
        return loss, logits

    def _noisy(self, features: Tensor, batch: Batch) -> Tensor:
        """Add training noise to features [B, T, H]; the same optimiser step has the same noise."""
        if not self.training or self.feature_noise == 0:
            return features
        noise = drawn_by_row(batch, self.noise_seed, batch.lengths.tolist(), features.shape)
        return features + (2.0 * noise - 1.0) * self.feature_noise

    def decoder(self, dtype: torch.dtype, kernel: str) -> ChainDecoder:
        """As OneBlockDraft: per input half, fc and the projection to q, k, v become one linear layer."""
        layer, hidden_size = self.block, self.shape.hidden_size
        block = CachedBlock(self.shape, layer.self_attn, layer.post_attention_layernorm, layer.mlp, dtype)
        fuse = self.fc.weight.detach()
        bias = fuse.new_zeros(hidden_size) if self.fc.bias is None else self.fc.bias.detach()
        # Rows of q, k, v first, then x itself, which is the residual.
        fused = torch.cat((block.qkv_weight @ fuse, fuse))
        fused_bias = torch.cat((block.qkv_weight @ bias, bias))
        table = embedding_of(self.target, self.embed_tokens)
        token_part = TokenTable(table, None, fused[:, :hidden_size] * self.token_scale, dtype, fused_bias)
        feature_part = linear_kernel(fused[:, hidden_size:].to(dtype))
        head = linear_kernel(self.pruned_head.weight.to(dtype), self.pruned_head.bias)
        self.kernel = lay_out([feature_part, *block.linears, head], kernel)
        num_qkv = block.qkv_weight.shape[0]

        def features(committed: CommittedPositions) -> Tensor:
            return self.target.final_norm(committed.last.to(self.target.dtype)).to(dtype)

        def inputs(tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
            joined = token_part(tokens) + feature_part(hidden)
            return joined[:, :num_qkv], joined[:, num_qkv:]

        return ChainDecoder(block, features, inputs, lambda output: output, head, head)


@final
class Eagle1(FeatureDraft):
    """EAGLE-1: one pass over true features."""

    method: ClassVar[str] = "eagle1"


@final
class Hass(FeatureDraft):
    """EAGLE-1's network with n passes and the top-K loss."""

    method: ClassVar[str] = "hass"

    def __init__(self, target: AbstractTarget, settings: HassSettings, draft_ids: Tensor) -> None:
        super().__init__(target, settings, draft_ids)
        self.num_passes, self.top_k, self.top_k_weight = settings.passes, settings.top_k, settings.top_k_weight
