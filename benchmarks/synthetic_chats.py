"""Chats made up by number, with known faults: duplicates, near duplicates, benchmark prompts, malformed rows.

Row i is a function of i and the seed alone, so nothing has to be remembered: a copy names the row it copies, and what a
step did with it can be held against what was planted. Two sources are English, two Chinese, in three shapes; a row is
a question and an answer of some 90 words (150 characters), sentences out of a pool. Real words in the order of chance:
enough for whoever looks at languages, lengths and repetition, nothing to learn from.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

Kind = Literal["plain", "copy", "near_copy", "contaminated", "bad"]
SHARES: Final[tuple[tuple[Kind, float], ...]] = (
    ("copy", 0.05),
    ("near_copy", 0.05),
    ("contaminated", 0.005),
    ("bad", 0.01),
)
SOURCES: Final = ("english-messages", "english-sharegpt", "chinese-alpaca", "chinese-messages")
NUM_SENTENCES: Final = 100_000
NUM_BENCHMARK: Final = 1_000
_FREQUENT: Final = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you
were all her she there would their we him been has when who will no more if out so what up into than its about time only
could new them man some these then two first may any like now my such make over our even most me state after also made
many did must before back see through way where get much go well your know should down work year because come people
just say each those take day good how long little use own last old very right look too find give same here year between
""".split()  # noqa: SIM905 (a page of quotation marks is harder to read)
_SYLLABLES: Final = "ba con der fin gra hol ing lec mar nor ple ques ran ser tion tri ver wal yel zen".split()  # noqa: SIM905


@dataclass(frozen=True)
class Made:
    """What row `number` is. of: the plain row that it copies (itself where it copies none)."""

    number: int
    kind: Kind
    of: int


class SyntheticChats:
    """All rows of one seed; the pool of sentences is made once."""

    def __init__(self, seed: int = 0, num_sentences: int = NUM_SENTENCES) -> None:
        self.seed = seed
        rng = random.Random(f"pool {seed}")
        words = _FREQUENT * 20 + ["".join(rng.choices(_SYLLABLES, k=rng.randint(2, 3))) for _ in range(4000)]
        signs = [bytes((high, low)).decode("gb2312") for high in range(0xB0, 0xD7) for low in range(0xA1, 0xFF)]
        self._english = [
            " ".join(rng.choices(words, k=rng.randint(8, 14))).capitalize() + "." for _ in range(num_sentences)
        ]
        self._chinese = ["".join(rng.choices(signs, k=rng.randint(12, 24))) + "。" for _ in range(num_sentences)]
        self._words, self._signs = words, signs

    def made(self, number: int) -> Made:
        """Its kind, and what it copies: an earlier plain row of the same language."""
        rng = random.Random(f"kind {self.seed} {number}")
        drawn = rng.random()
        kind: Kind = "plain"
        for possible, share in SHARES:
            if 0 <= drawn < share:
                kind = possible
            drawn -= share
        if kind not in ("copy", "near_copy"):
            return Made(number, kind, number)
        for _ in range(20):
            of = rng.randrange(max(number, 1)) // 4 * 4 + number % 4 // 2 * 2 + rng.randrange(2)
            if of < number and self.made(of).kind == "plain":
                return Made(number, kind, of)
        return Made(number, "plain", number)

    def turns(self, number: int) -> tuple[str, str]:
        """Question and answer of row `number`, faults included (a bad row has those of a plain one)."""
        made = self.made(number)
        question, answer = self._plain(made.of)
        rng = random.Random(f"fault {self.seed} {number}")
        if made.kind == "copy":
            if rng.random() < 0.5:
                question, answer = question.upper(), answer.replace(" ", "  ")
        elif made.kind == "near_copy":
            answer = self._one_word_changed(answer, rng, number)
        elif made.kind == "contaminated":
            planted = self.benchmark_prompt(rng.randrange(NUM_BENCHMARK // 2) * 2 + number % 4 // 2)
            planted = rng.choice((planted, planted.upper(), planted.replace(" ", " , ")))
            if rng.random() < 0.5:
                question = f"{question} {planted}"
            else:
                answer = f"{answer} {planted} {answer[:20]}"
        return question, answer

    def benchmark_prompt(self, number: int) -> str:
        """A prompt that nothing but contaminated rows hold; the even ones are English."""
        rng = random.Random(f"benchmark {self.seed} {number}")
        if number % 2:
            return "".join(rng.choices(self._signs, k=40)) + "？"
        return " ".join(rng.choices(self._words, k=30)) + "?"

    def line(self, number: int) -> str:
        """The JSON line of row `number`, in the shape of its source."""
        question, answer = self.turns(number)
        if self.made(number).kind == "bad":
            return self._bad(number, question)
        shape = number % 4
        row: dict[str, Any]
        if shape == 1:
            row = {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
        elif shape == 2:
            row = {"instruction": question, "input": "", "output": answer}
        else:
            row = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        return json.dumps(row, ensure_ascii=False)

    def write(self, folder: Path, num_rows: int, source: int) -> Path:
        """Write those of the rows below num_rows that belong to a source: row i is line i // 4 + 1 of source i % 4."""
        file = folder / f"{SOURCES[source]}.jsonl"
        with file.open("w", encoding="utf-8") as out:
            out.writelines(self.line(number) + "\n" for number in range(source, num_rows, 4))
        return file

    def write_benchmark(self, file: Path) -> None:
        """Write all benchmark prompts as the `prompts.jsonl` of a Prompts artifact, in its split test."""
        with file.open("w", encoding="utf-8") as out:
            for number in range(NUM_BENCHMARK):
                row = {"prompt_id": f"benchmark-{number}", "split": "test", "workload": "synthetic"}
                row |= {"source": "synthetic", "prompt": self.benchmark_prompt(number)}
                out.write(json.dumps(row, ensure_ascii=False) + "\n")

    def _plain(self, number: int) -> tuple[str, str]:
        rng = random.Random(f"text {self.seed} {number}")
        pool, space = (self._english, " ") if number % 4 < 2 else (self._chinese, "")
        chosen = rng.choices(pool, k=rng.randint(7, 10))
        return space.join(chosen[:2]), space.join(chosen[2:])

    def _one_word_changed(self, answer: str, rng: random.Random, number: int) -> str:
        if number % 4 >= 2:
            at = rng.randrange(len(answer) - 1)
            return answer[:at] + rng.choice(self._signs) + answer[at + 1 :]
        words = answer.split(" ")
        words[rng.randrange(len(words))] = rng.choice(self._words)
        return " ".join(words)

    def _bad(self, number: int, question: str) -> str:
        faults = (
            '{"messages": [{"role": "user", "content": ',
            json.dumps({"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "x"}]}),
            json.dumps({"messages": [{"role": "assistant", "content": question}]}),
            json.dumps({"messages": "no list"}),
            json.dumps({"score": number}),
        )
        return faults[number // 4 % len(faults)]


def numbers_of(wheres: Iterator[tuple[str, str]]) -> Iterator[int]:
    """The numbers of rows from their (source, where): where ends in :LINE."""
    places = {source: place for place, source in enumerate(SOURCES)}
    for source, where in wheres:
        yield (int(where.rpartition(":")[2]) - 1) * 4 + places[source]
