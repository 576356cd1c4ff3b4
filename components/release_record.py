"""The records of a release: `release.json` describes all of it, `draftsmith/serve.json` what is served and how deep.

publish.export_release writes both. The model card, provenance, uploads, pages and the registry read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from components.contract import UserError
from components.outside_json import JsonObject, read_object

RELEASE, SERVE = "release.json", "draftsmith/serve.json"


class MeasuredOn(TypedDict):
    """What a drafter was compared on end to end. kernel, draft_kernel: as open_target and open_draft take them."""

    machine_id: str
    dtype: Literal["float32", "bfloat16"]
    num_threads: int
    kernel: str
    draft_kernel: str


class ServeRecord(TypedDict):
    """serve.json. depth_k: draft tokens a round, 0: none. depth_by_workload: the same for each measured workload.

    prompt_format: what it was measured on, "chat" or "text"; older ones do not say.
    measured_on: absent where an engine of somebody else measured.
    """

    method: str
    draft_key: str
    target_key: str
    depth_k: int
    depth_by_workload: dict[str, int]
    verdict: str
    prompt_format: NotRequired[str]
    measured_on: NotRequired[MeasuredOn]


class WeightCounts(TypedDict):
    """What a folder of weights holds."""

    num_tensors: int
    num_params: int
    dtype: str


class FormatRecord(WeightCounts):
    """One drafter in one format. holds_target: whether it holds weights of the target; older ones do not say."""

    draft_key: str
    method: str
    format: str
    holds_target: NotRequired[bool]


class FileRecord(TypedDict):
    """One file of a release."""

    path: str
    bytes: int
    sha256: str


class ReleaseKeys(TypedDict):
    """Keys of the artifacts behind a release, and its own."""

    policy: str
    acceptance: list[str]
    end_to_end: str
    release: str


class EngineRecords(TypedDict):
    """The part of release.json about a drafter's settings, its formats and the engines that load them."""

    settings: JsonObject
    formats: dict[str, FormatRecord]
    not_served: dict[str, str]
    engines: JsonObject


class ReleaseRecord(EngineRecords):
    """release.json.

    target, draft: key, public name and scalar facts. settings: of the drafter's method. formats: folder -> what is in
    it. not_served: engine -> why it would not serve the drafter as measured. engines: settings by engine. policy: the
    decision in parts of policy.json. tokenizer: file -> sha256. launch: engine -> command. code: commit of the clone.
    The last four are added when the documents are written.
    """

    target: JsonObject
    draft: JsonObject
    policy: JsonObject
    serve: ServeRecord
    license: str
    keys: ReleaseKeys
    versions: dict[str, str]
    tokenizer: NotRequired[dict[str, str]]
    launch: NotRequired[dict[str, str]]
    code: NotRequired[JsonObject]
    files: NotRequired[list[FileRecord]]


def write_json(file: Path, content: Mapping[str, object], indent: int = 1) -> None:
    """Write an object as indented JSON with a last line end."""
    file.write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")


def read_serve(release: Path) -> ServeRecord:
    """serve.json of a release. Raises UserError where the folder is no release."""
    file = release / SERVE
    if not file.is_file():
        raise UserError(
            f"{file.parent}: no serve.json; the artifact `release` must be a directory made by publish.export_release"
        )
    record: ServeRecord = read_object(file)  # type: ignore[assignment]  # our own file
    return record


def read_release(release: Path) -> ReleaseRecord:
    """release.json of a release of our own store."""
    record: ReleaseRecord = read_object(release / RELEASE)  # type: ignore[assignment]  # our own file
    return record
