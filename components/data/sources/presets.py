"""Presets of well-known data: conversations that drafters are trained on, and benchmarks that measure them.

A preset holds no rows. It describes a repository on the hub (read only under `draftsmith run --online`) or a local copy
of its files: fields, licence, language and, for a benchmark, how its rows become prompts and the workload of each of
its categories. The row counts beside them are the publisher's. The templates of benchmarks are our own wording, so
published scores that depend on another wording are not comparable.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Final, Literal

ChatPresetName = Literal["eaglechat", "sharegpt", "ultrachat", "smoltalk-chinese", "perfectblend", "magpie"]
WorkloadPresetName = Literal["mt-bench", "spec-bench", "gsm8k", "math-500", "humaneval", "ceval", "cmmlu"]
Workload = Literal["chat", "code", "maths", "summarisation", "translation", "question-answering", "retrieval"]
Language = Literal["en", "zh"]
"""The language of the answers."""


@dataclass(frozen=True)
class ChatPreset:
    """One collection of conversations.

    repository: hub id. split: the split to read.
    fields: the possible fields of the turns; a row with none of them comes from another file and is refused.
    licence: as stated by the publisher.
    language: the language of all rows, "" for several. domain_field: the row's field that names its domain.
    """

    name: ChatPresetName
    repository: str
    split: str
    fields: tuple[str, ...]
    licence: str
    language: str = ""
    domain_field: str = ""


_CONVERSATIONS: Final = ("conversations",)
_SHAREGPT: Final = "Apache-2.0 as uploaded; the conversations are their users'"
_EAGLECHAT: Final = "of its parts: Apache-2.0 (ShareGPT as uploaded, smoltalk-chinese), MIT (UltraChat)"
_LLAMA: Final = "Llama 3.1 Community License"
_MAGPIE: Final = "Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered"
CHAT_PRESETS: Final[dict[str, ChatPreset]] = {
    preset.name: preset
    for preset in (
        # bilingual: ShareGPT (120,675), UltraChat (207,865), smoltalk-chinese (710,564), cleaned, mixed
        ChatPreset("eaglechat", "zhaode/EagleChat", "train", _CONVERSATIONS, _EAGLECHAT),
        # 120,675 conversations with ChatGPT that people shared, mostly English, unfiltered; many turns
        ChatPreset("sharegpt", "Aeala/ShareGPT_Vicuna_unfiltered", "train", _CONVERSATIONS, _SHAREGPT),
        # 207,865 synthetic English conversations of several turns: the world, writing, given material
        ChatPreset("ultrachat", "HuggingFaceH4/ultrachat_200k", "train_sft", ("messages", "data"), "MIT", "en"),
        # 710,564 synthetic Chinese conversations of one to three turns: knowledge, planning, code
        ChatPreset("smoltalk-chinese", "opencsg/smoltalk-chinese", "train", _CONVERSATIONS, "Apache-2.0", "zh"),
        # open reproduction of the PerfectBlend mix, 1.4 million rows: chat, mathematics, code; English
        ChatPreset("perfectblend", "mlabonne/open-perfectblend", "train", _CONVERSATIONS, "Apache-2.0"),
        # 300,000 instructions that Llama 3.1 70B wrote to itself, and its answers; English, one turn
        ChatPreset(
            "magpie", _MAGPIE, "train", ("conversations", "instruction"), _LLAMA, "en", domain_field="task_category"
        ),
    )
}


@dataclass(frozen=True)
class WorkloadPreset:
    """One benchmark.

    repository: hub id. split: the split to read. language: of the answers.
    workload: of the rows of every category that is not in `workloads`, which says it of the others.
    configs: its subsets, each loaded by name; empty is the default one.
    files: the files to read where the repository has no loadable subsets. members: the files inside a zip among them.
    category: the row's field with its category; "" takes the name of the subset or file.
    turns: fields that may hold a list of user turns; the first that is present counts.
    template: the question, with the row's fields in braces (lower case); unused where the row has `turns`.
    reference: the field with a person's answer, "" without one.
    chat: whether a chat template applies; otherwise the prompt is a text to continue.
    """

    name: WorkloadPresetName
    repository: str
    split: str
    licence: str
    language: Language
    workload: Workload
    template: str = ""
    reference: str = ""
    _: KW_ONLY
    configs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    members: str = ""
    category: str = ""
    workloads: Mapping[str, Workload] = field(default_factory=dict)
    turns: tuple[str, ...] = ()
    chat: bool = True

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

_CHOICES: Final[tuple[Language, Workload, str, str]] = (
    "zh",
    "question-answering",
    "{question}\nA. {a}\nB. {b}\nC. {c}\nD. {d}\n\n请先简要分析各个选项，再给出正确答案的字母。",
    "answer",
)

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
_CEVAL: Final = tuple(_CEVAL_SUBJECTS.split())
_ZIP: Final = ("cmmlu_v1_0_1.zip",)

_MATHS_SUBJECTS: Final = """
advanced_mathematics college_actuarial_science college_mathematics discrete_mathematics elementary_mathematics
high_school_mathematics middle_school_mathematics probability_and_statistics
"""
_MATHS: Final[dict[str, Workload]] = dict.fromkeys(_MATHS_SUBJECTS.split(), "maths")
"""Subjects of C-Eval and CMMLU; all others are question answering."""

_SOLUTION: Final = "canonical_solution"
_GSM8K: Final = "{question}\n\nThink step by step, then give the final answer as one number."
_MATH_500: Final = "{problem}\n\nReason step by step and put the final answer within \\boxed{{}}."

# 80 open questions in eight categories, each with a second turn that builds on the first answer
_MT_BENCH: Final = WorkloadPreset(
    "mt-bench",
    "HuggingFaceH4/mt_bench_prompts",
    "train",
    "Apache-2.0",
    "en",
    "chat",
    "",
    "reference",
    category="category",
    workloads=_CATEGORIES,
    turns=("turns", "prompt"),
)
_SPEC_BENCH: Final = ("question", "math_reasoning", "qa", "rag", "summarization", "translation")
WORKLOAD_PRESETS: Final[dict[str, WorkloadPreset]] = {
    preset.name: preset
    for preset in (
        _MT_BENCH,
        # 480 prompts in six tasks made for speculative decoding: MT-Bench and 80 each of five more
        replace(
            _MT_BENCH,
            name="spec-bench",
            repository="RedHatAI/speculator_benchmarks",
            files=tuple(f"{task}.jsonl" for task in _SPEC_BENCH),
        ),
        # 1,319 word problems of primary-school arithmetic
        WorkloadPreset("gsm8k", "openai/gsm8k", "test", "MIT", "en", "maths", _GSM8K, "answer", configs=("main",)),
        # 500 competition problems out of MATH
        WorkloadPreset("math-500", "HuggingFaceH4/MATH-500", "test", "MIT", "en", "maths", _MATH_500, "solution"),
        # 164 Python functions to be completed from signature and docstring
        WorkloadPreset(
            "humaneval", "openai/openai_humaneval", "test", "MIT", "en", "code", "{prompt}", _SOLUTION, chat=False
        ),
        # 1,346 Chinese multiple-choice questions in 52 subjects (the validation part, which has answers)
        WorkloadPreset(
            "ceval", "ceval/ceval-exam", "val", "CC-BY-NC-SA-4.0", *_CHOICES, configs=_CEVAL, workloads=_MATHS
        ),
        # 11,582 Chinese multiple-choice questions in 67 subjects
        WorkloadPreset(
            "cmmlu",
            "haonan-li/cmmlu",
            "test",
            "CC-BY-NC-4.0",
            *_CHOICES,
            files=_ZIP,
            members="test/*.csv",
            workloads=_MATHS,
        ),
    )
}
