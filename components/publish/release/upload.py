"""Step `publish.upload_release`: a release to the Hugging Face hub, in one commit, only where a pipeline asks for it.

Our pipelines do not have this step, and steps reach a hub only under `draftsmith run --online`. The step uploads the
public copy of the release (public_copy.py), which is validated and searched for private names before. The upload is
refused while one of the given comparisons shows that an engine differs from our own loop.

The token comes only from the environment, $HF_TOKEN. One commit holds the whole release, and removes files of an
earlier release that are not in this one; other files of the repository stay. huggingface_hub neither sends files again
that the hub has (after a killed upload) nor makes an empty commit, so a second upload of a release makes no second
commit. The hub's listing is then compared with our checksums.

The promotion gate's rule about engines (storage/registry/engine_gate.sql) holds here without a database: of the given
comparisons the newest of an engine counts, and one that could not compare is ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, is_offline_mode
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash

from components.contract import Context, Measurements, Page, Release, UserError
from components.engines.launch import HUB_ID
from components.html_pages import write_html
from components.methods import is_trained
from components.outside_json import JsonObject
from components.publish.card.lineage import RECORD as ARTIFACT_RECORD
from components.publish.formats.checkpoint import read_json
from components.publish.names import find_name
from components.publish.release.checksums import FILE, files_of
from components.publish.release.public_copy import (
    TARGET,
    formats_with_target_weights,
    private_names,
    refuse_leaks,
    write_public_copy,
)
from components.publish.release.validate import validate_folder
from components.release_record import RELEASE, ReleaseRecord
from components.rows import ALL, EngineComparison, read_rows
from components.targets.remembered import sha256_of
from components.targets.source import BUILTIN

TOKEN = "HF_TOKEN"
ENDPOINT = "HF_ENDPOINT"
Result = TypeVar("Result")


@dataclass(frozen=True)
class Hub:
    """One repository on a hub, at one revision."""

    api: HfApi
    repo: str
    revision: str
    token: str

    def request(self, action: str, call: Callable[[], Result]) -> Result:
        """The result of `call`. Raises UserError, one line without the token, when it fails. action: its name."""
        try:
            return call()
        except UserError:
            raise
        except Exception as error:  # the many kinds of network and hub failures
            message = " ".join(str(error).split()).replace(self.token, "***")[:300] or type(error).__name__
            if is_offline_mode():
                message = "steps may not reach the hub; allow it with `draftsmith run --online`"
            raise UserError(f"repo: {self.repo}: cannot {action} at {self.api.endpoint} ({message})") from error


def upload_release(
    release: Release,
    comparisons: list[Measurements] | None,
    *,
    repo: str,
    private: bool,
    revision: str,
    message: str,
    ctx: Context,
) -> Page:
    """The step `publish.upload_release`; its settings are explained in components/publish/steps.py."""
    token = os.environ.get(TOKEN, "").strip()
    if not token:
        raise UserError(f"repo: {repo}: ${TOKEN} is not set; give a token that may write there, by the environment")
    validate_folder(release.path)
    folder = ctx.scratch / "public"
    record = write_public_copy(release.path, folder)
    _refuse_flagged(record, comparisons or [])
    hub = Hub(HfApi(endpoint=os.environ.get(ENDPOINT) or None, token=token), repo, revision, token)
    names: tuple[str, ...] = ()
    if not private and not _is_public(hub, read_json(release.path / TARGET, release.path.name)):
        names = private_names(release.path, record)
        _refuse_private_target(record, (repo, revision, message), names)
    refuse_leaks(folder, release.path, names)
    validate_folder(folder)
    is_private = _make_repository(hub, private)
    if is_private and not private:
        ctx.note(f"{repo} was made private before, and stays so; its owner may open it on the hub")
    commit_message = (
        message or f"{record['serve']['method']} at depth {record['serve']['depth_k']}, release {release.key[:12]}"
    )
    done = _commit(hub, folder, commit_message, ctx)
    _verify_upload(hub, folder, done["commit"])
    facts = {"repo": repo, "revision": revision, "private": is_private, "release_key": release.key, **done}
    write_html(ctx.out, Path(__file__).with_name("upload.html.jinja"), {"facts": facts, "record": record})
    ctx.note(f"{'uploaded to' if done['new_commit'] else 'already at'} {done['url']} as commit {done['commit'][:12]}")
    return Page.of_step(ctx, facts)


def _refuse_flagged(record: ReleaseRecord, comparisons: Iterable[Measurements]) -> None:
    """Raises UserError where the release, or a comparison of it with an engine, is flagged as a mismatch."""
    draft_key = record["serve"]["draft_key"]
    flags = (flag for flag in record["policy"]["flags"] if flag["draft_key"] in ("", draft_key))
    flagged = [str(flag["detail"]) for flag in flags if flag["code"] == "engine_mismatch"]
    if mismatches := [*engines_with_mismatch(comparisons, draft_key), *flagged]:
        raise UserError(
            f"release: engine_mismatch stands for {mismatches[0]:.120}: it decodes otherwise than measured here; mend"
            " it and measure that engine again"
        )


def _is_public(hub: Hub, target: JsonObject) -> bool:
    """Whether anybody can read this target: it is the built-in one, or the hub shows it to a caller without a token.

    target: target.json. The model that was loaded counts, not its `target_name`: a privately tuned model may bear the
    name of the public one that it was tuned from.
    """
    if target["folder"] == BUILTIN:
        return True
    name, _, revision = str(target["model"]).partition("@")
    if not HUB_ID.fullmatch(name) or Path(name).is_dir():
        return False

    def readable_without_token() -> bool:
        try:
            return not hub.api.model_info(name, revision=revision or None, token=False).private
        except RepositoryNotFoundError:
            return False

    return hub.request(f"find out whether {name} is public", readable_without_token)


def _refuse_private_target(record: ReleaseRecord, texts: tuple[str, str, str], names: tuple[str, ...]) -> None:
    """Raises UserError where a public repository would name a private target, or hold its weights.

    texts: name of the repository, branch and commit message. names: the target's private names.
    """
    for name, remedy in formats_with_target_weights(record["formats"]).items():
        raise UserError(
            f"private: false: {name}/ holds weights of the target, which nobody else can read; upload with private:"
            f" true, {remedy}, or load a public target by its hub id"
        )
    for setting, text in zip(("repo", "revision", "message"), texts, strict=True):
        if name := find_name(text, [one.rpartition("/")[2] for one in names], parts_of_words=True):
            raise UserError(
                f"{setting}: {text:.120}: its name has the private target's {name!r} in it; take another"
                if setting != "message"
                else f"message: has the private target's {name!r} in it; say it otherwise"
            )


def _make_repository(hub: Hub, private: bool) -> bool:
    """Create repository and branch; returns whether it is private. Raises UserError where it should be and is not."""
    api, repo = hub.api, hub.repo
    hub.request("make the repository", lambda: api.create_repo(repo, private=private, exist_ok=True))
    remote = hub.request("look at the repository", lambda: api.model_info(repo))
    if private and not remote.private:
        raise UserError(f"repo: {repo}: is public, and private: true was asked; take another, or say private: false")
    if hub.revision != "main":
        hub.request(f"make branch {hub.revision}", lambda: api.create_branch(repo, branch=hub.revision, exist_ok=True))
    return bool(remote.private)


def _commit(hub: Hub, folder: Path, message: str, ctx: Context) -> JsonObject:
    """Commit the release to the repository; returns {"commit", "url", "commit_url", "new_commit", ...}."""
    api, repo, revision = hub.api, hub.repo, hub.revision
    before = hub.request("look at the branch", lambda: api.model_info(repo, revision=revision)).sha
    names = [*files_of(folder), FILE]
    stale = sorted(_files_of_earlier_release(hub, str(before), ctx.scratch / "before") - set(names))
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in names
    ]
    operations += [CommitOperationDelete(path_in_repo=name) for name in stale]
    ctx.note(
        f"{len(names)} files go to {repo}@{revision}" + (f", {len(stale)} of an earlier release go" if stale else "")
    )
    commit_info = hub.request(
        "commit",
        lambda: api.create_commit(repo, operations, commit_message=message, revision=revision, parent_commit=before),
    )
    return {
        "commit": str(commit_info.oid),
        "url": f"{api.endpoint}/{repo}/tree/{commit_info.oid}",
        "commit_url": str(commit_info.commit_url),
        "new_commit": commit_info.oid != before,
        "num_files": len(names),
        "num_removed": len(stale),
        "bytes": sum((folder / name).stat().st_size for name in names),
    }


def _files_of_earlier_release(hub: Hub, commit: str, scratch: Path) -> set[str]:
    """The files of an earlier release that are still in the repository; an empty set where there is none."""
    remote_files = hub.request("list its files", lambda: set(hub.api.list_repo_files(hub.repo, revision=commit)))
    if RELEASE not in remote_files:
        return set()
    file = hub.request(
        "read the release that is there",
        lambda: hub.api.hf_hub_download(hub.repo, RELEASE, revision=commit, local_dir=scratch),
    )
    listed = {str(one.get("path")) for one in read_json(Path(file), hub.repo).get("files", []) if isinstance(one, dict)}
    return listed & remote_files


def _verify_upload(hub: Hub, folder: Path, commit: str) -> None:
    """Raises UserError unless the hub lists every file of the release with the digest of what was sent."""
    listing = hub.request(
        "read back what is there", lambda: list(hub.api.list_repo_tree(hub.repo, recursive=True, revision=commit))
    )
    remote_files = {one.path: one for one in listing if isinstance(one, RepoFile)}
    for name in [*files_of(folder), FILE]:
        remote = remote_files.get(name)
        if remote is None:
            raise UserError(f"repo: {hub.repo}: {name} is not there after the commit; upload again with --force")
        large = remote.lfs
        same = (
            large.sha256 == sha256_of(folder / name)
            if large
            else remote.blob_id == git_hash((folder / name).read_bytes())
        )
        if not same:
            raise UserError(f"repo: {hub.repo}: {name} is not what was sent; upload again with --force")


def engines_with_mismatch(comparisons: Iterable[Measurements], draft_key: str) -> list[str]:
    """Engines, with their versions, whose newest comparison is a mismatch."""
    newest: dict[tuple[str, str, int, int], tuple[float, list[EngineComparison]]] = {}
    for measured in comparisons:
        file = measured.path / ARTIFACT_RECORD
        finished = (
            float(json.loads(file.read_text(encoding="utf-8")).get("finished_at", 0.0)) if file.is_file() else 0.0
        )
        for row in read_rows(measured.path, EngineComparison):
            compared = row.verdict != "not_compared" or (not is_trained(row.method) and row.num_compared > 0)
            if row.draft_key != draft_key or row.workload != ALL or not compared:
                continue
            key = (row.engine, row.method, row.depth_k, row.concurrency)
            previous = newest.get(key)
            if previous is None or finished > previous[0]:
                newest[key] = (finished, [row])
            elif finished == previous[0]:
                previous[1].append(row)
    mismatches = (row for _, rows in newest.values() for row in rows if row.verdict == "mismatch")
    return sorted({f"{row.engine} {row.engine_version}".strip() for row in mismatches})
