"""The other side of imported_parity.py: drafters written by other projects' own classes, and what these say.

Imports nothing of Draftsmith. For each case it writes OUT/CASE/ (config.json, model.safetensors) with random weights,
and OUT/CASE.safetensors: `logits.{k}` [T - 1, N] of teacher-forced step k, or `hidden.0` [T - 1, H] where the head is
the target's; `chains` int64 [T - 1, 3], the target ids that its own greedy drafting gives after every position.

    python imported_worker.py PROJECT SOURCE SAMPLE OUT

PROJECT: eagle (SafeAILab/EAGLE), specforge (sgl-project/SpecForge) or speculators. SOURCE: a checkout of the first two;
speculators is imported from the environment that runs this.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

DEPTH = 3
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SPECFORGE: dict[str, dict[str, Any]] = {
    "plain": {},
    "fc_norm": {"fc_norm": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    "llama3": {"rope_parameters": LLAMA3},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
}
SPECULATORS: dict[str, dict[str, Any]] = {
    "plain": {},
    "before_residual": {"norm_before_residual": True},
    "before_fc": {"norm_before_fc": True, "norm_before_residual": True},
    "fc_norm_and_output": {"fc_norm": True, "norm_output": True},
    "llama3": {"rope": LLAMA3, "norm_before_residual": True},
}


def draw(model: torch.nn.Module, embedding: Tensor) -> None:
    """Random weights, wide enough that every part shows; the embedding is the target's."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed_tokens" in name:
                weight.copy_(embedding)
            elif weight.ndim > 1:
                weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
            elif "bias" in name:
                weight.normal_(0.0, 0.3, generator=generator)
            else:
                weight.uniform_(0.6, 1.4, generator=generator)


def vocabulary(sample: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """d2t as offsets and t2d, of the sample's draft ids."""
    ids = sample["draft_ids"]
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}


def block(shape: dict[str, Any]) -> dict[str, Any]:
    """A Llama configuration as wide as the target, with heads of its own."""
    names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")
    return {
        **{name: shape[name] for name in names},
        "intermediate_size": shape["intermediate_size"] // 2,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }


def eagle(source: Path, shape: dict[str, Any], sample: dict[str, Tensor], out: Path) -> None:
    """EAGLE-3 and EAGLE-1 as SafeAILab's models decode."""
    sys.path.insert(0, str(source / "eagle" / "model"))
    without = types.ModuleType("utils")  # only its logits processor is asked for, and greedy drafting takes none
    without.prepare_logits_processor = None  # type: ignore[attr-defined]
    sys.modules["utils"] = without
    import cnets  # type: ignore[import-not-found]
    import cnets1  # type: ignore[import-not-found]
    import configs  # type: ignore[import-not-found]

    ids = sample["ids"]

    def built(module: Any, bias: bool, **more: Any) -> Any:
        config = configs.EConfig(**block(shape), **more)
        config.rope_scaling, config.rope_theta, config.pretraining_tp = None, 10000.0, 1
        model = module.Model(config, bias=bias).eval()
        draw(model, sample["embed"])
        return model

    def chains(model: Any, features: Tensor, guess: Any) -> Tensor:
        rows = []
        for position in range(len(ids) - 1):
            model.reset()
            said, past = model(features[None, : position + 1], ids[None, 1 : position + 2], use_cache=True)
            tokens, hidden = [], said[:, -1:]
            for step in range(DEPTH):
                token = guess(hidden)
                tokens.append(token)
                at = torch.tensor([[position + 1 + step]])
                hidden, past = model(hidden, token[None, None], past_key_values=past, position_ids=at, use_cache=True)
            rows.append(torch.stack(tokens))
        return torch.stack(rows)

    with torch.no_grad():
        third = built(cnets, False, draft_vocab_size=len(sample["draft_ids"]))
        for name, tensor in vocabulary(sample, shape["vocab_size"]).items():
            getattr(third, name).copy_(tensor)
        config = {**block(shape), "draft_vocab_size": len(sample["draft_ids"])}
        write(out / "eagle3", third.state_dict(), {**config, "architectures": ["LlamaForCausalLMEagle3"]})
        third.reset()
        hidden, _ = third(sample["taps"][None, :-1], ids[None, 1:], use_cache=True)

        def guess(state: Tensor) -> Tensor:
            best = third.lm_head(third.norm(state))[0, -1].argmax()
            return best + third.d2t[best]

        found = {"logits.0": third.lm_head(third.norm(hidden))[0], "chains": chains(third, sample["taps"], guess)}
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, out / "eagle3.safetensors")

        first = built(cnets1, True)
        write(out / "eagle1", first.state_dict(), {**block(shape), "architectures": ["LlamaForCausalLMEagle"]})
        first.reset()
        hidden, _ = first(sample["normed"][None, :-1], input_ids=ids[None, 1:], use_cache=True)
        drafted = chains(first, sample["normed"], lambda state: (state[0, -1] @ sample["head"].T).argmax())
        save_file({"hidden.0": hidden[0].contiguous(), "chains": drafted}, out / "eagle1.safetensors")


def write(folder: Path, state: dict[str, Tensor], config: dict[str, Any]) -> None:
    """A checkpoint as that project's users publish it."""
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    text = json.dumps({**config, "model_type": "llama", "torch_dtype": "float32"})
    (folder / "config.json").write_text(text, encoding="utf-8")


def shifted(ids: Tensor, step: int) -> Tensor:
    """The tokens that teacher-forced step `step` reads, [1, T - 1]; zeros behind the end."""
    return torch.cat((ids[1 + step :], ids.new_zeros(step)))[None]


def specforge(source: Path, shape: dict[str, Any], sample: dict[str, Tensor], out: Path) -> None:
    """SpecForge's EAGLE-3: two teacher-forced steps."""
    sys.path.insert(0, str(source))
    from specforge.modeling.draft.llama3_eagle import (  # type: ignore[import-not-found]
        LlamaForCausalLMEagle3,
        prepare_decoder_attention_mask,
    )

    ids = sample["ids"]
    length = len(ids) - 1
    positions = torch.arange(length)[None]
    for name, settings in SPECFORGE.items():
        config = LlamaConfig(
            **block(shape),
            architectures=["LlamaForCausalLMEagle3"],
            draft_vocab_size=len(sample["draft_ids"]),
            **settings,
        )
        model = LlamaForCausalLMEagle3(config, attention_backend="sdpa").float().eval()
        draw(model, sample["embed"])
        for field, tensor in vocabulary(sample, shape["vocab_size"]).items():
            getattr(model, field).copy_(tensor)
        model.save_pretrained(out / f"specforge-{name}")
        with torch.no_grad():
            hidden = model.project_hidden_states(sample["taps"][None, :-1])
            seen = torch.ones(1, length, dtype=torch.bool)
            mask = prepare_decoder_attention_mask(seen, (1, length), hidden, 0)
            cache: list[list[Tensor]] = [[], []]
            found = {}
            for step in range(2):
                embedded = model.embed_input_ids(shifted(ids, step))
                hidden = model.backbone(embedded, hidden, cache, mask, positions)
                found[f"logits.{step}"] = model.compute_logits(hidden)[0].contiguous()
        save_file(found, out / f"specforge-{name}.safetensors")


def speculators(source: Path, shape: dict[str, Any], sample: dict[str, Tensor], out: Path) -> None:
    """speculators' EAGLE-3: the logits of its training steps."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    ids = sample["ids"]
    length = len(ids) - 1
    for name, settings in SPECULATORS.items():
        flags = {"norm_before_residual": False, **settings}
        rope = flags.pop("rope", {"rope_type": "default", "rope_theta": 10000.0})
        layer = LlamaConfig(**{**block(shape), "pad_token_id": None}, rope_parameters=rope)
        layer._attn_implementation = "sdpa"  # their default, flex attention, is for GPUs
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=len(sample["draft_ids"]),
            eagle_aux_hidden_state_layer_ids=sample["tap_layers"].tolist(),
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTH)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
            **flags,
        )
        model = Eagle3DraftModel(config=config).float().eval()
        draw(model, sample["embed"])
        model.load_state_dict(vocabulary(sample, shape["vocab_size"]), strict=False)
        model.save_pretrained(out / f"speculators-{name}")
        caught: list[Tensor] = []
        hook = model.lm_head.register_forward_hook(lambda *call, caught=caught: caught.append(call[2].detach().clone()))
        with torch.no_grad():
            model(
                hidden_states=sample["taps"][None, :-1],
                input_ids=ids[None, 1:],
                document_ids=torch.zeros(1, length, dtype=torch.long),
                position_ids=torch.arange(1, length + 1)[None],
                ttt_steps=DEPTH,
            )
        hook.remove()
        found = {f"logits.{step}": logits[0].contiguous() for step, logits in enumerate(caught)}
        save_file(found, out / f"speculators-{name}.safetensors")


def main() -> None:
    """Write the cases of one project."""
    project, source, file, out = sys.argv[1:]
    torch.set_num_threads(1)
    with safe_open(file, framework="pt") as opened:
        shape = json.loads(opened.metadata()["shape"])
    projects = {"eagle": eagle, "specforge": specforge, "speculators": speculators}
    projects[project](Path(source), shape, load_file(file), Path(out))


if __name__ == "__main__":
    main()
