"""Mutants of a pipelines.yaml: each is made from its number and the seed alone, so that any of them can be made again.

Of two kinds: `characters` writes scraps, control characters and halves of letters into the text, cuts and doubles
slices of it; `structure` reads it and changes one to three places of what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import yaml

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

SCRAPS = [
    *"\t{}[]:,-?|>&*!%@`'\"#~=.\n\r",
    *("- ", "&a ", "*a", "*a\n", "!!int ", "!!python/object:os.system ", "!x ", "<<: *a", "---\n", "...\n", "? ", ": "),
    *("${", "${params.", "${matrix.method}", "null", "yes", ".inf", "1e999", "0o17", "2024-01-01", "%YAML 1.1\n", "\\"),
    *("'it", '"it', '"\\x00"', '"\\u202e"', '"\\ud800"', "\n\n\n", "\n        ", "\r\n", "\t\t", "|\n  a", ">-\n"),
    *("\x00", "\x01", "\x07", "\x1b[31m", "\x7f", "\x85", "\xa0", "\u2028", "\u202e", "\ufeff", "\ufffe", "\ud800"),
    *("\U0001f331", "e\u0301", "\u0130", "\u5e93", "9" * 309, "a" * 300, "[" * 40, "{a: " * 40, "- " * 40, "!" * 70),
]
HALVES = [b"\xc3", b"\x9f\x8c", b"\xf0\x9f", b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\x80", b"\xef\xbb", b"\x80"]

STRANGE = [
    *("0", "-1", "1", "2", "3.5", "-0.0", "1e-320", "1e308", "1e999", "-1e999", ".nan", ".inf", "-.inf", "9" * 309),
    *(
        "9223372036854775807",
        "9223372036854775808",
        "-9223372036854775809",
        "1_000",
        "0x1F",
        "010",
        "0o17",
        "1e3",
        "1.",
    ),
    *("null", "~", '""', '" "', "true", "false", "yes", "no", "on", "y", "Off", "TRUE", "2024-01-01", "12:30:45"),
    *("[]", "{}", "[1, 2]", "[[1], [2]]", "[null]", "{a: 1}", "{a: {b: {c: {d: [1]}}}}", "[{}]", "[a, a]", "[true, 1]"),
    *("[" * 20 + "]" * 20, "[" * 35 + "]" * 35, "a" * 61, "b" * 240, "c" * 5000, "[" + "x, " * 300 + "x]"),
    *('"\\u202ecilbup"', '"a\\0b"', '"\\e[31mred"', '"a\\nb"', '"a\\tb"', '"\\u2028"', '"\\x85"', '"\\ufeff"'),
    *("na\u00efve", "\u6c34", '"\\U0001f331"', "../../etc/passwd", "/dev/null", "'a,b'", "'a[b]'", "'..'", "'${'"),
    *("'%s%n'", "'{0}'", "'[red]bold[/red]'", "'<b>x</b>'", "word", "'1'", "'true'", "fern", "moss", "corpus", "draft"),
    *("!!str 5", "!!int five", "!!binary aGk=", "!!set {a}", "!local x", "&loop [*loop]", "https://ann:s3cret@host/v1"),
]
INSERTS = [
    *(
        "${params.steps}",
        "${params.pause}",
        "${params.sunny}",
        "${params.nowhere}",
        "${params.stpes}",
        "${matrix.method}",
    ),
    *(
        "${matrix.nowhere}",
        "${params}",
        "${}",
        "${params.}",
        "${ params.steps }",
        "a ${params.steps} b",
        "$${params.steps}",
    ),
    *(
        "${params.steps}${params.pause}",
        "${params.${params.steps}}",
        "${{params.steps}}",
        "${env.HOME}",
        "${params.steps",
    ),
    *("${params.train_steps}", "${params.champion}", "${params.dtype}", "${params.__class__}", "${matrix.__class__}"),
    *(
        "x${params.steps}" * 40,
        "${params." + "n" * 300 + "}",
        "${params.steps + 1}",
        "${params.STEPS}",
        "${params.sunny} ",
    ),
]
ADDRESSES = [
    *("toys.plant", "toys.grow", "toys.judge", "toys.judge_all", "toys.measure", "toys.fail", "toys.hang", "toys.weed"),
    *("toys.clock", "toys.settle", "toys.sell", "toys.gather", "toys.plnt", "tois.plant", "toys.METHODS", "toys"),
    *("toys.__init__", "toys.grow.plant", "toys.methods", "toys.methods.build", "__main__.main", "os.system", "", "."),
    *("..toys.plant", "toys.", ".plant", "components.toys.plant", "components.data.collect_prompts", "toys plant"),
    *("data.collect_prompts", "drafts.train_draft", "bench.autotune", "report.write_page", "speedup.choose_depth"),
    *("toys.quiet.gather", "toys.plant\u200b", "toys/plant", "toys:plant", "TOYS.PLANT", "toys." + "p" * 500),
]
KEYS = [
    *(
        "about",
        "params",
        "schedules",
        "triggers",
        "overlap",
        "approval",
        "runs_on",
        "trust_remote_code",
        "steps",
        "uses",
    ),
    *("in", "with", "if", "matrix", "retries", "timeout_minutes", "type", "default", "min", "max", "choices", "slug"),
    *(
        "corpus",
        "draft",
        "judged",
        "method",
        "num_steps",
        "pause_s",
        "num_rows",
        "title",
        "target",
        "prompts",
        "drafts",
    ),
    *("<<", "~", "1", "1.5", "true", "''", "class", "self", "force", "from_step", "__class__", "a b", "a-b", "A", "_"),
    *(
        "\u00e4rger",
        "\u4e00",
        '"\\0"',
        '"\\u202e"',
        '"a\\nb"',
        "'a.b'",
        "'a[b]'",
        "'a:b'",
        "'../a'",
        "'${params.steps}'",
    ),
    *("[a]", "{a: 1}", "k" * 60, "k" * 61, "k" * 240, "2024-01-01", ".inf", "yes", "con", "nul", "-", "'-x'", "'*'"),
]
PIECES = [
    *(
        "if: params.sunny",
        "if: not params.sunny",
        "if: params.steps",
        "if: machine.cuda",
        "if: 'true'",
        "if: ''",
        "if: 3",
    ),
    *("retries: 20", "retries: 21", "retries: -1", "retries: 2", "timeout_minutes: 1e-9", "timeout_minutes: 1e300"),
    *("timeout_minutes: .inf", "timeout_minutes: 0", "timeout_minutes: 5", "runs_on: {cluster: dask}", "runs_on: pool"),
    *("runs_on: {cluster: ray, workers: 999}", "runs_on: {cluster: slurm}", "runs_on: []", "runs_on: {}", "matrix: {}"),
    *("overlap: wait", "overlap: never", "approval: true", "approval: {within_minutes: 1e9}", "approval: null"),
    *("trust_remote_code: [a/b]", "trust_remote_code: all", "about: 3", "about: ''", "params: {}", "params: null"),
    *(
        "schedules: [{slug: s, cron: '0 2 * * *'}]",
        "schedules: [{slug: s, cron: '61 2 * * *'}]",
        "steps: {}",
        "with: {}",
    ),
    *("schedules: [{slug: s, cron: '* * * * * *'}]", "schedules: [{slug: S, cron: ''}]", "schedules: [{}]", "in: {}"),
    *("schedules: [{slug: s, cron: '0 0 30 2 *'}]", "schedules: [{slug: s, cron: '0 2 * * *', timezone: ../../etc}]"),
    *("schedules: [{slug: s, cron: '0 2 LW * *'}]", "schedules: [{slug: s, cron: '0 2 * * 5#3', timezone: posix/UTC}]"),
    *("schedules: [{slug: s, cron: '*/7 2-4 1,15 JAN-MAR MON'}]", "schedules: [{slug: s, cron: '0 2 L * 7'}]"),
    *("schedules: [{slug: s, cron: '@daily'}]", "schedules: [{slug: s, cron: '0 2 * * *', timezone: localtime}]"),
    *("triggers: [{file: 'x/**'}]", "triggers: [{after: garden}]", "triggers: [{registry: '../m', alias: 'a b'}]"),
    *('triggers: [{file: "a\\0b"}]', "triggers: [{file: x, params: {steps: 0}}]", "triggers: {after: x}", "in: []"),
]
PARAMS = [
    *("{type: int, default: 3.5}", "{type: int, default: 5, min: 9, max: 1}", "{type: int, default: 5, min: 6}", "{}"),
    *("{type: float, default: .nan}", "{type: float, default: 1e308, max: 1e309}", "{type: float, default: 1}", "5"),
    *("{type: bool, default: yes}", "{type: bool, default: 1}", "{type: str, default: 5}", "{type: str, default: ''}"),
    *("{type: str, default: corpus}", "{type: str, default: 'registry:x@champion'}", "{type: str, default: 'path:/'}"),
    *("{type: enum, default: a}", "{type: enum, default: a, choices: []}", "{type: enum, default: a, choices: [a, a]}"),
    *("{type: enum, default: a, choices: [a, 1, 1.0, true]}", "{type: enum, default: [a], choices: [[a]]}"),
    *(
        "{type: enum, default: b, choices: [a]}",
        "{type: enum, default: 1, choices: [1, 2.5]}",
        "{type: list, default: []}",
    ),
    *("{type: list, default: [1, a, true]}", "{type: list, default: [1], max: 0}", "{type: list, default: [[1]]}"),
    *("{type: list, default: [1], min: -1, max: 1e18}", "{type: list, default: [corpus], choices: [corpus, draft]}"),
    *("{type: int, default: 1, choices: [1, 1000000000000]}", "{type: int, default: 2, choices: ['2']}", "null"),
    *("{type: int, default: 1, min: -1e300, max: 1e300}", '{type: str, default: a, choices: [a, "b\\nc"]}'),
    *('{type: str, default: a, about: "x\\n\\n  y: z\\n\\nArgs:"}', "{type: int, default: 1, about: '::: {} %s'}"),
    *("{type: int, default: true}", "{type: float, default: '1'}", "{type: integer, default: 1}", "{default: 1}"),
    *("{type: enum, default: null, choices: [null]}", "{type: str, default: a, choices: [a], min: 1}", "[int, 3]"),
    *("{type: list, default: [], choices: [[1]]}", "{type: list, default: [a], choices: [a, null]}"),
    *("{type: int, default: 1, choices: [1, a, 2.5]}", "{type: enum, default: a, choices: [a, null, {b: c}]}"),
    *("{type: float, default: 1, choices: [1, 2.5]}", "{type: bool, default: true, choices: [true]}"),
    *("{type: enum, default: 1.5, choices: [1.5, 1e300]}", "{type: enum, default: '', choices: ['', ' ']}"),
]


@dataclass(frozen=True)
class Mutant:
    """A mutated file. base: which file it was; places: how many places were changed, told in `what`."""

    number: int
    base: str
    kind: str
    content: bytes
    places: int
    what: str


def mutant(number: int, seed: int, bases: Mapping[str, str]) -> Mutant:
    """The mutant of this number: three of five of the first base, and of each base one of three by its characters."""
    chance = Random(f"{seed}:{number}")
    base = list(bases)[0 if number % 5 < 3 else 1]
    kind = "characters" if number // 5 % 3 == 0 else "structure"
    content, told = (_characters if kind == "characters" else _structure)(bases[base], chance)
    return Mutant(number, base, kind, content, len(told), "; ".join(told))


def _characters(text: str, chance: Random) -> tuple[bytes, list[str]]:
    content, told = text.encode(), []
    if chance.random() < 0.05:
        scraps = chance.choices(SCRAPS, k=chance.randrange(30))
        return "".join(scraps).encode("utf-8", "surrogatepass"), [f"{len(scraps)} scraps alone"]
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.randrange(len(content) + 1)
        length = chance.randrange(1, 40)
        scrap = chance.choice(SCRAPS).encode("utf-8", "surrogatepass")
        how = chance.choice(
            ("write", "write", "replace", "half", "cut", "double", "line twice", "lines swapped", "end")
        )
        if how == "write":
            content = content[:at] + scrap + content[at:]
        elif how == "replace":
            content = content[:at] + scrap + content[at + chance.randrange(12) :]
        elif how == "half":
            scrap = chance.choice(HALVES)
            content = content[:at] + scrap + content[at:]
        elif how == "cut":
            content = content[:at] + content[at + length :]
        elif how == "double":
            content = content[: at + length] + content[at:]
        elif how == "end":
            content = content[: max(at, len(content) // 2)]
        else:
            rows = content.splitlines(keepends=True)
            line = chance.randrange(max(1, len(rows) - 1))
            if how == "line twice":
                rows[line:line] = rows[line : line + 1]
            else:
                rows[line : line + 2] = reversed(rows[line : line + 2])
            content = b"".join(rows)
        told.append(f"{how} at {at}: {scrap[:20]!r}" if how in ("write", "replace", "half") else f"{how} at {at}")
    return content, told


@dataclass
class _Seat:
    """Where a node sits: `items` is the list of its parent, `index` its place there; names: the keys on the way."""

    items: list[Any]
    index: int
    names: tuple[str, ...]
    in_mapping: bool

    @property
    def value(self) -> Any:
        """The node, of a pair its value."""
        return self.items[self.index][1] if self.in_mapping else self.items[self.index]

    @value.setter
    def value(self, node: Any) -> None:
        self.items[self.index] = (self.items[self.index][0], node) if self.in_mapping else node


def _node(text: str) -> Any:
    """A piece of YAML as a node."""
    return yaml.compose(text, Loader=_Loader)


def _word(text: str) -> Any:
    return yaml.ScalarNode("tag:yaml.org,2002:str", text)


def _seats(node: Any, names: tuple[str, ...] = ()) -> Iterator[_Seat]:
    if isinstance(node, yaml.MappingNode):
        for index, (key, value) in enumerate(node.value):
            inside = (*names, str(key.value)[:40])
            yield _Seat(node.value, index, inside, True)
            yield from _seats(value, inside)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield _Seat(node.value, index, (*names, str(index)), False)
            yield from _seats(value, (*names, str(index)))


def _structure(text: str, chance: Random) -> tuple[bytes, list[str]]:
    root, told = _node(text), []
    for _ in range(chance.choice((1, 1, 2, 3))):
        name = chance.choices(list(CHANGES), [weight for weight, _ in CHANGES.values()])[0]
        try:
            seats = list(_seats(root))
        except RecursionError:  # an earlier change has put a node into itself
            break
        if not seats:
            break
        told.append(f"{name} {CHANGES[name][1](seats, chance)}")
    dumped = yaml.serialize(
        root, Dumper=_Dumper, width=chance.choice((80, 10_000)), allow_unicode=chance.random() < 0.7
    )
    content: bytes = dumped if isinstance(dumped, bytes) else dumped.encode("utf-8", "surrogatepass")
    return content, told


def _inside(seats: list[_Seat], *words: str) -> list[_Seat]:
    """Seats right under one of these keys, else all."""
    return [seat for seat in seats if len(seat.names) > 1 and seat.names[-2] in words] or seats


def _strange(seats: list[_Seat], chance: Random) -> str:
    seat, text = chance.choice(seats), chance.choice(STRANGE)
    seat.value = _node(text)
    return f"{'.'.join(seat.names)} = {text[:40]}"


def _milder(seats: list[_Seat], chance: Random) -> str:
    """A change that may well be right: another number, another word that stands in the file, an about."""
    plain = [seat for seat in seats if isinstance(seat.value, yaml.ScalarNode)]
    if not plain:
        return "nothing"
    seat = chance.choice(plain)
    tag = seat.value.tag.rpartition(":")[2]
    words = [each.value.value for each in plain if each.value.tag == seat.value.tag]
    text = {
        "int": chance.choice(("1", "2", "3", "7", "64", "999", "1000", "1001")),
        "float": chance.choice(("0.25", "0.0", "0.001", "1.5", "3", "1e-5")),
        "bool": chance.choice(("true", "false")),
    }.get(tag)
    seat.value = _node(text) if text else _word(chance.choice(words))
    return f"{'.'.join(seat.names)} = {(text or str(seat.value.value))[:40]}"


def _spared(seats: list[_Seat], chance: Random) -> str:
    """Something that may be left out is left out."""
    words = ("about", "min", "max", "with", "matrix", "default", "title", "params", "schedules")
    spare = [seat for seat in seats if seat.in_mapping and (seat.names[-1] in words or seat.names[-2:-1] == ("with",))]
    return _removed(spare or seats, chance)


def _removed(seats: list[_Seat], chance: Random) -> str:
    seat = chance.choice(seats)
    del seat.items[seat.index]
    return ".".join(seat.names)


def _doubled(seats: list[_Seat], chance: Random) -> str:
    seat = chance.choice(seats)
    again = seat.items[seat.index]
    if seat.in_mapping and chance.random() < 0.5:
        again = (_node(chance.choice(KEYS)), again[1])
    seat.items.insert(chance.randrange(len(seat.items) + 1), again)
    return ".".join(seat.names)


def _renamed(seats: list[_Seat], chance: Random) -> str:
    seat = chance.choice([seat for seat in seats if seat.in_mapping] or seats)
    if not seat.in_mapping:
        return "nothing"
    key, value = seat.items[seat.index]
    old = str(key.value)
    if chance.random() < 0.3 and len(old) > 1:  # a near miss
        at = chance.randrange(len(old) - 1)
        new = _word(old[:at] + old[at + 1] + old[at] + old[at + 2 :])
    else:
        new = _node(chance.choice(KEYS))
    seat.items[seat.index] = (new, value)
    return f"{'.'.join(seat.names)} to {str(new.value)[:30]}"


def _swapped(seats: list[_Seat], chance: Random) -> str:
    one, other = chance.choice(seats), chance.choice(seats)
    one.value, other.value = other.value, one.value
    return f"{'.'.join(one.names)} and {'.'.join(other.names)}"


def _wired(seats: list[_Seat], chance: Random) -> str:
    seat = chance.choice(_inside(seats, "in"))
    steps = [each.names[-1] for each in seats if len(each.names) > 1 and each.names[-2] == "steps"] or ["corpus"]
    step, own = chance.choice(steps), seat.names[-3] if len(seat.names) > 2 else "corpus"
    many = "[" + ", ".join(chance.choices(steps, k=chance.randrange(1, 12))) + "]"
    words = [
        own,
        step,
        step,
        step,
        "nowhere",
        f"'{step}[fern]'",
        f"'{step}['",
        f"'{step}[]'",
        f"'{step}[moss,1]'",
        many,
    ]
    words += [
        "'store:00'",
        "'store:'",
        "'path:/dev'",
        '"path:a\\0b"',
        "'path:" + "d/" * 200 + "'",
        "'registry:m@champion'",
    ]
    words += [
        "'registry:m'",
        "'s3://x'",
        "':'",
        "'${params.steps}'",
        "'${params.nowhere}'",
        f"[[{step}]]",
        "[]",
        f"{own}x",
    ]
    text = chance.choice(words)
    seat.value = _node(text)
    return f"{'.'.join(seat.names)} to {text[:40]}"


def _multiplied(seats: list[_Seat], chance: Random) -> str:
    seat = chance.choice(
        [each for each in _inside(seats, "steps") if isinstance(each.value, yaml.MappingNode)] or seats
    )
    if not isinstance(seat.value, yaml.MappingNode):
        return "nothing"
    word = chance.choice(STRANGE)
    text = chance.choice(
        (
            "{" + ", ".join(f"a{number}: [1, 2, 3, 4]" for number in range(9)) + "}",
            "{a: [1, 2], b: [x, y]}",
            "{method: [fern, moss, fern]}",
            "{method: [fern]}",
            "{a: [1, 1.0, true, '1']}",
            "{a: [" + ", ".join(map(str, range(1001))) + "]}",
            "{a: [" + ", ".join(map(str, range(400))) + "]}",
            "{a: [0.1, 1e-9, -0.0, 1e300]}",
            "{a: {b: 1}}",
            "{a: []}",
            "[a, b]",
            "{a: [" + word + "]}",
            "{a: [x, " + word + "]}",
            "{'a.b': [1]}",
            "{'" + "a" * 240 + "': [1, 2]}",
        )
    )
    if text.count("&loop") or text.count("!!"):
        text = "{a: [1, 2]}"
    seat.value.value.append((_word("matrix"), _node(text)))
    return f"{'.'.join(seat.names)} by {text[:40]}"


def _readdressed(seats: list[_Seat], chance: Random) -> str:
    seat, word = chance.choice([seat for seat in seats if seat.names[-1] == "uses"] or seats), chance.choice(ADDRESSES)
    seat.value = _word(word)
    return f"{'.'.join(seat.names)} to {word[:40]}"


def _declared(seats: list[_Seat], chance: Random) -> str:
    """A parameter that is there is declared anew, or one more is, which nothing takes."""
    seat, text = chance.choice(_inside(seats, "params")), chance.choice(PARAMS)
    if chance.random() < 0.5 and seat.in_mapping:
        seat.items.append((_word(f"more_{chance.randrange(100)}"), _node(text)))
    else:
        seat.value = _node(text)
    return f"{'.'.join(seat.names)} as {text[:60]}"


def _bounded(seats: list[_Seat], chance: Random) -> str:
    parts = [seat for seat in seats if len(seat.names) > 2 and seat.names[-3] == "params"] or seats
    seat, text = chance.choice(parts), chance.choice(STRANGE)
    seat.value = _node(text)
    return f"{'.'.join(seat.names)} = {text[:40]}"


def _inserted(seats: list[_Seat], chance: Random) -> str:
    seat, text = chance.choice(_inside(seats, "with", "in", "matrix", "params")), chance.choice(INSERTS)
    seat.value = _word(text)
    return f"{'.'.join(seat.names)} = {text[:40]}"


def _added(seats: list[_Seat], chance: Random) -> str:
    piece = _node("{" + chance.choice(PIECES) + "}").value[0]
    wide = [seat for seat in seats if isinstance(seat.value, yaml.MappingNode)]
    if not wide:
        return "nothing"
    steps = piece[0].value in ("if", "retries", "timeout_minutes", "matrix", "with", "in")
    fitting = [seat for seat in wide if len(seat.names) == (4 if steps else 2)] or wide
    seat = chance.choice(fitting)
    pairs = seat.value.value
    pairs[:] = [pair for pair in pairs if pair[0].value != piece[0].value]
    pairs.append(piece)
    return f"{'.'.join(seat.names)}: {piece[0].value}"


CHANGES: dict[str, tuple[int, Callable[[list[_Seat], Random], str]]] = {
    "milder": (5, _milder),
    "spared": (2, _spared),
    "strange": (2, _strange),
    "removed": (1, _removed),
    "doubled": (1, _doubled),
    "renamed": (1, _renamed),
    "swapped": (1, _swapped),
    "wired": (1, _wired),
    "multiplied": (1, _multiplied),
    "readdressed": (1, _readdressed),
    "declared": (2, _declared),
    "bounded": (1, _bounded),
    "inserted": (1, _inserted),
    "added": (2, _added),
}
"""Name of a change -> how often it is taken, and what it does to one of the places."""
