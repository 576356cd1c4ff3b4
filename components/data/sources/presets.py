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
_SpeedBench = Literal["speed-bench-1k", "speed-bench-2k", "speed-bench-8k", "speed-bench-16k", "speed-bench-32k"]
_Questions = Literal["mt-bench", "spec-bench", "speed-bench", "alpaca", "arena-hard", "bfcl", "longbench-v2"]
_Problems = Literal["gsm8k", "math-500", "aime-2025", "humaneval", "mbpp", "livecodebench", "ceval", "cmmlu"]
WorkloadPresetName = Literal[_Questions, _SpeedBench, _Problems]
_Task = Literal["chat", "code", "maths", "summarisation", "translation", "question-answering", "retrieval"]
_InputLength = Literal["input-1k", "input-2k", "input-8k", "input-16k", "input-32k"]
"""Prompts that were padded or cut to about so many tokens."""
_ContextBin = Literal["long-context-short", "long-context-medium", "long-context-long"]
"""The bins of LongBench v2, by words."""
Workload = Literal[_Task, "multilingual", "tool-calling", _InputLength, _ContextBin]
Language = Literal["en", "zh", ""]
"""The language of the answers, "" for several."""


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
    turns: fields that may hold a list of user turns, texts or {"content": text}; the first that is present counts.
    placeholder: how a turn begins whose text the publisher leaves out for its licence; such rows are set aside.
    messages: the field with a list of turns, each a list of messages; the first turn is asked.
    tools: the field with the functions that the answer may call.
    template: the question, with the row's fields in braces (lower case), a list of texts line by line; unused where the
        row has `turns`. optional: fields of it that a row may leave empty.
    reference: the field with a person's answer, "" without one.
    chat: whether a chat template applies; otherwise the prompt is a text to continue.
    json_lines: whether its files named .json hold a row on each line.
    languages: the language of categories in which it is another.
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
    placeholder: str = ""
    messages: str = ""
    tools: str = ""
    optional: tuple[str, ...] = ()
    chat: bool = True
    json_lines: bool = False
    languages: Mapping[str, Language] = field(default_factory=dict)

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields in the template."""
        return tuple(name for _, name, _, _ in string.Formatter().parse(self.template) if name)

    def language_of(self, category: str) -> Language:
        """The language of the answer to a row of this category, "" where it is not known."""
        return self.languages.get(category, self.language)

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
    "multilingual": "multilingual",
}
"""Categories of MT-Bench, Spec-Bench and SPEED-Bench; all others (writing, roleplay, stem and so on) are chat."""

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
_BOXED: Final = "put the final answer within \\boxed{{}}."
_GSM8K: Final = "{question}\n\nThink step by step, then give the final answer as one number."
_MATH_500: Final = "{problem}\n\nReason step by step and " + _BOXED
_AIME: Final = "{question}\n\nThe answer is a whole number from 0 to 999. Reason step by step and " + _BOXED
_MBPP: Final = "{text} The function has to pass these tests:\n\n{test_list}\n\nAnswer with Python code."
_LIVECODEBENCH: Final = (
    "{question_content}\n\nWrite a Python program that solves this problem. It extends the given code, where there is "
    "some; otherwise it reads standard input and writes standard output.\n\n{starter_code}"
)
_LONGBENCH: Final = """{context}

Answer a question about the text above: {question}
A. {choice_a}
B. {choice_b}
C. {choice_c}
D. {choice_d}

Explain which choices the text rules out, then give the letter of the right one."""

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
# 880 prompts in eleven categories of 80, some of several turns, in English but for the category multilingual
_SPEED_BENCH: Final = replace(
    _MT_BENCH,
    name="speed-bench",
    repository="nvidia/SPEED-Bench",
    split="test",
    licence="NVIDIA Evaluation Dataset License",
    reference="",
    configs=("qualitative",),
    turns=("turns",),
    placeholder="FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE",
    languages={"multilingual": ""},
)
_LENGTHS: Final[dict[_SpeedBench, tuple[str, _InputLength]]] = {
    "speed-bench-1k": ("throughput_1k", "input-1k"),
    "speed-bench-2k": ("throughput_2k", "input-2k"),
    "speed-bench-8k": ("throughput_8k", "input-8k"),
    "speed-bench-16k": ("throughput_16k", "input-16k"),
    "speed-bench-32k": ("throughput_32k", "input-32k"),
}
_SPEC_BENCH: Final = ("question", "math_reasoning", "qa", "rag", "summarization", "translation")
_BFCL: Final = ("simple", "multiple", "parallel", "parallel_multiple")
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
        _SPEED_BENCH,
        # 1,536 prompts of one input length, 512 each of the categories low_entropy, mixed and high_entropy
        *(
            replace(
                _SPEED_BENCH, name=name, configs=(config,), language="", workload=workload, workloads={}, languages={}
            )
            for name, (config, workload) in _LENGTHS.items()
        ),
        # 1,319 word problems of primary-school arithmetic
        WorkloadPreset("gsm8k", "openai/gsm8k", "test", "MIT", "en", "maths", _GSM8K, "answer", configs=("main",)),
        # 500 competition problems out of MATH
        WorkloadPreset("math-500", "HuggingFaceH4/MATH-500", "test", "MIT", "en", "maths", _MATH_500, "solution"),
        # 30 problems, half of them of each of the two papers
        WorkloadPreset(
            "aime-2025",
            "opencompass/AIME2025",
            "test",
            "MIT",
            "en",
            "maths",
            _AIME,
            "answer",
            configs=("AIME2025-I", "AIME2025-II"),
        ),
        # 164 Python functions to be completed from signature and docstring
        WorkloadPreset(
            "humaneval", "openai/openai_humaneval", "test", "MIT", "en", "code", "{prompt}", _SOLUTION, chat=False
        ),
        # 500 short Python functions, each with three tests (the test part of the full set)
        WorkloadPreset(
            "mbpp",
            "google-research-datasets/mbpp",
            "test",
            "CC-BY-4.0",
            "en",
            "code",
            _MBPP,
            "code",
            configs=("full",),
        ),
        # 175 problems of programming contests in 2025: the newest of the six files, 134 MB with the tests
        WorkloadPreset(
            "livecodebench",
            "livecodebench/code_generation_lite",
            "test",
            "CC, which one is not stated",
            "en",
            "code",
            _LIVECODEBENCH,
            files=("test6.jsonl",),
            optional=("starter_code",),
        ),
        # 52,002 synthetic instructions, with their input where they have one
        WorkloadPreset(
            "alpaca",
            "tatsu-lab/alpaca",
            "train",
            "CC-BY-NC-4.0",
            "en",
            "chat",
            "{instruction}\n\n{input}",
            "output",
            optional=("input",),
        ),
        # 500 difficult questions of users, version 0.1
        WorkloadPreset(
            "arena-hard",
            "lmarena-ai/arena-hard-auto-v0.1",
            "train",
            "Apache-2.0",
            "en",
            "chat",
            category="category",
            turns=("turns",),
        ),
        # 2,351 questions with functions to call, one call or several: 1,000 of experts, 1,351 of users
        WorkloadPreset(
            "bfcl",
            "gorilla-llm/Berkeley-Function-Calling-Leaderboard",
            "",
            "Apache-2.0",
            "en",
            "tool-calling",
            files=tuple(f"BFCL_v3_{live}{task}.json" for live in ("", "live_") for task in _BFCL),
            json_lines=True,
            messages="question",
            tools="function",
        ),
        # 503 multiple-choice questions on texts of 8,000 to 2 million words, 465 MB
        WorkloadPreset(
            "longbench-v2",
            "THUDM/LongBench-v2",
            "train",
            "Apache-2.0",
            "en",
            "long-context-short",
            _LONGBENCH,
            "answer",
            files=("data.json",),
            category="length",
            workloads={"medium": "long-context-medium", "long": "long-context-long"},
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
