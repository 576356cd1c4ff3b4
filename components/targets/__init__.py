"""Targets: the large models whose decoding is sped up; any Hugging Face causal LM, and the built-in one."""

from components.targets.steps import fine_tune_target as fine_tune_target
from components.targets.steps import load_target as load_target
from components.targets.steps import make_stand_in as make_stand_in
from components.targets.steps import pretrain_target as pretrain_target
