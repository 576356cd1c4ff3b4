"""The tokenizer of a target that is trained here: byte-level BPE, so that any text in any language round-trips.

Sennrich et al. 2016, arXiv:1508.07909; bytes as in Radford et al. 2019 (GPT-2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BOS: Final = "<|bos|>"
EOS: Final = "<|eos|>"
PAD: Final = "<|pad|>"
BOS_ID: Final = 0
EOS_ID: Final = 1
PAD_ID: Final = 2


def train_byte_bpe(texts: Iterable[str], vocab_size: int, more_specials: Sequence[str] = ()) -> Tokenizer:
    """Learn merges from texts. vocab_size: tokens, counting the specials (three and these more) and the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD, *more_specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_tokens: int, chat_template: str | None = None) -> None:
    """Write tokenizer.json and tokenizer_config.json as AutoTokenizer reads them, and a chat template where given.

    No special token is added by itself: a prompt is code from the middle of a file, which has no beginning mark, or a
    chat, whose template writes its own. max_tokens: the model's longest text.
    """
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    if chat_template is not None:
        fast.chat_template = chat_template
    fast.save_pretrained(str(folder))
