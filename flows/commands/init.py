"""`draftsmith init`: a commented pipelines.yaml for a model, its prompts and engines, checked before it is written."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from jinja2 import Environment, StrictUndefined

from components.contract import UserError
from components.data.sources.addresses import PREFIX, is_url
from components.engines.profiles import PROFILES
from components.outside_json import JsonObject, read_object
from components.pipeline_checks.positions import positions_of
from components.positions import ROOM_FOR_GUESSES, SHORTEST_CACHE
from components.tables import duration
from components.targets.source import BUILTIN, local_folder
from flows.commands.plan_on import estimate_run
from flows.commands.terminal import DEFAULT_FILE, Invocation, echo
from flows.planning.machines import find_machine
from flows.planning.plan import check_file
from flows.planning.this_machine import has_cuda
from flows.planning.workload import CHARACTERS_PER_TOKEN, in_bytes
from storage.artifacts.store import Store

TEMPLATE = Path(__file__).with_name("first_pipeline.yaml.jinja")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?")
NAME = re.compile(r"[a-z][a-z0-9-]*")
UNWRITTEN_LINE = re.compile(rf"^\S*{re.escape(DEFAULT_FILE.name)}:\d+: ", re.MULTILINE)  # nobody can look it up
NO_DATA = "python-stdlib"
METHODS = ("eagle3", "mtp")  # of a first pipeline, as far as its engines serve them
SERVED_BY_ALL = "draft-model"  # every engine that answers requests takes a small language model
ROOMY = 512  # positions that the steps' own settings have room in, for prompts of the usual length too
ANSWER_TOKENS = 96  # of an answer, where the steps' own settings stay
LONGEST_PROMPT = 4000  # characters, that data.collect_prompts takes unless it is told otherwise


def init(
    folder: Annotated[Path, typer.Argument(help="Where pipelines.yaml is written.")] = Path(),
    *,
    model: Annotated[str, typer.Option(help="A folder in Hugging Face format, a hub id, or builtin.")] = "builtin",
    prompts: Annotated[
        str, typer.Option(help="A file or folder of prompts or chats, or an address of data.")
    ] = NO_DATA,
    engine: Annotated[list[str], typer.Option(help="An engine that will serve it; may be repeated.")] = [],  # noqa: B006
    method: Annotated[
        list[str], typer.Option(help="A method; may be repeated.", show_default="those of eagle3, mtp that are served")
    ] = [],  # noqa: B006
    draft_vocab_size: Annotated[int, typer.Option(min=0, help="Tokens that drafters know; 0: the step's default.")] = 0,
    name: Annotated[str, typer.Option(help="The pipeline's name.")] = "mine",
) -> None:
    """Write a commented pipelines.yaml for your model, prompts and engines, and say what its first run will take."""
    file = folder / DEFAULT_FILE
    if file.exists():
        raise UserError(f"{file}: is there already: name another folder, or remove it")
    if not NAME.fullmatch(name):
        raise UserError(f"--name {name}: take small letters, digits and hyphens, and a letter first")
    source = _model(model)
    configured = local_folder(source)
    config = {} if configured is None else read_object(configured / "config.json")
    methods = method or _served_methods(engine)
    text = first_pipeline(name, source, config, _prompts(prompts), engine, methods, draft_vocab_size)
    with tempfile.TemporaryDirectory() as place:  # what is wrong is said before anything is written
        tried = Path(place) / DEFAULT_FILE
        tried.write_text(text, encoding="utf-8")
        try:
            steps = len(check_file(tried, Store(), Invocation.packages)[name].steps)
        except UserError as error:
            raise UserError(UNWRITTEN_LINE.sub("", str(error))) from None
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    echo(f"{file}: pipeline {name}, {steps} steps")
    where = "" if file == DEFAULT_FILE else f" -f {file}"
    try:
        estimate = estimate_run(name, [], find_machine("here", file), file, Store(), Invocation.packages)
    except UserError as error:
        echo(f"what a run will take cannot be said yet: {error}")
    else:
        takes, disk = duration(estimate.seconds), in_bytes(estimate.disk)
        echo(
            f"its first run takes about {takes} here and {disk} of disk (plan {name} --on here says what that rests on)"
        )
        for fault in estimate.faults:
            echo(fault)
    commands = (f"plan {name}", f"rehearse {name}", f"run {name}")
    echo("\n".join(["next:", *(f"  draftsmith {command}{where}" for command in commands)]))


def first_pipeline(
    name: str,
    model: str,
    config: JsonObject,
    prompts: str,
    engines: list[str],
    methods: list[str],
    draft_vocab_size: int,
) -> str:
    """The text of the file. model, prompts: as its steps take them; config: the model's, {} where it is not here."""
    measured_tokens, prompt_characters = _lengths_that_fit(config)
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=name,
        model=model,
        model_name=Path(model).name,
        prompts=prompts,
        is_own_data=prompts != NO_DATA,
        methods=methods,
        engines=engines,
        draft_vocab_size=draft_vocab_size,
        measured_tokens=measured_tokens,
        prompt_characters=prompt_characters,
        one_module="mtp" in methods and "vllm" in engines,
        is_quantised=bool(config.get("quantization_config")),
        dtype="bfloat16" if has_cuda() else "float32",
    )


def _lengths_that_fit(config: JsonObject) -> tuple[int, int]:
    """(tokens of a context and of an answer, characters of a prompt) that measuring has room for, where the target has
    so few positions that the steps' own settings do not fit; else 0.

    A third of what drafts leave is an answer, the rest a prompt: some prompts are longer than others.
    """
    positions = positions_of(config)
    if positions is None:
        return 0, 0
    tokens = (positions - ROOM_FOR_GUESSES) // 3 if positions < ROOMY else 0
    if tokens < SHORTEST_CACHE:
        tokens = 0  # of still fewer the check says what is wrong
    characters = CHARACTERS_PER_TOKEN * (positions - ROOM_FOR_GUESSES - (tokens or ANSWER_TOKENS))
    return tokens, characters if 0 < characters < LONGEST_PROMPT else 0


def _served_methods(engines: list[str]) -> list[str]:
    """The methods of a first pipeline that every one of these engines serves; a name of no engine is refused later."""
    profiles = [PROFILES[engine] for engine in engines if engine in PROFILES]
    served = [method for method in METHODS if all(method in profile.methods for profile in profiles)]
    return served or [SERVED_BY_ALL]


def _model(model: str) -> str:
    """The model as a pipeline in any folder names it."""
    folder = local_folder(model)
    if folder is None and not HUB_ID.fullmatch(model):
        raise UserError(f"--model {model}: no such folder, and no hub id (owner/name)")
    if folder is None or model == BUILTIN:
        return model
    if not (folder / "config.json").is_file():
        raise UserError(f"--model {model}: no config.json in it: name the folder that holds one")
    return str(folder)


def _prompts(prompts: str) -> str:
    """The prompts as a pipeline in any folder names them."""
    if prompts == NO_DATA or prompts.startswith(PREFIX) or is_url(prompts):
        return prompts
    if not Path(prompts).exists():
        raise UserError(f"--prompts {prompts}: no such file or folder")
    return str(Path(prompts).resolve())
