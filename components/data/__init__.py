"""Data: sources of prompts and chats, the target's answers to them, and its hidden states (features) at them.

steps.py declares the steps and settings.py what their settings may be. sources/ finds and reads rows of any kind,
collect/ makes chats and prompts of them, cleaning/ and dedup/ leave rows out, mixing/ combines and splits them,
responses/ answers prompts and features/ records hidden states; formats/ is what all of these write.
"""

from components.data.steps import collect_chats as collect_chats
from components.data.steps import collect_corpus as collect_corpus
from components.data.steps import collect_prompts as collect_prompts
from components.data.steps import collect_traffic as collect_traffic
from components.data.steps import collect_workloads as collect_workloads
from components.data.steps import corpus_from_chats as corpus_from_chats
from components.data.steps import deduplicate as deduplicate
from components.data.steps import features_from_server as features_from_server
from components.data.steps import features_on_the_fly as features_on_the_fly
from components.data.steps import mix_chats as mix_chats
from components.data.steps import mix_prompts as mix_prompts
from components.data.steps import record_features as record_features
from components.data.steps import write_answers as write_answers
from components.data.steps import write_answers_by_server as write_answers_by_server
from components.data.steps import write_given_answers as write_given_answers
