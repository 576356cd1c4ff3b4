"""Presets of well-known data: conversations that drafters are trained on, and benchmarks that measure them.

A preset holds no rows. It describes a repository on the hub (read only under `draftsmith run --online`) or a local copy
of its files: fields, licence, language and, for a benchmark, how its rows become prompts and the workload of each of
its categories. Row counts are those of the publisher. The templates of benchmarks are our own wording, so published
scores that depend on another wording are not comparable.
"""

from __future__ import annotations

import string
from typing import Final, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

ChatPresetName = Literal["eaglechat", "sharegpt", "ultrachat", "smoltalk-chinese", "perfectblend", "magpie"]
WorkloadPresetName = Literal["mt-bench", "spec-bench", "gsm8k", "math-500", "humaneval", "ceval", "cmmlu"]
Workload = Literal["chat", "code", "maths", "summarisation", "translation", "question-answering", "retrieval"]
Language = Literal["en", "zh"]
"""The language of the answers."""


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


class WorkloadPreset(BaseModel):
    """One benchmark.

    repository: hub id. configs: its subsets, each loaded by name; empty is the default one. split: the split to read.
    files: the files to read where the repository has no loadable subsets. members: the files inside a zip among them.
    category: the row's field with its category; "" takes the name of the subset or file.
    workloads: category -> workload; other categories belong to `workload`.
    turns: fields that may hold a list of user turns; the first that is present counts.
    template: the question, with the row's fields in braces (lower case); unused where the row has `turns`.
    reference: the field with a person's answer, "" without one.
    chat: whether a chat template applies; otherwise the prompt is a text to continue.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    about: str
    repository: str
    split: str
    licence: str
    language: Language
    workload: Workload
    configs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    members: str = ""
    category: str = ""
    workloads: dict[str, Workload] = {}
    turns: tuple[str, ...] = ()
    template: str = ""
    reference: str = ""
    chat: bool = True

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        if not self.turns and not self.fields:
            raise ValueError(f"preset {self.name} has neither turns nor a template with a field in it")
        if self.configs and self.files:
            raise ValueError(f"preset {self.name}: either configs or files")
        return self

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields in the template."""
        return tuple(name for _, name, _, _ in string.Formatter().parse(self.template) if name)

    def workload_of(self, category: str) -> Workload:
        """The workload of a row of this category."""
        return self.workloads.get(category, self.workload)


_CATEGORIES: Final[dict[str, Workload]] = {
    "coding": "code",
    "math": "maths",
    "math_reasoning": "maths",
    "translation": "translation",
    "summarization": "summarisation",
    "qa": "question-answering",
    "rag": "retrieval",
}
"""Categories of MT-Bench and Spec-Bench; writing, roleplay, reasoning, extraction, stem and humanities are chat."""

_CHOICES_ZH: Final = "{question}\nA. {a}\nB. {b}\nC. {c}\nD. {d}\n\n请先简要分析各个选项，再给出正确答案的字母。"

_CEVAL_SUBJECTS: Final = """
accountant advanced_mathematics art_studies basic_medicine business_administration chinese_language_and_literature
civil_servant clinical_medicine college_chemistry college_economics college_physics college_programming
computer_architecture computer_network discrete_mathematics education_science electrical_engineer
environmental_impact_assessment_engineer fire_engineer high_school_biology high_school_chemistry high_school_chinese
high_school_geography high_school_history high_school_mathematics high_school_physics high_school_politics
ideological_and_moral_cultivation law legal_professional logic mao_zedong_thought marxism metrology_engineer
middle_school_biology middle_school_chemistry middle_school_geography middle_school_history middle_school_mathematics
middle_school_physics middle_school_politics modern_chinese_history operating_system physician plant_protection
probability_and_statistics professional_tour_guide sports_science tax_accountant teacher_qualification
urban_and_rural_planner veterinary_medicine
"""

WORKLOAD_PRESETS: Final[dict[str, WorkloadPreset]] = {
    preset.name: preset
    for preset in (
        WorkloadPreset(
            name="mt-bench",
            about="80 open questions in eight categories, each with a second turn that builds on the first answer.",
            repository="HuggingFaceH4/mt_bench_prompts",
            split="train",
            licence="Apache-2.0",
            language="en",
            workload="chat",
            category="category",
            workloads=_CATEGORIES,
            turns=("turns", "prompt"),
            reference="reference",
        ),
        WorkloadPreset(
            name="spec-bench",
            about="480 prompts in six tasks made for speculative decoding: MT-Bench and 80 each of five more.",
            repository="RedHatAI/speculator_benchmarks",
            split="train",
            files=(
                "question.jsonl",
                "math_reasoning.jsonl",
                "qa.jsonl",
                "rag.jsonl",
                "summarization.jsonl",
                "translation.jsonl",
            ),
            licence="Apache-2.0",
            language="en",
            workload="chat",
            category="category",
            workloads=_CATEGORIES,
            turns=("turns", "prompt"),
            reference="reference",
        ),
        WorkloadPreset(
            name="gsm8k",
            about="1,319 word problems of primary-school arithmetic.",
            repository="openai/gsm8k",
            configs=("main",),
            split="test",
            licence="MIT",
            language="en",
            workload="maths",
            template="{question}\n\nThink step by step, then give the final answer as one number.",
            reference="answer",
        ),
        WorkloadPreset(
            name="math-500",
            about="500 competition problems out of MATH.",
            repository="HuggingFaceH4/MATH-500",
            split="test",
            licence="MIT",
            language="en",
            workload="maths",
            template="{problem}\n\nReason step by step and put the final answer within \\boxed{{}}.",
            reference="solution",
        ),
        WorkloadPreset(
            name="humaneval",
            about="164 Python functions to be completed from signature and docstring.",
            repository="openai/openai_humaneval",
            split="test",
            licence="MIT",
            language="en",
            workload="code",
            template="{prompt}",
            reference="canonical_solution",
            chat=False,
        ),
        WorkloadPreset(
            name="ceval",
            about="1,346 Chinese multiple-choice questions in 52 subjects (the validation part, which has answers).",
            repository="ceval/ceval-exam",
            configs=tuple(_CEVAL_SUBJECTS.split()),
            split="val",
            licence="CC-BY-NC-SA-4.0",
            language="zh",
            workload="question-answering",
            workloads={
                "advanced_mathematics": "maths",
                "discrete_mathematics": "maths",
                "high_school_mathematics": "maths",
                "middle_school_mathematics": "maths",
                "probability_and_statistics": "maths",
            },
            template=_CHOICES_ZH,
            reference="answer",
        ),
        WorkloadPreset(
            name="cmmlu",
            about="11,582 Chinese multiple-choice questions in 67 subjects.",
            repository="haonan-li/cmmlu",
            files=("cmmlu_v1_0_1.zip",),
            members="test/*.csv",
            split="test",
            licence="CC-BY-NC-4.0",
            language="zh",
            workload="question-answering",
            workloads={
                "college_actuarial_science": "maths",
                "college_mathematics": "maths",
                "elementary_mathematics": "maths",
                "high_school_mathematics": "maths",
            },
            template=_CHOICES_ZH,
            reference="answer",
        ),
    )
}
