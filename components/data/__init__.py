"""Prompt and chat sources, the target's own answers to them, and the hidden states it has while answering."""

from components.data.answering import write_answers as write_answers
from components.data.collecting import collect_prompts as collect_prompts
from components.data.corpus import collect_corpus as collect_corpus
from components.data.mixing import mix_prompts as mix_prompts
from components.data.recording import record_features as record_features
from components.data.traffic import collect_traffic as collect_traffic
from components.data.workloads import collect_workloads as collect_workloads
