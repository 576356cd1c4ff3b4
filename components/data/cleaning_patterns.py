"""Regular expressions for refusals, boilerplate and page leftovers, in English and Chinese.

Case is ignored, and curly apostrophes are already straight. REFUSALS are matched at the beginning of an answer only, so
that a story in which somebody refuses is kept; BOILERPLATE is searched in an answer's first `HEAD_CHARACTERS`;
PAGE_LEFTOVERS match whole lines anywhere in an answer; WEB_BOILERPLATE applies to plain text.
"""

from __future__ import annotations

from typing import Final

HEAD_CHARACTERS: Final = 300
"""How far into an answer boilerplate is searched; further down it may be a quotation."""

_EN_SELF = r"an? (?:ai|artificial intelligence|(?:large )?language model|virtual assistant|chatbot)\b"
_EN_CANNOT = (
    r"(?:can'?t|cannot|can not|won'?t|will not|must decline|must refuse|(?:am|'m|was) (?:not able|unable)|not able to"
    r"|unable to|not capable of|(?:don't|do not) (?:have (?:the ability|the capability|access)|feel comfortable))"
)
_ZH_SELF = (
    r"(?:一个|一個|一名|一款|一位|一种)?(?:大型|负责任的)?"
    r"(?:(?:人工智能|人工智慧|AI)\s*(?:大?语言)?(?:模型|助手|助理|系统|程序|机器人|(?=[，,]|我))"
    r"|语言模型|語言模型|大模型|智能助手|聊天机器人|虚拟助手)"
)
_ZH_CANNOT = r"(?:无法|無法|不能|没有能力|沒有能力|不具备|不具備|没办法|没有办法|不便|不可以|拒绝)"
_ZH_SORRY = r"(?:非常|很|十分|实在|真的|真)?(?:抱歉|对不起|對不起|遗憾|不好意思)"

REFUSALS: Final = (
    rf"(?:i'm|i am|we're|we are) (?:really |very |so |truly |deeply )?(?:sorry|afraid)[,.]? "
    rf"(?:but |that )*(?:as {_EN_SELF}[^.!?]{{0,60}}, )?(?:but )?i (?:{_EN_CANNOT}|don't|do not)",
    rf"(?:sorry|apologies|my apologies|i apologi[sz]e)[,.]? (?:but )?(?:as {_EN_SELF}[^.!?]{{0,60}}, )?i {_EN_CANNOT}",
    rf"(?:unfortunately,? |sorry, (?:but )?)?as {_EN_SELF}[^.!?]{{0,120}}\b{_EN_CANNOT}",
    r"(?:unfortunately,? )?i(?: can'?t| cannot| can not| won'?t| will not| must decline to|(?: am|'m) (?:not able"
    r"|unable) to) (?:assist|help (?:you )?with|provide|fulfil|comply|generate|create|support|engage|continue|answer"
    r"|discuss|offer|participate|write|share|access|browse|open)",
    r"(?:it is|it's|it would be) (?:not (?:appropriate|ethical|possible for me)|inappropriate|unethical|against my)",
    r"(?:your|this) (?:request|question|prompt) (?:violates|goes against|is inappropriate|is against)",
    rf"{_ZH_SORRY}[，,。.！!\s]*(?:但是?|因为|不过)?(?:作为{_ZH_SELF}[^。！？]{{0,30}}[，,]\s*)?[^，。！？]{{0,8}}{_ZH_CANNOT}",
    rf"(?:作为|作為|身为){_ZH_SELF}[^。！？]{{0,60}}{_ZH_CANNOT}",
    rf"我(?:们)?(?:暂时|目前)?{_ZH_CANNOT}(?:够)?(?:为您|为你|向您|向你|给您|给你)?"
    r"(?:提供|回答|回應|回应|协助|協助|帮助|满足|生成|完成|讨论|执行|参与|访问|打开)",
    r"(?:您|你)的(?:请求|要求|问题|提问)(?:违反|违背|涉及(?:敏感|违法)|不符合)",
)

BOILERPLATE: Final = (
    r"\bas an? (?:ai|artificial intelligence|(?:large )?language)(?: language)? (?:model|assistant)\b",
    r"\bi(?:'m| am) (?:just |only )?an? (?:ai|artificial intelligence|large)(?: language)? "
    r"(?:model|assistant|chatbot)\b",
    r"\bi(?:'m| am) chatgpt\b",
    r"\bi(?:'m| am| was)\b[^.!?]{0,80}\b(?:trained|developed|created|made) by "
    r"(?:openai|anthropic|google|meta|microsoft)\b",
    r"\bas of my (?:last|most recent|latest) (?:knowledge |training )?(?:update|cut-?off)\b",
    r"\bmy (?:knowledge|training)(?: data)? (?:cut-?off|(?:only )?(?:goes|extends) (?:up )?to)\b",
    rf"(?:作为|作為|身为){_ZH_SELF}",
    r"我(?:只)?是(?:一个|一款|一名|一種)?(?:由[^，。]{1,12}(?:训练|开发|研发)的)?(?:人工智能|AI|大型)?(?:语言模型|大语言模型)",
    r"我是[^。！？]{0,20}由\s*\w{2,12}\s*(?:公司)?(?:训练|开发|研发|打造)",
    r"截[至止](?:到)?我(?:的)?(?:知识|训练|最后|上次)",
    r"我的(?:知识|训练数据)(?:库)?(?:截止|更新)(?:到|至|于)?",
)

PAGE_LEFTOVERS: Final = (
    r"copy code",
    r"(?:regenerate|continue) (?:response|generating)",
    r"share ?gpt",
    r"share prompt",
    r"(?:!!)?there was an error generating a response\.?",
    r"(?:an error occurred|network error|something went wrong)\.? ?(?:if this issue persists.*|please try again.*)?",
    r"this content may violate our content policy.*",
    r"(?:以上|本)(?:内容|回答|文)由\s*(?:AI|人工智能|ChatGPT)\s*(?:自动)?生成.*",
    r"(?:点击|點擊)(?:展开|展開|查看|阅读)(?:全文|更多|原文)",
    r"未经(?:允许|授权|许可)[，,]?(?:不得|禁止|请勿)转载.*",
    r"(?:复制代码|複製代碼)",
)

WEB_BOILERPLATE: Final = (
    r"\blorem ipsum dolor\b",
    r"\b(?:please )?enable javascript\b.{0,40}\bbrowser\b",
    r"\bthis (?:web)?site uses cookies\b",
    r"\bsubscribe to our newsletter\b",
    r"(?:扫码|扫描二维码|长按)(?:关注|识别).{0,12}(?:公众号|二维码)",
    r"未经(?:允许|授权|许可)[，,]?(?:不得|禁止|请勿)转载",
    r"(?:本网站|本站)使用\s*cookie",
)

TEMPLATE_MARKS: Final = (
    r"<\|(?:im_start|im_end|im_sep|endoftext|start_header_id|end_header_id|eot_id|begin_of_text|user|assistant|system"
    r"|end|EOT|tool|observation)\|>",
    r"\[/?INST\]",
    r"<</?SYS>>",
    r"<｜(?:begin▁of▁sentence|end▁of▁sentence|User|Assistant)｜>",
    r"<(?:start_of_turn|end_of_turn)>",
    r"(?:^|\n)###\s?(?:Human|Assistant|Instruction|Response):",
)
"""Marks that chat templates write between turns; inside a turn they would end it, or teach the drafter to."""

ABOUT_MARKUP: Final = (
    r"\b(?:html|xml|svg|css|tags?|web ?(?:page|site)|markup|jsx|react|vue|angular)\b|网页|标签|前端|网站|代码"
)
"""A question that matches may be answered with bare tags."""
