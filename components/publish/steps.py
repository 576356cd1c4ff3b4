"""The steps of components/publish, as pipelines.yaml names them: what each takes, its settings, and what it makes.

A step imports its implementation when it runs, so that `check` and `plan` read its settings in no time, and hands on
all of its arguments; tests/components/test_steps.py holds the two signatures together.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from components.contract import Context, DepthPolicy, Draft, Measurements, Page, Release, Target
from components.drafts.settings import Place, check_settings
from components.engines.profiles import Engine
from components.methods import MethodName
from components.outside_json import JsonObject


def try_release(
    target: Target,
    *,
    methods: Annotated[list[MethodName], Field(min_length=1)] = ["eagle3"],  # noqa: B006 - read, never changed
    settings: dict[str, dict[str, Any]] = {},  # noqa: B006 - read, never changed
    draft_vocab_size: Annotated[int, Field(ge=0)] = 0,
    engines: list[Engine] = [],  # noqa: B006 - read, never changed
    llama_cpp: str = "",
    ctx: Context,
) -> Page:
    """Export an untrained drafter of each method for the engines, read it back and decode with it.

    The tokens must equal plain decoding's, and the draft tokens those of the drafter before its export; the first fault
    ends the run before anything is trained. The page shows the format that each engine will get.

    Args:
        target: the model that the drafters will serve.
        methods: the methods that the pipeline trains.
        settings: the methods' settings, as in drafts.train_draft.
        draft_vocab_size: size of the draft vocabulary, as in drafts.train_draft; here the first tokens are taken.
        engines: the engines that will serve them, as in publish.export_release.
        llama_cpp: the folder with llama.cpp's converter, as in publish.export_release.
    """
    arguments = locals().copy()
    from components.publish.release.dry_run import try_release as run

    return run(**arguments)


def reopen_release(target: Target, release: Release, drafts: list[Draft], *, ctx: Context) -> Page:
    """Reopen every format of a release and decode with it, as a rehearsal does after each release.

    The draft tokens must be those of the drafter it was made of, and decoding must change no token. What only another
    program opens is `unopened`; where a format rounds weights (`rounded`), decoding alone is compared.

    Args:
        target: the model that the drafters serve.
        release: what publish.export_release made.
        drafts: those that it was given.
    """
    from components.publish.release.reopen import reopen_release as run

    return run(target, release, drafts, ctx=ctx)


def export_release(
    target: Target,
    drafts: list[Draft],
    policy: DepthPolicy,
    acceptance: list[Measurements],
    end_to_end: Measurements,
    *,
    engines: list[Engine] = [],  # noqa: B006 - read, never changed
    include: Literal["winner", "all"] = "winner",
    license: Annotated[str, Field(min_length=1)] = "other",
    target_name: str = "",
    llama_cpp: str = "",
    ctx: Context,
) -> Release:
    """Export the winning drafter in formats that pass exact checks, with a model card that holds the evidence.

    Args:
        target: the model that the drafters serve; referenced by the release, copied only by `stitched`.
        drafts: the trained drafters.
        policy: chosen depths with their measurements and the promotion gate.
        acceptance: acceptance maps of the drafters; their keys are recorded.
        end_to_end: the timed comparison; its key is recorded.
        engines: the engines that will serve it: vllm, sglang, llama.cpp, mnn, tensorrt-llm, transformers, openvino,
            speculators. A drafter is written in the formats they read; one that any of them could not serve is refused,
            by `draftsmith check` before training. Empty writes the format of the drafter's method, without that check.
        include: "winner" exports the drafter with the best measured lower bound, "all" the others as well.
        license: SPDX name of the drafter's licence, as model hubs write it; "other" means: see the target's licence.
        target_name: the target's name in public files; empty: a hub id as it is, or the last part of a folder's path.
            Give a private target a name that reveals nothing.
        llama_cpp: the folder with llama.cpp's convert_hf_to_gguf.py, which makes the GGUF for llama.cpp; empty looks at
            $DRAFTSMITH_LLAMA_CPP and on the PATH. Without the converter, the release holds the folder that it reads,
            and the card says how to convert it.
    """
    arguments = locals().copy()
    from components.publish.release.export import export_release as run

    return run(**arguments)


def upload_release(
    release: Release,
    comparisons: list[Measurements] | None = None,
    *,
    repo: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")],
    private: bool = True,
    revision: Annotated[str, Field(min_length=1)] = "main",
    message: str = "",
    ctx: Context,
) -> Page:
    """Upload a release to the Hugging Face hub in one commit. Needs `--online` and $HF_TOKEN; the page has its address.

    Args:
        release: what publish.export_release made.
        comparisons: of speedup.compare_engines. The upload is refused while an engine's newest comparison among them is
            a mismatch.
        repo: OWNER/NAME of the model repository, which is created if it does not exist.
        private: true makes a new repository visible to its owner only; false refuses a release that names a private
            target, or holds weights of it. Public are the built-in target and hub ids that anybody can read.
        revision: the branch of the commit; created from the default branch if it does not exist.
        message: the commit message; empty names method, depth and key.
    """
    from components.publish.release.upload import upload_release as run

    return run(release, comparisons, repo=repo, private=private, revision=revision, message=message, ctx=ctx)


def try_release_settings(settings: JsonObject) -> tuple[JsonObject, list[tuple[Place, str]]]:
    """(settings for the step's key, with only the named methods' settings; faults as (place, message))."""
    faults: list[tuple[Place, str]] = []
    by_method: JsonObject = {}
    for method in settings["methods"]:
        values, problems = check_settings(method, settings["settings"])
        faults += [fault for fault in problems if fault not in faults]
        if values is not None:
            by_method[method] = values.model_dump(mode="json")
    return {**settings, "settings": by_method}, faults
