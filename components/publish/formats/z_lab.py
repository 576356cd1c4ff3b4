"""DFlash and DSpark in the layouts of z-lab and DeepSpec, which SGLang, MNN's exporter and TensorRT-LLM read.

All fields are at the top of config.json, as Qwen3's; z-lab has the mask token and the tapped layers of DFlash in
`dflash_config`, DeepSpec those of DSpark and its heads beside the block's. `target_layer_ids` counts outputs of layers:
id i is hidden_states[i + 1]. Their readers take the embedding and the whole LM head from the target, so that neither is
written and a drafter of a part of the vocabulary is refused: it would draft other tokens than were measured. Which row
drafts first is no field: the mask after the newest token in DFlash, the newest token's own in DSpark.
"""

from __future__ import annotations

from typing import Any, final

from components.contract import UserError
from components.drafts.network.layers import rows_unlike
from components.outside_json import JsonObject
from components.publish.formats.checkpoint import Checkpoint, Config, Spec
from components.publish.formats.dflash import (
    HEAD_FACTS,
    head_fields,
    mask_token_of,
    network_specs,
    read_settings,
    refuse_other_block,
)
from components.publish.formats.eagle3 import draft_vocab_size
from components.publish.formats.interface import (
    AbstractLayout,
    DrafterState,
    Source,
    own_embedding,
    settings_of,
    without_vocabulary,
)
from components.publish.formats.llama_block import (
    COUNT,
    Fact,
    block_config,
    check_architecture,
    check_block,
    check_facts,
    check_positions,
    check_width,
    own_block,
)
from components.targets.shape import TargetShape, tap_layers_fault

OWN, LAYERS = "dflash_config", "target_layer_ids"
ARCHITECTURES = ("DFlashDraftModel", "Qwen3DSparkModel")
FACTS: dict[str, Fact] = {
    "num_target_layers": COUNT,
    "block_size": Fact(int, least=2, most=17),
    "mask_token_id": Fact(int, least=0),
}


@final
class ZLabLayout(AbstractLayout):
    """See the module docstring."""

    format = "z-lab"
    methods = ("dflash", "dspark")

    def lay_out(self, drafter: DrafterState, source: Source) -> Checkpoint:
        shape, settings, is_dspark = source.shape, settings_of(drafter), drafter.method == "dspark"
        refuse_other_block(settings, self.format)
        if settings.window:
            raise UserError(f"{self.format}: its readers mask the blocks of a windowed drafter, those here are not")
        if settings.sample_from_anchor != is_dspark:
            raise UserError(
                f"{self.format}: its {drafter.method} drafts first from"
                f" {'the newest token' if is_dspark else 'the mask after the newest token'}, and this one was trained"
                f" otherwise: say sample_from_anchor: {str(is_dspark).lower()}"
            )
        if (drafted := draft_vocab_size(drafter, shape.vocab_size)) != shape.vocab_size:
            raise UserError(
                f"{self.format}: its readers draft from the target's whole LM head, and this drafter from {drafted} of"
                f" {shape.vocab_size} tokens: say draft_vocab_size: {shape.vocab_size} in drafts.train_draft"
            )
        fields: JsonObject = {
            "mask_token_id": mask_token_of(settings, shape),
            LAYERS: [one - 1 for one in drafter.tap_layers or shape.tap_layers],
        }
        block, scaling = block_config(drafter, shape, settings.num_layers), settings.rope_scaling or {}
        config: JsonObject = {
            "architectures": [ARCHITECTURES[is_dspark]],
            "model_type": "qwen3",
            **block,
            "layer_types": ["full_attention"] * settings.num_layers,
            "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": block["rope_theta"]},
            "num_target_layers": shape.num_layers,
            "block_size": settings.block_size,
            **(fields if is_dspark else {OWN: fields}),
            **head_fields(drafter, settings),
            **({"num_anchors": settings.max_anchors} if is_dspark else {}),
        }
        return Checkpoint(config, without_vocabulary(drafter.tensors))

    def recognises(self, config: Config, names: frozenset[str]) -> bool:
        return "speculators_model_type" not in config and (
            OWN in config or any(one in str(config.get("architectures")) for one in ("DFlash", "DSpark"))
        )

    def check_config(self, config: Config, location: str) -> None:
        at = f"{location}/config.json"
        check_architecture(config, ARCHITECTURES, location)
        check_facts(config, {"model_type": Fact(str, only=("qwen3",))}, location)
        check_block(config, location)
        if any(one != "full_attention" for one in config.get("layer_types") or []):
            raise UserError(f"{at}: layer_types asks for a window; drafters here attend to everything")
        if not _is_dspark(config) and not isinstance(config.get(OWN), dict):
            raise UserError(f"{at}: {OWN} is missing, or no mapping; it names the mask token and the tapped layers")
        fields = _fields(config)
        check_facts(fields, FACTS | (HEAD_FACTS if _is_dspark(config) else {}), location)
        if fields["mask_token_id"] >= config["vocab_size"]:
            raise UserError(
                f"{at}: mask_token_id is {fields['mask_token_id']}, the vocabulary has {config['vocab_size']} tokens"
            )
        ids: Any = fields.get(LAYERS)
        numbers = isinstance(ids, list) and all(type(one) is int for one in ids)
        if not numbers or tap_layers_fault([one + 1 for one in ids]) or ids[-1] + 1 >= fields["num_target_layers"]:
            raise UserError(
                f"{at}: {LAYERS} is {ids!r:.60}, must be ascending layers before the last of"
                f" {fields['num_target_layers']}"
            )

    def expected(self, config: Config) -> dict[str, Spec]:
        table = Spec((int(config["vocab_size"]), int(config["hidden_size"])), optional=True)
        rank = int(config["markov_rank"]) if _is_dspark(config) else 0
        specs = network_specs(config, len(_fields(config)[LAYERS]), int(config["vocab_size"]), rank)
        return specs | {"embed_tokens.weight": table, "lm_head.weight": table}

    def check_target(self, config: Config, shape: TargetShape, location: str) -> None:
        check_positions(config, shape, location)
        check_width(config, shape, location)
        if config["num_target_layers"] != shape.num_layers:
            raise UserError(
                f"{location}/config.json: num_target_layers is {config['num_target_layers']}, the target has"
                f" {shape.num_layers} layers: it was made for another target"
            )

    def drafter_state(self, checkpoint: Checkpoint, source: Source) -> DrafterState:
        config, tensors, fields = checkpoint.config, dict(checkpoint.tensors), _fields(checkpoint.config)
        head = tensors.pop("lm_head.weight", None)
        if head is not None and bool(rows_unlike(head, source.head()).count_nonzero()):
            raise UserError(f"{self.format}: lm_head.weight is its own, and the drafter here has the target's")
        method, taps = "dspark" if _is_dspark(config) else "dflash", tuple(one + 1 for one in fields[LAYERS])
        settings = read_settings(method, fields, config) | {"sample_from_anchor": _is_dspark(config)}
        settings |= own_block(config, source.shape, self.format) | own_embedding(tensors, source)
        return DrafterState(method, settings, tensors, tap_layers=taps)


def _is_dspark(config: Config) -> bool:
    return bool(config["architectures"][0] == ARCHITECTURES[1])


def _fields(config: Config) -> Config:
    """The fields that are not the block's, from where they stand."""
    return {**config, **(config.get(OWN) or {})}
