# ruff: noqa: E501 (a case is easier to read on its line)
"""Bad input costs one line each, with the right line of the file, exit code 2, and nothing is run or written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_builder import step
from toy_garden import GARDEN

STEP = "      only: {uses: toys.plant}\n"
HEAD = "pipelines:\n  p:\n    steps:\n"
BOMB = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}, *{old}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
DEEP = "a: " + "[" * 40 + "]" * 40 + "\n"

CASES: dict[str, tuple[str, list[str]]] = {
    # the file
    "empty": ("", ["1: the file is empty"]),
    "only a comment": ("# nothing\n", ["1: the file is empty"]),
    "a list": ("- a\n", ["1: the file must be a mapping that starts with 'pipelines:'"]),
    "a word": ("pipelines\n", ["1: the file must be a mapping that starts with 'pipelines:'"]),
    "a tab": ("pipelines:\n\tp:\n", ["2: a tab indents this line: use spaces"]),
    "a tab after spaces": ("pipelines:\n  p:\n  \tsteps: {}\n", ["3: a tab indents this line: use spaces"]),
    "an alias bomb": (BOMB, ["4: more than 8 aliases (*name): write the values out"]),
    "an alias to itself": ("pipelines: &p\n  q: *p\n", ["1: an alias (*name) that contains itself"]),
    "too deep": (DEEP, ["1: nested deeper than 30"]),
    "two documents": (HEAD + STEP + "---\na: 1\n", ["5: a second document (---)"]),
    "a merge key": (HEAD + "      only:\n        <<: {uses: toys.plant}\n        uses: toys.plant\n", [
        "5: merge keys (<<) are not read here: write the values out"]),
    "a tag": ("pipelines: !!python/object:os.system {}\n", [
        "1: the tag tag:yaml.org,2002:python/object:os.system means nothing here"]),
    "not closed": ("pipelines: {a: [1,\n", ["1: the [ at column 16 is not closed"]),
    "a bracket that the next line is taken into": (HEAD + "      a: {uses: toys.plant, with: {num_rows: 5}\n      b: {uses: toys.plant}\n", [
        "5: not YAML: did not find expected ',' or '}', inside the { of line 4"]),
    "a quote that is never closed": (HEAD + '      a: {uses: "toys.plant}\n' + STEP * 3, ["4: the quote at column 17 is not closed"]),
    "a quote that another closes": (HEAD + '      a: {uses: "toys.plant}\n' + STEP * 3 + '      b: {uses: "toys.plant"}\n', [
        "4: the quote at column 17 is closed only on line 8: close it where its text ends"]),
    "a word without its colon": (HEAD + STEP + "      about\n      b: {uses: toys.plant}\n", ["5: not YAML: could not find expected ':'"]),
    "no pipelines": ("pipeline: {}\n", ["1: 'pipelines' is missing", "1: unknown key 'pipeline' (did you mean 'pipelines'?)"]),
    "no steps": ("pipelines:\n  p: {about: x}\n", ["2: pipeline 'p': 'steps' is missing"]),
    "empty steps": ("pipelines:\n  p:\n    steps: {}\n", ["3: pipeline 'p': 'steps' is empty"]),
    # characters and numbers that nothing can work with
    "a control character": (HEAD + STEP + "# a \x07 bell\n", ["5: the character U+0007 at column 5: take it out"]),
    "a line's end that no editor shows": (HEAD + STEP + "# a\u2028b\n", ["5: the character U+2028 at column 4: take it out"]),
    "a control character in a key": (HEAD + '      only: {uses: toys.plant, with: {"num\\0": 1}}\n', [
        "4: a key holds the control character U+0000"]),
    "a control character in quotes": (HEAD + '      only: {uses: "toys.pl\\0ant"}\n', [
        "4: a text holds the control character U+0000"]),
    "a control character in a list": (HEAD + '      only: {uses: toys.plant, matrix: {a: [x, "\\e[31m"]}}\n', [
        "4: a text holds the control character U+001B"]),
    "a whole number without end": ("pipelines:\n  p:\n    params:\n      n: {type: int, default: " + "9" * 309 + "}\n    steps:\n" + STEP, [
        "4: '" + "9" * 57 + "...' is no number that can be worked with"]),
    "a number without end": ("pipelines:\n  p:\n    params:\n      n: {type: float, default: 1e999}\n    steps:\n" + STEP, [
        "4: '1e999' is no number that can be worked with"]),
    "half a bound on whole numbers": ("pipelines:\n  p:\n    params:\n      n: {type: int, default: 1, min: .5}\n    steps:\n" + STEP, [
        "4: parameter 'n': 'min' 0.5 is no whole number, and a value of type int has whole ones"]),
    "a bound beyond all numbers": ("pipelines:\n  p:\n    params:\n      n: {type: int, default: 1, max: 1e300}\n    steps:\n" + STEP, [
        "4: parameter 'n': 'max' 1e+300 is beyond the largest whole number, 9223372036854775807"]),
    "a list shorter than nothing": ("pipelines:\n  p:\n    params:\n      n: {type: list, default: [], min: -1}\n    steps:\n" + STEP, [
        "4: parameter 'n': 'min' -1.0 is no length of a list"]),
    "a choice of another type": ("pipelines:\n  p:\n    params:\n      n: {type: int, default: 1, choices: [1, two]}\n    steps:\n" + STEP, [
        "4: parameter 'n': each of 'choices' must be a whole number, not 'two'"]),
    "a choice that is a list": ("pipelines:\n  p:\n    params:\n      n: {type: list, default: [], choices: [[1]]}\n    steps:\n" + STEP, [
        "4: parameter 'n': each of 'choices' must be a word, a number, true or false, not [1]"]),
    "a long name": (HEAD + "      " + "a" * 61 + ": {uses: toys.plant}\n", [
        "4: step name 'aaaaaaaaaaaaaaaaaaaa...' has 61 letters: use at most 60"]),
    "a matrix that explodes": (HEAD + "      only: {uses: toys.plant, matrix: {a: &v [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], b: *v, c: *v, d: *v}}\n", [
        "4: step 'only': its matrix and inputs have 10,000 combinations, and at most 1,000 are worked on"]),
    # keys
    "a key twice": (HEAD + STEP + STEP, ["5: 'only' is given twice (first on line 4)"]),
    "unknown pipeline key": ("pipelines:\n  p:\n    abuot: x\n    steps:\n" + STEP, [
        "3: pipeline 'p': unknown key 'abuot' (did you mean 'about'?)"]),
    "unknown step key": (HEAD + "      only:\n        uses: toys.plant\n        retires: 1\n", [
        "6: step 'only': unknown key 'retires' (did you mean 'retries'?)"]),
    "no uses": (HEAD + "      only: {with: {}}\n", ["4: step 'only': 'uses' is missing"]),
    "wrong type": (HEAD + "      only: {uses: toys.plant, retries: often}\n", [
        "4: step 'only': 'retries' must be a whole number, not 'often'"]),
    "out of range": (HEAD + "      only: {uses: toys.plant, retries: -1}\n", [
        "4: step 'only': 'retries' must be at least 0, not -1"]),
    "a step that is a word": (HEAD + "      only: toys.plant\n", ["4: pipeline 'p': 'only' must be a mapping, not 'toys.plant'"]),
    "a step name": (HEAD + "      Only: {uses: toys.plant}\n", ["4: step name 'Only': use a-z, 0-9, _, and begin with a letter"]),
    "overlap": ("pipelines:\n  p:\n    overlap: waits\n    steps:\n" + STEP, [
        "3: pipeline 'p': 'overlap' must be one of wait, skip, not 'waits' (did you mean 'wait'?)"]),
    "approval": ("pipelines:\n  p:\n    approval: perhaps\n    steps:\n" + STEP, [
        "3: pipeline 'p': 'approval' must be true, false or {within_minutes: N}, not 'perhaps'"]),
    "approval in no time": ("pipelines:\n  p:\n    approval: {within_minutes: 0, who: ann}\n    steps:\n" + STEP, [
        "3: pipeline 'p': 'within_minutes' must be more than 0, not 0",
        "3: pipeline 'p': unknown key 'who'"]),
    "retry": ("pipelines:\n  p:\n    retry: {when: busy, until: dawn, timezone: Mars}\n    steps:\n" + STEP, [
        "3: pipeline 'p': 'until' must be a time of day such as \"06:00\", not 'dawn'",
        "3: pipeline 'p': 'when' must be one of noisy, not 'busy'"]),
    "retention": ("retention: {keep_runs: 0, after: [q], every: day}\npipelines:\n  p:\n    steps:\n" + STEP, [
        "1: retention: 'keep_runs' must be at least 1, not 0",
        "1: retention: unknown key 'every'",
    ]),
    "notify": ("pipelines:\n  p:\n    notify: {on: [failed, broken], to: ops, whom: ann}\n    steps:\n" + STEP, [
        "3: pipeline 'p': 'on' must be one of failed, refused, promoted, waiting, drift, not 'broken'",
        "3: pipeline 'p': 'to' must be a block as TYPE/NAME, such as slack-webhook/ops, not 'ops'",
        "3: pipeline 'p': unknown key 'whom'"]),
    "online": ("pipelines:\n  p:\n    online: sometimes\n    steps:\n" + STEP, [
        "3: pipeline 'p': 'online' must be true or false, not 'sometimes'"]),
    "retry in a zone": ("pipelines:\n  p:\n    retry: {until: '06:00', timezone: Mars}\n    steps:\n" + STEP, [
        "3: pipeline 'p': unknown timezone 'Mars'"]),
    "triggers": ("pipelines:\n  p:\n    triggers:\n      - {after: q}\n      - {after: p}\n      - {file: a, registry: m}\n"
                 "      - {registry: a b}\n      - {file: x, alias: champion}\n      - {file: y, params: {n: 1}}\n    steps:\n" + STEP, [
        "4: trigger number 1: no pipeline 'q' (known: p)",
        "5: trigger number 2: a pipeline cannot start after itself",
        "6: trigger number 3: give exactly one of after, file, registry, not file and registry",
        "7: trigger number 4: 'a b' is not the name of a registered model",
        "8: trigger number 5: 'alias' belongs to a registry trigger",
        "9: trigger number 6: unknown parameter 'n'"]),
    "a trigger of no kind": ("pipelines:\n  p:\n    triggers: [{fil: x}]\n    steps:\n" + STEP, [
        "3: trigger number 1: unknown key 'fil' (did you mean 'file'?)"]),
    "pipelines in a circle": ("pipelines:\n  p:\n    triggers: [{after: q}]\n    steps:\n" + STEP
                              + "  q:\n    triggers: [{after: p}]\n    steps:\n" + STEP, [
        "3: pipelines would start each other for ever: p -> q -> p"]),
    "a name that every form has": ("pipelines:\n  p:\n    params:\n      force: {type: bool, default: true}\n      class: {type: int, default: 1}\n"
                                   "    steps:\n" + STEP, [
        "4: parameter name 'force': every run has a field of that name already, choose another",
        "5: parameter name 'class': Python keeps this word for itself, choose another"]),
    # parameters and schedules
    "a default out of range": ("pipelines:\n  p:\n    params:\n      n: {type: int, default: 0, min: 1}\n    steps:\n" + STEP, [
        "4: parameter 'n': the default must be at least 1, not 0"]),
    "a default of the wrong type": ("pipelines:\n  p:\n    params:\n      n: {type: int, default: '3'}\n    steps:\n" + STEP, [
        "4: parameter 'n': the default must be a whole number, not '3'"]),
    "an enum without choices": ("pipelines:\n  p:\n    params:\n      n: {type: enum, default: a}\n    steps:\n" + STEP, [
        "4: parameter 'n': an enum needs 'choices'"]),
    "an unknown type": ("pipelines:\n  p:\n    params:\n      n: {type: itn, default: 1}\n    steps:\n" + STEP, [
        "4: parameter 'n': 'type' must be one of int, float, bool, str, enum, list, not 'itn' (did you mean 'int'?)"]),
    "bad cron": ("pipelines:\n  p:\n    schedules:\n      - slug: n\n        cron: every day\n    steps:\n" + STEP, [
        "5: schedule 'n': 'every day' is not a cron line of five fields (minute hour day month weekday) that ever comes"]),
    "cron lines that Prefect reads otherwise": ("pipelines:\n  p:\n    schedules:\n" + "".join(
        f"      - {{slug: s{number}, cron: '{cron}'}}\n" for number, cron in enumerate(["* * * * * *", "0 2 LW * *", "0 2 * * 5L"])
    ) + "    steps:\n" + STEP, [
        f"{4 + number}: schedule 's{number}': '{cron}' is not a cron line of five fields (minute hour day month weekday) that ever comes"
        for number, cron in enumerate(["* * * * * *", "0 2 LW * *", "0 2 * * 5L"])]),
    "a timezone that Prefect does not know": (
        "pipelines:\n  p:\n    schedules:\n      - {slug: n, cron: '0 2 * * *', timezone: posix/UTC}\n    steps:\n" + STEP,
        ["4: schedule 'n': unknown timezone 'posix/UTC'"]),
    "bad timezone": (
        "pipelines:\n  p:\n    schedules:\n      - {slug: n, cron: '0 2 * * *', timezone: Europe/Berln}\n    steps:\n" + STEP,
        ["4: schedule 'n': unknown timezone 'Europe/Berln' (did you mean 'Europe/Berlin'?)"]),
    "a schedule's unknown parameter": (
        "pipelines:\n  p:\n    schedules:\n      - {slug: n, cron: '0 2 * * *', params: {m: 1}}\n    steps:\n" + STEP,
        ["4: schedule 'n': unknown parameter 'm'"]),
    "a slug twice": (
        "pipelines:\n  p:\n    schedules:\n      - {slug: n, cron: '0 2 * * *'}\n      - {slug: n, cron: '0 3 * * *'}\n    steps:\n" + STEP,
        ["5: schedule 'n' is given twice"]),
    # steps among themselves
    "an unknown input step": (GARDEN.with_inputs("draft", corpus="corpsu").text, [
        "12: step 'draft': unknown step 'corpsu' (did you mean 'corpus'?)"]),
    "a cycle": (HEAD + "      a: {uses: toys.grow, in: {corpus: b}}\n      b: {uses: toys.grow, in: {corpus: a}}\n", [
        "4: steps wait for each other: a -> b -> a"]),
    "itself": (HEAD + "      a: {uses: toys.grow, in: {corpus: a}}\n", ["4: step 'a': a step cannot be its own input ('a')",
        "4: steps wait for each other: a -> a"]),
    "an unknown insert": (GARDEN.with_setting("draft", num_steps="${params.stpes}").text, [
        "14: step 'draft': ${params.stpes}: unknown parameter 'stpes' (did you mean 'steps'?)"]),
    "a parameter that is not there": (GARDEN.with_param_named("steps", "stpes").with_setting("corpus", num_rows="${params.steps}").text, [
        "9: step 'corpus': ${params.steps}: unknown parameter 'steps' (did you mean 'stpes'?) (again on line 14)"]),
    "one bad parameter for many steps": (GARDEN.with_param("steps", type="float").with_other_step(
        "timed", step("toys.grow", "corpus", num_steps="${params.steps}")).with_setting("corpus", num_rows="${params.steps}").text, [
        "9: step 'corpus': setting 'num_rows': must be a valid integer, not 6.0 (from the parameter 'steps') (again on lines 14, 16)"]),
    "one parameter that names no step": (GARDEN.with_other_param("steps", type="str", default="nowhere").with_inputs("page", judged=["judged", "${params.steps}"]).with_inputs(
        "timed", draft="${params.steps}").with_setting("draft", num_steps=6).text, [
        "16: step 'timed': unknown step 'nowhere' (known: corpus, draft, judged, timed, page) (again on line 17)"]),
    "a step that many want": (GARDEN.with_step_named("corpus", "corpse").text, [
        "12: step 'draft': unknown step 'corpus' (did you mean 'corpse'?) (again on line 15)"]),
    "an unknown axis": (GARDEN.with_setting("draft", method="${matrix.methods}").text, [
        "14: step 'draft': ${matrix.methods}: unknown matrix axis 'methods' (did you mean 'method'?)"]),
    "an expression": (GARDEN.with_setting("draft", num_steps="${params.steps * 2}").text, [
        "14: step 'draft': ${params.steps * 2}: only ${params.NAME} and ${matrix.NAME} can be inserted"]),
    "an unknown condition": (HEAD + "      only: {uses: toys.plant, if: machine.cdua}\n", [
        "4: step 'only': 'if' knows machine.cuda, params.NAME and not ..., not 'machine.cdua'"]),
    "a matrix that is no list": (HEAD + "      only: {uses: toys.plant, matrix: {a: 3}}\n", [
        "4: step 'only': matrix 'a' must be a list of values, not 3"]),
    # steps and their functions
    "an unknown function": (HEAD + "      only: {uses: toys.plnt}\n", [
        "4: step 'only': unknown step function 'toys.plnt' (did you mean 'plant'?)"]),
    "an unknown room": (HEAD + "      only: {uses: tois.plant}\n", [
        "4: step 'only': unknown step function 'tois.plant': there is no room 'tois' (did you mean 'toys'?)"]),
    "an unknown setting": (HEAD + "      only:\n        uses: toys.plant\n        with:\n          num_row: 5\n", [
        "7: step 'only': unknown setting 'num_row' (did you mean 'num_rows'?)"]),
    "a setting without a name": (HEAD + "      only:\n        uses: toys.plant\n        with:\n          'a:b': 5\n          '': 5\n", [
        "7: step 'only': unknown setting 'a:b' (known: num_rows, fast, share, where, source)",
        "8: step 'only': unknown setting '' (known: num_rows, fast, share, where, source)"]),
    "a setting out of range": (HEAD + "      only: {uses: toys.plant, with: {num_rows: 0}}\n", [
        "4: step 'only': setting 'num_rows': must be greater than or equal to 1, not 0"]),
    "a setting of the wrong type": (HEAD + "      only: {uses: toys.plant, with: {num_rows: '5'}}\n", [
        "4: step 'only': setting 'num_rows': must be a valid integer, not '5'"]),
    "a setting not among its words": (HEAD + "      only: {uses: toys.plant, with: {source: sead}}\n", [
        "4: step 'only': setting 'source' must be one of 'seed', 'cutting', not 'sead' (did you mean 'seed'?)"]),
    "a wrong kind": (GARDEN.with_inputs("page", judged="draft").text, [
        "17: step 'page': 'judged' wants Measurements, but 'draft' makes Draft"]),
    "a missing input": (HEAD + "      only: {uses: toys.grow}\n", [
        "4: step 'only': the input 'corpus' (Corpus) is missing: give it under 'in'"]),
    "an unknown input": (GARDEN.with_inputs("page", judgd="judged").text, [
        "17: step 'page': toys.judge_all takes no input 'judgd' (did you mean 'judged'?)"]),
    "a list where one is wanted": (GARDEN.with_inputs("timed", draft=["draft"]).text, [
        "16: step 'timed': 'draft' takes one Draft, not a list"]),
    "a registered version of no use": (HEAD + "      only: {uses: toys.grow, in: {corpus: 'registry:x@champion'}}\n", [
        "4: step 'only': 'corpus' wants Corpus, but 'registry:x@champion' gives a "
        "Release, Draft, Target, DepthPolicy, Features, Conversations or Prompts"]),
    "a registered model without a version": (HEAD + "      only: {uses: toys.grow, in: {corpus: 'registry:x'}}\n", [
        "4: step 'only': 'registry:x': write registry:NAME@champion, or registry:NAME@3 for a version"]),
    "a query as an input": (HEAD + "      only: {uses: toys.grow, in: {corpus: 'query:v_speed'}}\n", [
        "4: step 'only': 'query:' is no input: an answer changes with the history, a key must not; "
        "give the artifact: store:KEY"]),
    "an absent artifact": (HEAD + "      only: {uses: toys.grow, in: {corpus: 'path:nowhere'}}\n", [
        "4: step 'only': 'path:nowhere' has no artifact.json: it is not the directory of an artifact"]),
    # all at once
    "everything at once": (
        HEAD + "      a: {uses: toys.plnt}\n      b: {uses: toys.grow, in: {corpus: a}, with: {num_step: 3, pause_s: x}}\n      c: {uses: toys.judge}\n",
        [
            "4: step 'a': unknown step function 'toys.plnt' (did you mean 'plant'?)",
            "5: step 'b': setting 'pause_s': must be a valid number, not 'x'",
            "5: step 'b': unknown setting 'num_step' (did you mean 'num_steps'?)",
            "6: step 'c': the input 'corpus' (Corpus) is missing: give it under 'in'",
            "6: step 'c': the input 'draft' (Draft) is missing: give it under 'in'",
        ]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_told_in_one_line_each(
    name: str, pipelines: Callable[[str], Path], draftsmith: Callable[..., tuple[int, str, str]], home: Path
) -> None:
    text, expected = CASES[name]
    code, out, err = draftsmith("check", "-f", pipelines(text))
    told = err.splitlines()
    assert [line.partition(" (docs: ")[0] for line in told] == [f"pipelines.yaml:{line}" for line in expected]
    assert told[-1].endswith(("(docs: first-pipeline)", "(docs: scale)"))
    assert (code, out) == (2, "")
    assert not home.exists()


@pytest.mark.parametrize("command", ["plan", "run"])
def test_plan_and_run_refuse_what_check_refuses(
    command: str, pipelines: Callable[[str], Path], draftsmith: Callable[..., tuple[int, str, str]], home: Path
) -> None:
    code, out, err = draftsmith(command, "garden", "-f", pipelines(GARDEN.with_function("judged", "toys.jdge").text))
    assert (code, out) == (2, "")
    told = "pipelines.yaml:15: step 'judged': unknown step function 'toys.jdge' (did you mean 'judge'?)"
    assert err == f"{told} (docs: first-pipeline)\n"
    assert not home.exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["-p", "steps=0"], "-p steps: must be at least 1, not 0"),
        (["-p", "steps=many"], "-p steps: must be a whole number, not 'many'"),
        (["-p", "stesp=3"], "-p stesp: pipeline 'garden' has no such parameter (did you mean 'steps'?)"),
        (["-p", "steps"], "-p steps: write it as name=value"),
        (["-p", "steps=" + "9" * 400], "-p steps: must be a whole number, not 9999"),
        (["-p", "pause=" + "9" * 400], "-p pause: must be a number, not 9999"),
        (["-p", "pause=" + "[" * 5000], "-p pause: must be a number, not '[[["),
        (["-p", "sunny=1"], "-p sunny: must be true or false, not 1"),
        (["--force", "drfat"], "--force drfat: there is no such step (did you mean 'draft'?)"),
        (["--to", "nowhere"], "--to nowhere: there is no such step"),
        (["--device", "tpu"], "--device tpu: unknown device (known: auto, cpu, cuda, cuda:N)"),
    ],
)
def test_wrong_options_are_told_in_one_line(
    given: list[str], said: str, pipelines: Callable[[str], Path], draftsmith: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = draftsmith("plan", "garden", "-f", pipelines(GARDEN.text), *given)
    assert (code, out) == (2, "")
    assert err.splitlines()[0].startswith(said)
    assert len(err.splitlines()) == 1
