"""Presets for the collections of conversations that drafters are usually trained on: repository, licence, fields.

A preset holds no rows. It names a split of a hub repository, which is streamed under `draftsmith run --online`; with a
`path:` the same preset reads a copy of its files. Row counts are those stated by the publisher.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

ChatPresetName = Literal["eaglechat", "sharegpt", "ultrachat", "smoltalk-chinese", "perfectblend", "magpie"]


class ChatPreset(BaseModel):
    """One collection of conversations.

    repository: hub id. split: the split to read.
    fields: the possible fields of the turns; a row with none of them comes from another file and is refused.
    language: the language of all rows, "" for several. domain_field: the row's field that names its domain.
    licence: as stated by the publisher.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: ChatPresetName
    about: str
    repository: str
    split: str
    fields: tuple[str, ...]
    licence: str
    language: str = ""
    domain_field: str = ""


CHAT_PRESETS: Final[dict[str, ChatPreset]] = {
    preset.name: preset
    for preset in (
        ChatPreset(
            name="eaglechat",
            about="Bilingual: ShareGPT (120,675), UltraChat (207,865), smoltalk-chinese (710,564), cleaned, mixed.",
            repository="zhaode/EagleChat",
            split="train",
            fields=("conversations",),
            licence="of its parts: Apache-2.0 (ShareGPT as uploaded, smoltalk-chinese), MIT (UltraChat)",
        ),
        ChatPreset(
            name="sharegpt",
            about="120,675 conversations with ChatGPT that people shared, mostly English, unfiltered; many turns.",
            repository="Aeala/ShareGPT_Vicuna_unfiltered",
            split="train",
            fields=("conversations",),
            licence="Apache-2.0 as uploaded; the conversations are their users'",
        ),
        ChatPreset(
            name="ultrachat",
            about="207,865 synthetic English conversations of several turns: the world, writing, given material.",
            repository="HuggingFaceH4/ultrachat_200k",
            split="train_sft",
            fields=("messages", "data"),
            licence="MIT",
            language="en",
        ),
        ChatPreset(
            name="smoltalk-chinese",
            about="710,564 synthetic Chinese conversations of one to three turns: knowledge, planning, code.",
            repository="opencsg/smoltalk-chinese",
            split="train",
            fields=("conversations",),
            licence="Apache-2.0",
            language="zh",
        ),
        ChatPreset(
            name="perfectblend",
            about="Open reproduction of the PerfectBlend mix, 1.4 million rows: chat, mathematics, code; English.",
            repository="mlabonne/open-perfectblend",
            split="train",
            fields=("conversations",),
            licence="Apache-2.0",
        ),
        ChatPreset(
            name="magpie",
            about="300,000 instructions that Llama 3.1 70B wrote to itself, and its answers; English, one turn.",
            repository="Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered",
            split="train",
            fields=("conversations", "instruction"),
            licence="Llama 3.1 Community License",
            language="en",
            domain_field="task_category",
        ),
    )
}
