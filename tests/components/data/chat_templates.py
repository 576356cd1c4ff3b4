"""Chat templates in the manner of those that models come with, and a byte-level tokenizer for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

LLAMA3 = (
    "{{ bos_token }}"
    "{%- if tools %}{{ '<|start_header_id|>system<|end_header_id|>\n\nTools: ' + tools | tojson + '<|eot_id|>' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.tool_calls %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    '{{- \'{"name": "\' + message.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{- message.tool_calls[0].function.arguments | tojson }}{{- '}' + '<|eot_id|>' }}"
    "{%- elif message.role == 'tool' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content | tojson + '<|eot_id|>' }}"
    "{%- else %}"
    "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)

QWEN3 = (
    "{%- if tools %}{{- '<|im_start|>system\n# Tools\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}"
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' %}"
    "{%- set content = m.content %}"
    "{%- if '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{- content }}{%- endif %}"
    "{%- for call in m.tool_calls or [] %}"
    "{{- '\n' if (loop.first and content) or not loop.first }}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)

DEEPSEEK_V3 = (
    "{{ bos_token }}{%- for m in messages %}"
    "{%- if m.role == 'system' %}{{ m.content }}{%- endif %}"
    "{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{%- endif %}"
    "{%- if m.role == 'assistant' %}"
    "{%- if m.tool_calls %}{{ '<｜Assistant｜>' + (m.content or '') }}"
    "{%- for call in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + call.function.name + '\n```json\n' + call.function.arguments | tojson }}"
    "{{ '\n```<｜tool▁call▁end｜>' }}{%- endfor %}{{ '<｜end▁of▁sentence｜>' }}"
    "{%- elif loop.index0 and messages[loop.index0 - 1].role == 'tool' %}{{ m.content + '<｜end▁of▁sentence｜>' }}"
    "{%- else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{%- endif %}"
    "{%- endif %}"
    "{%- if m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<｜Assistant｜>' }}{%- endif %}"
)

DEEPSEEK_R1 = DEEPSEEK_V3.replace("{{ '<｜Assistant｜>' }}{%- endif %}", "{{ '<｜Assistant｜><think>\n' }}{%- endif %}")

CHATML_MARKED = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{%- else %}{{- m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

CHATML_MARKED_BUT_THE_END = CHATML_MARKED.replace(
    "{{- m.content + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}",
    "{{- m.content }}{% endgeneration %}{{- '<|im_end|>\n' }}",
)

MISTRAL = (
    "{{- bos_token }}"
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set turns = messages[1:] %}"
    "{%- else %}{%- set turns = messages %}{%- endif %}"
    "{%- for m in turns %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- if m.role == 'user' %}"
    "{%- if system is defined and loop.first %}{{- '[INST] ' + system + '\n\n' + m.content + '[/INST]' }}"
    "{%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{%- endif %}"
    "{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}"
)

GEMMA = (  # refuses system turns, calls the assistant by another name
    "{{ bos_token }}{%- if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{%- endif %}"
    "{%- for m in messages %}{%- set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"
)


class Style(NamedTuple):
    """A template with the control tokens that its tokenizer knows: bos first (or ""), the end of a turn second."""

    template: str
    bos: str
    end: str
    others: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()  # added tokens that are no control tokens


STYLES: dict[str, Style] = {
    "llama3": Style(LLAMA3, "<|begin_of_text|>", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>")),
    "qwen3": Style(QWEN3, "", "<|im_end|>", ("<|im_start|>",), ("<think>", "</think>", "<tool_call>", "</tool_call>")),
    "deepseek_v3": Style(
        DEEPSEEK_V3, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ("<｜User｜>", "<｜Assistant｜>")
    ),
    "deepseek_r1": Style(
        DEEPSEEK_R1,
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        ("<｜User｜>", "<｜Assistant｜>"),
        ("<think>", "</think>"),
    ),
    "chatml_marked": Style(CHATML_MARKED, "", "<|im_end|>", ("<|im_start|>",)),
    "chatml_marked_but_the_end": Style(CHATML_MARKED_BUT_THE_END, "", "<|im_end|>", ("<|im_start|>",)),
    "mistral": Style(MISTRAL, "<s>", "</s>", ("[INST]", "[/INST]")),
    "gemma": Style(GEMMA, "<bos>", "<end_of_turn>", ("<start_of_turn>",)),
}

_WORDS = ["def read(path):\n    return open(path)\n", "The sky is blue because of the air.\n\n", "天空为什么是蓝色的？"]


def styled_tokenizer(style: Style, vocab_size: int = 600) -> Any:
    """A byte-level BPE tokenizer with the style's control tokens and template; any text round-trips."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special: Sequence[str] = [token for token in (style.end, style.bos, *style.others) if token]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(style.plain),
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(_WORDS * 4, trainer)
    inner.add_tokens([AddedToken(token, special=False) for token in style.plain])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=style.end,
        pad_token=style.end,
        bos_token=style.bos or None,
        additional_special_tokens=list(style.others),
    )
    fast.chat_template = style.template
    return fast
