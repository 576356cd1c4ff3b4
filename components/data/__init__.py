"""Data: sources of prompts and chats, the target's answers to them, and its hidden states (features) at them."""

from components.data.collect.chats import collect_chats as collect_chats
from components.data.collect.corpus import collect_corpus as collect_corpus
from components.data.collect.corpus import corpus_from_chats as corpus_from_chats
from components.data.collect.prompts import collect_prompts as collect_prompts
from components.data.collect.traffic import collect_traffic as collect_traffic
from components.data.collect.workloads import collect_workloads as collect_workloads
from components.data.dedup.deduplicate import deduplicate as deduplicate
from components.data.features.record import features_on_the_fly as features_on_the_fly
from components.data.features.record import record_features as record_features
from components.data.mixing.mix_chats import mix_chats as mix_chats
from components.data.mixing.mix_prompts import mix_prompts as mix_prompts
from components.data.responses.from_server import write_answers_by_server as write_answers_by_server
from components.data.responses.generate import write_answers as write_answers
from components.data.responses.given import write_given_answers as write_given_answers
