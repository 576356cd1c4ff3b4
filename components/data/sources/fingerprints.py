"""What the sources of a step hold, for the step's key: each local file and the sha256 of its content.

steps.py explains each function. Planning never uses the network: data on a hub or in an object store count by name and
revision alone.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from components.data.settings import ChatSource, workload_source
from components.data.sources.addresses import PREFIX, is_url, parse_hub_source, source_files
from components.data.sources.listing import find_files, list_files, traffic_files
from components.data.sources.python_stdlib import STDLIB, stdlib_files
from components.data.sources.workloads import local_files
from components.outside_json import JsonObject
from components.targets.file_digests import sha256_of


def collect_chats_fingerprint(settings: JsonObject) -> dict[str, str]:
    """File -> sha256 of every local source, or the reason why a file is not read."""
    digests: dict[str, str] = {}
    for declared in settings["sources"]:
        source = ChatSource.model_validate(declared)
        if is_url(source.path):
            continue
        listing = list_files(source)
        digests |= {file.location: sha256_of(Path(file.location)) for file in listing.files}
        digests |= {f"{source.label}: {unusable.name}": unusable.reason for unusable in listing.unusable}
    return digests


def collect_prompts_fingerprint(settings: JsonObject) -> dict[str, str]:
    """File -> sha256 of `source` and `keep_out`."""
    named = (str(settings.get("source", STDLIB)), str(settings.get("keep_out", "")))
    return {name: digest for source in named if source for name, digest in digests_of(source).items()}


def collect_traffic_fingerprint(settings: JsonObject) -> dict[str, str]:
    """File -> sha256 of `source` and `keep_out`."""
    files, _ = traffic_files(str(settings["source"]))
    digests = {str(file): sha256_of(file) for file in files}
    if keep_out := str(settings.get("keep_out", "")):
        digests |= digests_of(keep_out)
    return digests


def collect_workloads_fingerprint(settings: JsonObject) -> dict[str, str]:
    """File -> sha256 of every local source."""
    sources = [workload_source(item) for item in settings["sources"]]
    return {str(file): sha256_of(file) for source in sources for file in local_files(source)}


def digests_of(source: str) -> dict[str, str]:
    """The files of a source of `collect_prompts`: name -> sha256."""
    if source == STDLIB:
        total = hashlib.sha256()
        for entry in stdlib_files():
            total.update(f"{entry.source}\0{sha256_of(entry.path)}\n".encode())
        return {STDLIB: total.hexdigest()}
    files = source_files(parse_hub_source(source)) if source.startswith(PREFIX) else find_files(source)
    return {str(file): sha256_of(file) for file in files}
