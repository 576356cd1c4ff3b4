"""The tokenizer of a target that is trained here, and its chat markup: how a chat is written in training and prompts.

Byte-level BPE, so that any text in any language round-trips (Sennrich et al. 2016, arXiv:1508.07909; bytes as in
Radford et al. 2019, GPT-2). A turn is its role's token, its content, and the end-of-text token, which ends a turn as
well as a document:
    <|bos|><|user|>question<|eos|><|assistant|>answer<|eos|><|user|>...
So generation ends where the assistant's turn ends. `CHAT_TEMPLATE` is the same markup in Jinja; it marks the
assistant's turns as generated, so that training masks can be made from the template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from components.outside_json import JsonObject

BOS: Final = "<|bos|>"
EOS: Final = "<|eos|>"
PAD: Final = "<|pad|>"
BOS_ID: Final = 0
EOS_ID: Final = 1
PAD_ID: Final = 2


def train_byte_bpe(texts: Iterable[str], vocab_size: int, more_specials: Sequence[str] = ()) -> Tokenizer:
    """Learn merges from texts. vocab_size: tokens, counting the specials (three and these more) and the 256 bytes."""
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


ROLES: Final = ("system", "user", "assistant", "tool")
ROLE_TOKENS: Final = tuple(f"<|{role}|>" for role in ROLES)
ANSWER_BEGINS: Final = re.compile(re.escape("<|assistant|>"))
MARKUP: Final = "roles"
"""The value of `markup` in the facts of a Corpus whose documents use this markup."""

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_SPECIAL: Final = re.compile("|".join(map(re.escape, (BOS, EOS, PAD, *ROLE_TOKENS))))


def chat_text(messages: Sequence[JsonObject]) -> str:
    """A chat as a corpus document, without the first BOS and last EOS, which are added to every document.

    Markup inside a message is broken by blanks, so that its author cannot write a turn of another role.
    """
    turns = [f"<|{message['role']}|>{without_markup(message['content'])}" for message in messages]
    return EOS.join(turns)


def without_markup(text: str) -> str:
    """The text with blanks inside every special token: <|eos|> becomes <| eos |>."""
    return _SPECIAL.sub(lambda match: f"<| {match[0][2:-2]} |>", text)


def text_pieces(document: str) -> list[str]:
    """The pieces of a document between its special tokens, from which a tokenizer learns its merges."""
    return [piece for piece in _SPECIAL.split(document) if piece]
