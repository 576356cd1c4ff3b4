"""The command that looks at anybody's checkpoint the way our own releases are looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.terminal import echo


def validate(
    folder: Annotated[Path, typer.Argument(help="A drafter's folder: config.json and *.safetensors; or a GGUF file.")],
    target: Annotated[
        str, typer.Option(help="Its target: builtin, or a folder in Hugging Face format; compared with it.")
    ] = "",
) -> None:
    """Is a drafter's checkpoint exactly what engines expect? Names, shapes, dtypes, vocabulary, numbers, config."""
    from components.publish.release.validate import validate_folder

    for line in validate_folder(folder, target):
        echo(line)
