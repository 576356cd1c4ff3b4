"""Targets: the large models whose decoding is sped up; any Hugging Face causal LM, and the built-in one."""

from components.targets.pretraining.pretrain import pretrain_target as pretrain_target
from components.targets.source import load_target as load_target
