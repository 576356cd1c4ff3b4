"""Data: sources of prompts and chats, the target's answers to them, and its hidden states (features) at them."""

from components.data.answering import write_answers as write_answers
from components.data.answering_given import write_given_answers as write_given_answers
from components.data.chat_collecting import collect_chats as collect_chats
from components.data.chat_corpus import corpus_from_chats as corpus_from_chats
from components.data.chat_mixing import mix_chats as mix_chats
from components.data.collecting import collect_prompts as collect_prompts
from components.data.corpus import collect_corpus as collect_corpus
from components.data.deduplicating import deduplicate as deduplicate
from components.data.feature_on_the_fly import features_on_the_fly as features_on_the_fly
from components.data.mixing import mix_prompts as mix_prompts
from components.data.recording import record_features as record_features
from components.data.server_answers import write_answers_by_server as write_answers_by_server
from components.data.traffic import collect_traffic as collect_traffic
from components.data.workloads import collect_workloads as collect_workloads
