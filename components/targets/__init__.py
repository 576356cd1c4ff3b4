"""The large model whose tokens we want sooner: any Hugging Face causal LM, and the built-in one."""

from components.targets.pretrain import pretrain_target as pretrain_target
from components.targets.source import load_target as load_target
