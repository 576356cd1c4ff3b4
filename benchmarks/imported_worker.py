"""The other side of imported_parity.py: drafters written by other projects' own classes, and what these say.

Imports nothing of Draftsmith. For each case it writes OUT/CASE/ (config.json, model.safetensors) with random weights,
and OUT/CASE.safetensors: `logits.{k}` [T - 1, N] of teacher-forced step k, or `hidden.0` [T - 1, H] where the head is
the target's; `chains` int64 [T - 1, D], the target ids that its own greedy drafting gives after every position;
`rows.{k}` int64 [R], the columns that logits.{k} [R, N] belong to, where they are not all of them, and `rows.chains`;
`ids` int64 [T], the text, where OUT/CASE/ (or its target/) is a whole model with its own module, and so its own target.

    python imported_worker.py PROJECT SOURCE SAMPLE OUT

PROJECT: eagle (SafeAILab/EAGLE), specforge (sgl-project/SpecForge), medusa (FasterDecoding/Medusa), angelslim
(Tencent/AngelSlim), mimo, transformers or speculators. SOURCE: a checkout of the first four, the folder of
modeling_mimo.py; the others are imported from the environment that runs this, and SOURCE means nothing.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen3Config

DEPTH = 3
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
SPECFORGE: dict[str, dict[str, Any]] = {
    "plain": {},
    "fc_norm": {"fc_norm": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    "llama3": {"rope_parameters": LLAMA3},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    "yarn": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.0}},
    "yarn_by_mscale": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}},
    "own_embedding": {"own_embedding": True},
}
SPECULATORS: dict[str, dict[str, Any]] = {
    "plain": {},
    "before_residual": {"norm_before_residual": True},
    "before_fc": {"norm_before_fc": True, "norm_before_residual": True},
    "fc_norm_and_output": {"fc_norm": True, "norm_output": True},
    "llama3": {"rope": LLAMA3, "norm_before_residual": True},
    "yarn": {"rope": YARN},
    "qwen3": {"qwen3": True, "norm_before_residual": True},
    "own_embedding": {"own_embedding": True},
    "peagle": {"peagle": True},
    "peagle_qwen3_own_embedding": {"peagle": True, "qwen3": True, "own_embedding": True},
}
TINY: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_mtp_layers": 1,
}
SHARED_HEAD = ("model.layers.{n}.", "shared_head.norm.", {})
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "names": SHARED_HEAD,
    },
    "glm4_moe": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "n_routed_experts": 4,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        "names": SHARED_HEAD,
    },
    "qwen3_next": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "shared_expert_intermediate_size": 48,
        "layer_types": ["full_attention"] * 8,
        "mtp_layer_types": ["full_attention"],
        "names": (
            "mtp.layers.0.",
            "norm.",
            {
                "mtp.layers.0.enorm.": "mtp.pre_fc_norm_embedding.",
                "mtp.layers.0.hnorm.": "mtp.pre_fc_norm_hidden.",
                "mtp.layers.0.eh_proj.": "mtp.fc.",
                "mtp.layers.0.norm.": "mtp.norm.",
            },
        ),
    },
    "ernie4_5_moe": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "names": (
            "model.mtp_",
            "",
            {
                "model.mtp_enorm.": "model.mtp_emb_norm.0.",
                "model.mtp_hnorm.": "model.mtp_hidden_norm.0.",
                "model.mtp_eh_proj.": "model.mtp_linear_proj.0.",
                **{
                    f"model.mtp_{part}": f"model.mtp_block.0.{part}"
                    for part in ("self_attn.", "mlp.", "input_", "post_")
                },
            },
        ),
    },
}
"""Families with a module -> their sizes; names: its prefix, last norm ("": the model's), what is called otherwise."""


def draw(model: torch.nn.Module, embedding: Tensor, own: bool = False) -> None:
    """Random weights, wide enough that every part shows. embedding: the target's, which is taken over unless `own`."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed_tokens" in name:
                noise = embedding.std() * torch.randn(embedding.shape, generator=generator)
                weight.copy_(embedding + noise if own else embedding)
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


def greedy(logits: Tensor, offsets: Tensor | None = None) -> Tensor:
    """The likeliest target ids [...] of logits [..., N]; offsets: d2t, where the vocabulary is cut."""
    best = logits.argmax(-1)
    return best if offsets is None else best + offsets[best]


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
    text = json.dumps({"model_type": "llama", "torch_dtype": "float32", **config})
    (folder / "config.json").write_text(text, encoding="utf-8")


def shifted(ids: Tensor, step: int) -> Tensor:
    """The tokens that teacher-forced step `step` reads, [1, T - 1]; zeros behind the end."""
    return torch.cat((ids[1 + step :], ids.new_zeros(step)))[None]


def specforge(source: Path, shape: dict[str, Any], sample: dict[str, Tensor], out: Path) -> None:
    """SpecForge's EAGLE-3: its training steps, on the text and on its own draft tokens; and its P-EAGLE."""
    sys.path.insert(0, str(source))
    from specforge.modeling.draft.llama3_eagle import (  # type: ignore[import-not-found]
        LlamaForCausalLMEagle3,
        prepare_decoder_attention_mask,
    )

    ids = sample["ids"]
    length = len(ids) - 1
    positions = torch.arange(length)[None]
    for name, given in SPECFORGE.items():
        settings = {**given}
        own = settings.pop("own_embedding", False)
        config = LlamaConfig(
            **block(shape),
            architectures=["LlamaForCausalLMEagle3"],
            draft_vocab_size=len(sample["draft_ids"]),
            **settings,
        )
        model = LlamaForCausalLMEagle3(config, attention_backend="sdpa").float().eval()
        draw(model, sample["embed"], own)
        for field, tensor in vocabulary(sample, shape["vocab_size"]).items():
            getattr(model, field).copy_(tensor)
        model.save_pretrained(out / f"specforge-{name}")
        with torch.no_grad():
            hidden = model.project_hidden_states(sample["taps"][None, :-1])
            seen = torch.ones(1, length, dtype=torch.bool)
            mask = prepare_decoder_attention_mask(seen, (1, length), hidden, 0)
            start, found = hidden, {}
            for own_tokens in (False, True):  # the text's tokens, then those that each column has drafted
                cache: list[list[Tensor]] = [[], []]
                hidden, inputs, drafted = start, shifted(ids, 0), []
                for step in range(DEPTH):
                    hidden = model.backbone(model.embed_input_ids(inputs), hidden, cache, mask, positions)
                    logits = model.compute_logits(hidden)
                    drafted.append(greedy(logits[0], model.d2t))
                    inputs = drafted[-1][None] if own_tokens else shifted(ids, step + 1)
                    if not own_tokens:
                        found[f"logits.{step}"] = logits[0].contiguous()
            found["chains"] = torch.stack(drafted, 1)
        save_file(found, out / f"specforge-{name}.safetensors")
    specforge_parallel(source, shape, sample, out)


def specforge_parallel(source: Path, shape: dict[str, Any], sample: dict[str, Tensor], out: Path) -> None:
    """SpecForge's P-EAGLE: all depths of its training pass, from every column.

    Attention is not compiled; the loss, whose kernel needs a GPU, is left out.
    """
    package_of("specforge.core", loss={"LogSoftmaxLoss": types.SimpleNamespace(apply=lambda logits, *_: logits.sum())})
    training = module_at("peagle_training", source / "specforge" / "algorithms" / "peagle" / "model.py")
    from specforge.modeling.draft import peagle  # type: ignore[import-not-found]
    from torch.nn.attention.flex_attention import flex_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, **options: Any) -> Any:
        return flex_attention(query, key, value, block_mask=block_mask, enable_gqa=True)

    peagle.compile_friendly_flex_attention = attend
    ids, length = sample["ids"], len(sample["ids"]) - 1
    config = LlamaConfig(**{**block(shape), "num_hidden_layers": 2}, draft_vocab_size=len(sample["draft_ids"]))
    config.mask_token_id = 5
    model = peagle.PEagleDraftModel(config).float().eval()
    draw(model, sample["embed"])
    for field, tensor in vocabulary(sample, shape["vocab_size"]).items():
        getattr(model, field).copy_(tensor)
    model.save_pretrained(out / "specforge-peagle")
    drawn = remembered(training, "generate_cod_sample_indices")
    caught: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda *call: caught.append(call[2].detach().clone()))
    with torch.no_grad():
        training.OnlinePEagleModel(model, config.mask_token_id, num_depths=DEPTH, down_sample_ratio=1.0)(
            input_ids=ids[None, 1:],
            attention_mask=torch.ones(1, length, dtype=torch.long),
            target=torch.zeros(1, length, shape["vocab_size"]),
            loss_mask=torch.ones(1, length),
            hidden_states=sample["taps"][None, :-1],
        )
    save_file(by_depth(caught[0][0], *drawn[-1], model.d2t), out / "specforge-peagle.safetensors")


def remembered(module: Any, name: str) -> list[Any]:
    """What a module's function returns, from now on."""
    said: list[Any] = []
    function = getattr(module, name)

    def remember(*args: Any, **options: Any) -> Any:
        said.append(function(*args, **options))
        return said[-1]

    setattr(module, name, remember)
    return said


def by_depth(logits: Tensor, columns: Tensor, depths: Tensor, offsets: Tensor) -> dict[str, Tensor]:
    """Rows of a P-EAGLE pass by depth; it takes columns of its choice, of which one may lie before the first.

    Chains are those of the columns from which every depth was drafted.
    """
    found, tokens = {}, []
    for step in range(DEPTH):
        inside = (depths == step) & (columns >= 0)
        found |= {f"logits.{step}": logits[inside].contiguous(), f"rows.{step}": columns[inside].clone()}
        tokens.append(dict(zip(columns[inside].tolist(), greedy(logits[inside], offsets).tolist(), strict=True)))
    rows = sorted(set.intersection(*(set(one) for one in tokens)))
    chains = torch.tensor([[one[row] for one in tokens] for row in rows])
    return found | {"chains": chains, "rows.chains": torch.tensor(rows)}


def speculators(source: Path, shape: dict[str, Any], sample: dict[str, Tensor], out: Path) -> None:
    """speculators' EAGLE-3 and P-EAGLE: the logits of their training steps."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
    from speculators.models.peagle import core as peagle
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    drawn = remembered(peagle, "generate_cod_sample_indices")
    ids = sample["ids"]
    length = len(ids) - 1
    for name, settings in SPECULATORS.items():
        flags = {"norm_before_residual": False, **settings}
        rope = flags.pop("rope", {"rope_type": "default", "rope_theta": 10000.0})
        parallel, own = flags.pop("peagle", False), flags.pop("own_embedding", False)
        kind = Qwen3Config if flags.pop("qwen3", False) else LlamaConfig
        sizes = {**block(shape), "pad_token_id": None, "num_hidden_layers": 2 if parallel else 1}
        layer = kind(**sizes, head_dim=shape["head_dim"], rope_parameters=rope)
        if parallel:
            flags["mask_token_id"] = 5
        layer._attn_implementation = "sdpa"  # their default, flex attention, is for GPUs
        config = (PEagleSpeculatorConfig if parallel else Eagle3SpeculatorConfig)(
            transformer_layer_config=layer,
            draft_vocab_size=len(sample["draft_ids"]),
            eagle_aux_hidden_state_layer_ids=sample["tap_layers"].tolist(),
            speculators_config=SpeculatorsConfig(
                algorithm="peagle" if parallel else "eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTH)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
            **flags,
        )
        model = (PEagleDraftModel if parallel else Eagle3DraftModel)(config=config).float().eval()
        draw(model, sample["embed"], own)
        model.load_state_dict(vocabulary(sample, shape["vocab_size"]), strict=False)
        model.save_pretrained(out / f"speculators-{name}")
        caught: list[Tensor] = []
        hook = model.lm_head.register_forward_hook(lambda *call, caught=caught: caught.append(call[2].clone()))
        depth: dict[str, Any] = {"ttt_steps": DEPTH}
        if parallel:  # its forward pass computes the loss too
            depth = {
                "num_depths": DEPTH,
                "down_sample_ratio": 1.0,
                "verifier_last_hidden_states": sample["last"][None, :-1],
            }
            depth["loss_config"] = resolve_loss_config("kl_div", "eager")
        given = {
            "hidden_states": sample["taps"][None, :-1],
            "document_ids": torch.zeros(1, length, dtype=torch.long),
            "position_ids": torch.arange(1, length + 1)[None],
        }
        with torch.no_grad():
            model(input_ids=ids[None, 1:], **given, **depth)
            found = {f"logits.{step}": logits[0].contiguous() for step, logits in enumerate(caught)}
            if parallel:  # all depths in one pass
                found = by_depth(caught[0][0], *drawn[-1], model.d2t)
            else:  # once more, each step after the first reading what its column has drafted
                caught.clear()
                own_tokens = model.embed_tokens.register_forward_pre_hook(
                    lambda module, read, caught=caught, offsets=model.d2t: (
                        greedy(caught[-1], offsets) if caught else read[0]
                    )
                )
                model(input_ids=ids[None, 1:], **given, **depth)
                own_tokens.remove()
                found["chains"] = torch.stack([greedy(logits[0], model.d2t) for logits in caught], 1)
        hook.remove()
        save_file(found, out / f"speculators-{name}.safetensors")
    speculators_module(shape, ids, out / "speculators-mtp")


def speculators_module(shape: dict[str, Any], ids: Tensor, folder: Path) -> None:
    """A module of Qwen3-Next as speculators' converter takes it out of a model, with other weights, as after training.

    Its training runs every step over all columns alone, at the same positions; engines keep a cache. So its forward
    pass is asked for step 0, and chains come from its layer with a cache, one position further at each step.
    """
    from speculators.convert.mtp.converter import MTPConverter
    from speculators.models.mtp import MTPDraftModel
    from transformers import AutoModelForCausalLM, DynamicCache

    settings = {**FAMILIES["qwen3_next"]}
    settings.pop("names")
    config = AutoConfig.for_model("qwen3_next", **TINY, **settings)
    main = AutoModelForCausalLM.from_config(config).float().eval()
    wide = torch.randn(config.vocab_size, config.hidden_size, generator=torch.Generator().manual_seed(7))
    draw(main, wide)
    target = folder / "target"
    main.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((Path(shape["folder"]) / name).read_bytes())
    file = target / "model.safetensors"
    stored = load_file(file)
    last = f"model.layers.{config.num_hidden_layers - 1}."
    module = {name.replace(last, "mtp.layers.0."): t.clone() for name, t in stored.items() if name.startswith(last)}
    norms = ("mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding")
    module |= {f"{name}.weight": torch.zeros(config.hidden_size) for name in norms}
    module["mtp.fc.weight"] = torch.zeros(config.hidden_size, 2 * config.hidden_size)
    save_file(stored | module, file, metadata={"format": "pt"})
    MTPConverter().convert(target, folder, str(target), num_speculative_steps=DEPTH, validate=False)
    model = MTPDraftModel.from_pretrained(str(folder)).float().eval()
    draw(model.mtp_layers, wide)
    model.save_pretrained(folder)
    layer, chains = model.mtp_layers[0], []
    with torch.no_grad():
        hidden = main(ids[None], output_hidden_states=True).hidden_states[-1]
        logits = model(input_ids=ids[None], hidden_states=hidden)[0][0][0]
        for end in range(1, len(ids)):
            cache, tokens, at, state = DynamicCache(), [], torch.arange(end)[None], hidden[:, :end]
            read = ids[None, 1 : end + 1]
            for _ in range(DEPTH):
                state = layer(
                    hidden_states=state,
                    token_embeddings=model.embed_tokens(read),
                    position_ids=at,
                    position_embeddings=model.rotary_emb(state, at),
                    past_key_values=cache,
                    use_cache=True,
                )[:, -1:]
                tokens.append(greedy(model.lm_head(state)[0, -1]))
                read, at = tokens[-1][None, None], at[:, -1:] + 1
            chains.append(torch.stack(tokens))
    found = {"ids": ids, "logits.0": logits.contiguous(), "rows.0": torch.arange(len(logits))}
    save_file(found | {"chains": torch.stack(chains)}, f"{folder}.safetensors")


def module_at(name: str, file: Path, package: str = "") -> Any:
    """A file of a checkout as a module, without the packages around it. package: the name that it imports from."""
    spec = importlib.util.spec_from_file_location(f"{package}.{name}" if package else name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def package_of(name: str, **modules: dict[str, Any]) -> None:
    """A package in which a file of a checkout finds its neighbours: module -> the names that it asks for."""
    package = types.ModuleType(name)
    package.__path__ = []
    sys.modules[name] = package
    for inside, names in modules.items():
        module = types.ModuleType(f"{name}.{inside}")
        vars(module).update(names)
        sys.modules[f"{name}.{inside}"] = module


def medusa(source: Path, shape: dict[str, Any], sample: dict[str, Tensor], out: Path) -> None:
    """FasterDecoding's heads on the target itself: their forward pass, the language model below being transformers'.

    Their layers of one head are one module, repeated; heads of one layer are compared, and heads whose two layers have
    the same weights.
    """
    target = Path(shape["folder"])
    package_of(
        "medusa",
        modeling_llama_kv={"LlamaForCausalLM": LlamaForCausalLM},
        modeling_mistral_kv={"MistralForCausalLM": LlamaForCausalLM},
        utils={},
        kv_cache={"initialize_past_key_values": None},
        medusa_choices={},
    )
    theirs = module_at("medusa_model", source / "medusa" / "model" / "medusa_model.py", "medusa")
    theirs.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda name: None)
    language = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    for layers in (1, 2):
        config = AutoConfig.from_pretrained(target)
        config.medusa_num_heads, config.medusa_num_layers = DEPTH, layers
        model = theirs.MedusaModelLlama(config).float().eval()
        model.load_state_dict(language.state_dict(), strict=False)
        draw(model.medusa_head, sample["embed"])
        own = {"medusa_num_heads": DEPTH, "medusa_num_layers": layers, "model_type": "medusa"}
        folder = out / f"medusa-{layers}"
        folder.mkdir()
        save_file({name: t.clone() for name, t in model.medusa_head.state_dict().items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(own), encoding="utf-8")
        with torch.no_grad():
            logits = model(sample["ids"][None, :-1], medusa_forward=True)  # [heads, 1, T - 1, V]
        found = {f"logits.{k}": logits[k, 0].contiguous() for k in range(DEPTH)}
        save_file(found | {"chains": greedy(logits[:, 0]).T.contiguous()}, out / f"medusa-{layers}.safetensors")


def angelslim(source: Path, shape: dict[str, Any], sample: dict[str, Tensor], out: Path) -> None:
    """AngelSlim's EAGLE-3 as its own decoding runs it."""
    folder = source / "angelslim" / "compressor" / "speculative" / "inference" / "models" / "eagle3"
    package_of("angelslim_draft")
    module_at("base_model", folder / "draft" / "base_model.py", "angelslim_draft")
    theirs = module_at("llama3_eagle3", folder / "draft" / "llama3_eagle3.py", "angelslim_draft")
    configs = module_at("configuration_eagle3_model", folder / "configuration_eagle3_model.py")
    kind = next(value for name, value in vars(configs).items() if name.endswith("Config") and name.startswith("Eagle3"))
    ids = sample["ids"]
    config = kind(**block(shape), head_dim=shape["head_dim"], draft_vocab_size=len(sample["draft_ids"]))
    config.pretraining_tp, config.rope_theta, config.rope_scaling = 1, 5000.0, None
    model = theirs.Llama3Eagle3Drafter(config).float().eval()
    draw(model, sample["embed"])
    model.load_state_dict(vocabulary(sample, shape["vocab_size"]), strict=False)
    model.reset()
    said = {**block(shape), "head_dim": shape["head_dim"], "draft_vocab_size": len(sample["draft_ids"])}
    write(
        out / "angelslim",
        model.state_dict(),
        {**said, "rope_theta": 5000.0, "rope_scaling": None, "architectures": ["Eagle3LlamaForCausalLM"]},
    )

    def guess(state: Tensor) -> Tensor:
        best = model.lm_head(model.norm(state))[0, -1].argmax()
        return best + model.d2t[best]

    chains = []
    with torch.no_grad():
        hidden, _, _ = model(sample["taps"][None, :-1], ids[None, 1:], use_cache=True)
        for position in range(len(ids) - 1):
            state, past, _ = model(sample["taps"][None, : position + 1], ids[None, 1 : position + 2], use_cache=True)
            tokens = []
            for step in range(DEPTH):
                tokens.append(guess(state))
                at = torch.tensor([[position + 1 + step]])
                state, past, _ = model(
                    state[:, -1:], tokens[-1][None, None], past_key_values=past, position_ids=at, use_cache=True
                )
            chains.append(torch.stack(tokens))
        found = {"logits.0": model.lm_head(model.norm(hidden))[0].contiguous(), "chains": torch.stack(chains)}
    save_file(found, out / "angelslim.safetensors")


def transformers(source: Path, shape: dict[str, Any], sample: dict[str, Tensor], out: Path) -> None:
    """MTP modules by transformers' own class: new ones on the target, and those in models of other families.

    The embedding at position 0 is zeroed where engines do so for the layout, which the class leaves to its caller; so
    it does the choice whether the next step reads a state before or after the module's last norm.
    """
    from transformers.modeling_layers import MtpModel

    ids = sample["ids"]
    target = LlamaForCausalLM.from_pretrained(shape["folder"], dtype=torch.float32).eval()
    target.config.num_mtp_layers = DEPTH
    model = MtpModel(target, DEPTH).float().eval()
    draw(model.layers, sample["embed"])
    state = stored_modules(model, "model.layers.{n}.", shape["num_layers"], "shared_head.norm.")
    config = {**block(shape), "num_hidden_layers": shape["num_layers"], "rms_norm_eps": shape["rms_norm_eps"]}
    config["intermediate_size"] = shape["intermediate_size"]
    config |= {"head_dim": shape["head_dim"], "num_nextn_predict_layers": DEPTH, "mtp_first_hidden": "post_norm"}
    write(out / "mtp-llama", state, config)
    with torch.no_grad():
        hidden, found, places = sample["normed"][None, :-1], {}, torch.arange(len(ids) - 1)[None]
        for step in range(DEPTH):
            embedded = model.embed_tokens(shifted(ids, step))
            if step == 0:
                embedded[:, 0] = 0.0
            hidden = before_norm(model, step, hidden, places + step, None, inputs_embeds=embedded)
            found[f"logits.{step}"] = model.shared_head(model.layers[step].post_norm(hidden))[0].contiguous()
        chains = []
        for end in range(1, len(ids)):
            read, hidden = ids[: end + 1], sample["normed"][None, :end]
            for step in range(DEPTH):
                embedded = model.embed_tokens(read[None, 1 + step :])
                if step == 0:
                    embedded[:, 0] = 0.0
                hidden = before_norm(model, step, hidden, places[:, :end] + step, None, inputs_embeds=embedded)
                token = greedy(model.shared_head(model.layers[step].post_norm(hidden[:, -1:]))[0])
                read = torch.cat((read, token))
            chains.append(read[-DEPTH:])
    save_file(found | {"chains": torch.stack(chains)}, out / "mtp-llama.safetensors")
    for family, settings in FAMILIES.items():
        own_module(family, {**settings}, ids, Path(shape["folder"]), out / f"own-mtp-{family}")


def before_norm(model: Any, layer: int, hidden: Tensor, places: Tensor, cache: Any, **inputs: Tensor) -> Tensor:
    """A module's output before its last norm."""
    model.layers[layer].use_post_norm = False
    return model.forward_layer(layer, hidden, places, cache, **inputs)


def own_module(family: str, settings: dict[str, Any], ids: Tensor, tokenizer: Path, folder: Path) -> None:
    """A random model of a family with its module in one checkpoint, as transformers reads both from there."""
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.modeling_layers import MtpModel

    names, config = settings.pop("names"), AutoConfig.for_model(family, **TINY, **settings)
    main = AutoModelForCausalLM.from_config(config).float().eval()
    wide = torch.randn(config.vocab_size, config.hidden_size, generator=torch.Generator().manual_seed(7))
    draw(main, wide)
    main.save_pretrained(folder)
    module = MtpModel(main, 1).float()
    draw(module.layers, wide)
    file = folder / "model.safetensors"
    stored = stored_modules(module, names[0], config.num_hidden_layers, names[1])
    for before, after in names[2].items():
        stored = {name.replace(before, after): tensor for name, tensor in stored.items()}
    save_file(load_file(file) | stored, file, metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{config.num_hidden_layers}.*", r"^mtp.*"]
    model = (MtpModel.from_pretrained(main) if names[1] else module).float().eval()  # Ernie's it does not read
    recycles_normed = names[0] in ("mtp.layers.0.", "model.mtp_")
    norm, chains = model.layers[0].post_norm if names[1] else main.model.norm, []
    with torch.no_grad():
        hidden = main(ids[None], output_hidden_states=True).hidden_states[-1]
        places, embedded = torch.arange(len(ids) - 1)[None], model.embed_tokens(ids[None, 1:])
        if not recycles_normed:
            embedded[:, 0] = 0.0
        first = before_norm(model, 0, hidden[:, :-1], places, None, inputs_embeds=embedded)
        for end in range(1, len(ids)):
            cache, tokens = DynamicCache(), []
            at, inputs, state = places[:, :end], embedded[:, :end], hidden[:, :end]
            for _ in range(DEPTH):
                state = before_norm(model, 0, state, at, cache, inputs_embeds=inputs)[:, -1:]
                tokens.append(model.shared_head(norm(state))[0, -1].argmax())
                at, inputs = at[:, -1:] + 1, model.embed_tokens(tokens[-1][None, None])
                state = norm(state) if recycles_normed else state
            chains.append(torch.stack(tokens))
        logits = model.shared_head(norm(first))[0].contiguous()
    save_file({"ids": ids, "logits.0": logits, "chains": torch.stack(chains)}, f"{folder}.safetensors")


def stored_modules(model: Any, prefix: str, num_layers: int, last_norm: str) -> dict[str, Tensor]:
    """The modules as checkpoints are published: under their names, experts one by one."""
    stored = {}
    for layer, module in enumerate(model.layers):
        for name, tensor in module.state_dict().items():
            inside = name.removeprefix("mtp_block.")
            if inside.startswith("post_norm."):
                if not last_norm:
                    continue
                inside = last_norm + inside.removeprefix("post_norm.")
            whole = prefix.format(n=num_layers + layer) + inside
            at, _, part = whole.rpartition(".")
            if part not in ("gate_up_proj", "down_proj"):
                stored[whole] = tensor.clone()
                continue
            for number, expert in enumerate(tensor):
                parts = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True)
                for one, weight in parts if part == "gate_up_proj" else [(part, expert)]:
                    stored[f"{at}.{number}.{one}.weight"] = weight.clone()
    return stored


def mimo(source: Path, shape: dict[str, Any], sample: dict[str, Tensor], out: Path) -> None:
    """MiMo's module by the class that its model was published with; the embedding at position 0 is zeroed as above."""
    package_of("mimo_release", configuration_mimo={"MiMoConfig": Qwen2Config})
    theirs = module_at("modeling_mimo", source / "modeling_mimo.py", "mimo_release")
    ids, length = sample["ids"], len(sample["ids"]) - 1
    sizes = {**block(shape), "num_hidden_layers": shape["num_layers"], "rms_norm_eps": shape["rms_norm_eps"]}
    config = Qwen2Config(**sizes, rope_parameters={"rope_type": "default", "rope_theta": shape["rope_theta"]})
    config._attn_implementation = "sdpa"
    module = theirs.MiMoMTPLayers(config).float().eval()
    draw(module, sample["embed"])
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("bias"):
                weight.zero_()
    state = {f"model.mtp_layers.0.{name}": tensor for name, tensor in module.state_dict().items()}
    write(out / "mtp-mimo", state, {**sizes, "rope_theta": shape["rope_theta"], "model_type": "mimo"})
    embedded, places = torch.nn.functional.embedding(ids[None, 1:], sample["embed"]), torch.arange(length)[None]
    embedded[:, 0] = 0.0
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    rotary = theirs.Qwen2Model(config).rotary_emb(embedded, places)
    with torch.no_grad():
        said = module(embedded, sample["normed"][None, :-1], mask, places, position_embeddings=rotary)
    hidden = said if isinstance(said, Tensor) else said.last_hidden_state
    logits = hidden[0] @ sample["head"].T
    save_file({"logits.0": logits, "chains": greedy(logits)[:, None]}, out / "mtp-mimo.safetensors")


def main() -> None:
    """Write the cases of one project."""
    project, source, file, out = sys.argv[1:]
    torch.set_num_threads(1)
    with safe_open(file, framework="pt") as opened:
        shape = json.loads(opened.metadata()["shape"])
    projects = {
        "eagle": eagle,
        "specforge": specforge,
        "medusa": medusa,
        "angelslim": angelslim,
        "mimo": mimo,
        "transformers": transformers,
        "speculators": speculators,
    }
    projects[project](Path(source), shape, load_file(file), Path(out))


if __name__ == "__main__":
    main()
