"""Step `publish.upload_release`: a release to the Hugging Face hub, in one commit, only where a pipeline asks for it.

Our pipelines do not have this step, and steps reach a hub only under `draftsmith run --online`. The step uploads a copy
without this machine's folders (public_copy.py). The copy is validated again and searched for private names, and
the upload is refused while an engine that serves the drafter is known to differ from our own loop.

The token comes only from the environment, $HF_TOKEN. One commit holds the whole release, and removes files of an
earlier release that are not in this one; other files of the repository stay. huggingface_hub neither sends files again
that the hub has (after a killed upload) nor makes an empty commit, so a second upload of a release makes no second
commit. The hub's listing is then compared with our checksums.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field

from components.contract import Context, Measurements, Page, Release, UserError

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

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
            from huggingface_hub import is_offline_mode

            message = " ".join(str(error).split()).replace(self.token, "***")[:300] or type(error).__name__
            if is_offline_mode():
                message = "steps may not reach the hub; allow it with `draftsmith run --online`"
            raise UserError(f"repo: {self.repo}: cannot {action} at {self.api.endpoint} ({message})") from error


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
        comparisons: of speedup.compare_engines, so that this step waits for them; those in the same store as the
            release count as well. The upload is refused while an engine's newest comparison is a mismatch.
        repo: OWNER/NAME of the model repository, which is created if it does not exist.
        private: true makes a new repository visible to its owner only; false refuses a release that names a private
            target, or holds weights of it. Public are the built-in target and hub ids that anybody can read.
        revision: the branch of the commit; created from the default branch if it does not exist.
        message: the commit message; empty names method, depth and key.
    """
    from components.publish.checkpoint_files import read_json
    from components.publish.engine_flags import engines_with_mismatch, sibling_comparisons
    from components.publish.public_copy import TARGET, private_names, refuse_leaks, write_public_copy
    from components.publish.validate import validate_folder

    token = os.environ.get(TOKEN, "").strip()
    if not token:
        raise UserError(f"repo: {repo}: ${TOKEN} is not set; give a token that may write there, by the environment")
    validate_folder(release.path)
    folder = ctx.scratch / "public"
    record = write_public_copy(release.path, folder)
    beside = [*sibling_comparisons(release.path), *(one.path for one in comparisons or [])]
    _refuse_flagged(record, engines_with_mismatch(dict.fromkeys(beside), record["serve"]["draft_key"]))
    hub = _hub(repo, revision, token)
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
    _write_page(ctx.out, facts, record)
    ctx.note(f"{'uploaded to' if done['new_commit'] else 'already at'} {done['url']} as commit {done['commit'][:12]}")
    return Page.of_step(ctx, facts)


def _hub(repo: str, revision: str, token: str) -> Hub:
    from huggingface_hub import HfApi

    return Hub(HfApi(endpoint=os.environ.get(ENDPOINT) or None, token=token), repo, revision, token)


def _refuse_flagged(record: Mapping[str, Any], engines: list[str]) -> None:
    """Raises UserError where the release, or a comparison of it with an engine, is flagged as a mismatch."""
    flags = (flag for flag in record["policy"]["flags"] if flag["draft_key"] in ("", record["serve"]["draft_key"]))
    flagged = [str(flag["detail"]) for flag in flags if flag["code"] == "engine_mismatch"]
    if mismatches := [*engines, *flagged]:
        raise UserError(
            f"release: engine_mismatch stands for {mismatches[0]:.120}: it decodes otherwise than measured here; mend"
            " it and measure that engine again"
        )


def _is_public(hub: Hub, target: Mapping[str, Any]) -> bool:
    """Whether anybody can read this target: it is the built-in one, or the hub shows it to a caller without a token.

    target: target.json. The model that was loaded counts, not its `target_name`: a privately tuned model may bear the
    name of the public one that it was tuned from.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    from components.publish.launch import HUB_ID
    from components.targets.source import BUILTIN

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


def _refuse_private_target(record: Mapping[str, Any], texts: tuple[str, str, str], names: tuple[str, ...]) -> None:
    """Raises UserError where a public repository would name a private target, or hold its weights.

    texts: name of the repository, branch and commit message. names: the target's private names.
    """
    from components.publish.private_words import find_name
    from components.publish.target_copies import formats_with_target_weights

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


def _commit(hub: Hub, folder: Path, message: str, ctx: Context) -> dict[str, Any]:
    """Commit the release to the repository; returns {"commit", "url", "commit_url", "new_commit", ...}."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    from components.publish.checksums import FILE, files_of

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
    from components.publish.checkpoint_files import read_json

    remote_files = hub.request("list its files", lambda: set(hub.api.list_repo_files(hub.repo, revision=commit)))
    if "release.json" not in remote_files:
        return set()
    file = hub.request(
        "read the release that is there",
        lambda: hub.api.hf_hub_download(hub.repo, "release.json", revision=commit, local_dir=scratch),
    )
    listed = {str(one.get("path")) for one in read_json(Path(file), hub.repo).get("files", []) if isinstance(one, dict)}
    return listed & remote_files


def _verify_upload(hub: Hub, folder: Path, commit: str) -> None:
    """Raises UserError unless the hub lists every file of the release with the digest of what was sent."""
    from huggingface_hub.hf_api import RepoFile
    from huggingface_hub.utils.sha import git_hash

    from components.publish.checksums import FILE, files_of
    from components.targets.file_digests import sha256_of

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


def _write_page(folder: Path, facts: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Write index.html: the release, its address and its facts."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined, autoescape=True
    )
    text = environment.get_template("upload.html.jinja").render(facts=facts, record=record)
    (folder / "index.html").write_text(text, encoding="utf-8")
