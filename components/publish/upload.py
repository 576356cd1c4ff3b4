"""Step `publish.upload_release`: a release to the Hugging Face hub, in one commit, only where a pipeline asks for it.

Twice off unless asked: no pipeline of ours has this step, and steps reach a hub only under `draftsmith run --online`.
What goes up is a copy without this machine's folders (public_copy.py); it is validated again, looked through for what
must not leave, and refused while an engine that serves the drafter is known to do otherwise than our own loop.

The token comes from the environment alone, $HF_TOKEN. One commit holds the whole release or nothing of it, and removes
what an earlier release had there and this one has not; other files of the repository stay. Files that a killed upload
has sent are not sent again, and the same release a second time makes no second commit: huggingface_hub leaves out what
the hub has, and a commit of nothing. What the hub then lists is held against our checksums.
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
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Hub:
    """One repository on a hub, at one revision."""

    api: HfApi
    repo: str
    revision: str
    token: str

    def ask(self, what: str, call: Callable[[], Answer]) -> Answer:
        """What the hub answers; its failures as UserError in one line, without the token."""
        try:
            return call()
        except UserError:
            raise
        except Exception as error:  # every kind of network and hub failure ends here, as one line
            from huggingface_hub import is_offline_mode

            said = " ".join(str(error).split()).replace(self.token, "***")[:300] or type(error).__name__
            if is_offline_mode():
                said = "steps may not reach the hub; allow it with `draftsmith run --online`"
            raise UserError(f"repo: {self.repo}: cannot {what} at {self.api.endpoint} ({said})") from error


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
    """Put a release on the Hugging Face hub, in one commit, and say where it is. Needs `--online` and $HF_TOKEN.

    Args:
        release: what publish.export_release made.
        comparisons: of speedup.compare_engines, so that this step waits for them; those beside the release in the store
            count as well. An engine whose newest comparison is a mismatch refuses the upload.
        repo: OWNER/NAME of the model repository, which is made if it is not there.
        private: only its owner sees it; false refuses a release that names a private target, or holds weights of it.
            A target is public when it is the built-in one, or its hub id can be read by anybody.
        revision: the branch that the commit goes to; made from the default branch if it is not there.
        message: of the commit; empty names method, depth and key.
    """
    from components.publish.checkpoint_files import read_json
    from components.publish.engine_flags import comparisons_beside, standing_mismatches
    from components.publish.public_copy import TARGET, private_names, refuse_leaks, write_public_copy
    from components.publish.validate import validate_folder

    token = os.environ.get(TOKEN, "").strip()
    if not token:
        raise UserError(f"repo: {repo}: ${TOKEN} is not set; give a token that may write there, by the environment")
    validate_folder(release.path)
    folder = ctx.scratch / "public"
    record = write_public_copy(release.path, folder)
    beside = [*comparisons_beside(release.path), *(one.path for one in comparisons or [])]
    _refuse_flagged(record, standing_mismatches(dict.fromkeys(beside), record["serve"]["draft_key"]))
    hub = _hub(repo, revision, token)
    names: tuple[str, ...] = ()
    if not private and not _is_public(hub, read_json(release.path / TARGET, release.path.name)):
        names = private_names(release.path, record)
        _refuse_target_itself(record, (repo, revision, message), names)
    refuse_leaks(folder, release.path, names)
    validate_folder(folder)
    is_private = _make_repository(hub, private)
    if is_private and not private:
        ctx.note(f"{repo} was made private before, and stays so; its owner may open it on the hub")
    told = message or f"{record['serve']['method']} at depth {record['serve']['depth_k']}, release {release.key[:12]}"
    done = _commit(hub, folder, told, ctx)
    _look_at_it(hub, folder, done["commit"])
    facts = {"repo": repo, "revision": revision, "private": is_private, "release_key": release.key, **done}
    _write_page(ctx.out, facts, record)
    ctx.note(f"{'uploaded to' if done['new_commit'] else 'already at'} {done['url']} as commit {done['commit'][:12]}")
    return Page.made(ctx, facts)


def _hub(repo: str, revision: str, token: str) -> Hub:
    from huggingface_hub import HfApi

    return Hub(HfApi(endpoint=os.environ.get(ENDPOINT) or None, token=token), repo, revision, token)


def _refuse_flagged(record: Mapping[str, Any], engines: list[str]) -> None:
    """Raises UserError where the release, or a comparison of it with an engine, is flagged as a mismatch."""
    mine = (flag for flag in record["policy"]["flags"] if flag["draft_key"] in ("", record["serve"]["draft_key"]))
    flagged = [str(flag["detail"]) for flag in mine if flag["code"] == "engine_mismatch"]
    if told := [*engines, *flagged]:
        raise UserError(
            f"release: engine_mismatch stands for {told[0]:.120}: it decodes otherwise than measured here; mend it and"
            " measure that engine again"
        )


def _is_public(hub: Hub, target: Mapping[str, Any]) -> bool:
    """Whether anybody can see this target: the built-in one, or what the hub shows to a caller without a token.

    target: target.json. What was loaded counts, not what `target_name` calls it: a model that was tuned in private may
    be called by the public one that it comes from.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    from components.publish.launch import HUB_ID
    from components.targets.source import BUILTIN

    if target["folder"] == BUILTIN:
        return True
    name, _, revision = str(target["model"]).partition("@")
    if not HUB_ID.fullmatch(name) or Path(name).is_dir():
        return False

    def look() -> bool:
        try:
            return not hub.api.model_info(name, revision=revision or None, token=False).private
        except RepositoryNotFoundError:
            return False

    return hub.ask(f"find out whether {name} is public", look)


def _refuse_target_itself(record: Mapping[str, Any], words: tuple[str, str, str], names: tuple[str, ...]) -> None:
    """Raises UserError where a public repository would show a private target by its own name, or hold its weights.

    words: what the settings say of the repository: its name, the branch, the message.
    """
    from components.publish.private_words import named_in
    from components.publish.target_copies import holding

    for name, remedy in holding(record["formats"]).items():
        raise UserError(
            f"private: false: {name}/ holds weights of the target, which nobody else can read; upload with private:"
            f" true, {remedy}, or load a public target by its hub id"
        )
    for setting, word in zip(("repo", "revision", "message"), words, strict=True):
        if name := named_in(word, [one.rpartition("/")[2] for one in names], parts_of_words=True):
            raise UserError(
                f"{setting}: {word:.120}: its name has the private target's {name!r} in it; take another"
                if setting != "message"
                else f"message: has the private target's {name!r} in it; say it otherwise"
            )


def _make_repository(hub: Hub, private: bool) -> bool:
    """Whether the repository is private, now that it and the branch are there; raises UserError for one too public."""
    api, repo = hub.api, hub.repo
    hub.ask("make the repository", lambda: api.create_repo(repo, private=private, exist_ok=True))
    found = hub.ask("look at the repository", lambda: api.model_info(repo))
    if private and not found.private:
        raise UserError(f"repo: {repo}: is public, and private: true was asked; take another, or say private: false")
    if hub.revision != "main":
        hub.ask(f"make branch {hub.revision}", lambda: api.create_branch(repo, branch=hub.revision, exist_ok=True))
    return bool(found.private)


def _commit(hub: Hub, folder: Path, message: str, ctx: Context) -> dict[str, Any]:
    """One commit that makes the repository hold this release; {"commit", "url", "commit_url", "new_commit", ...}."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    from components.publish.checksums import FILE, files_of

    api, repo, revision = hub.api, hub.repo, hub.revision
    before = hub.ask("look at the branch", lambda: api.model_info(repo, revision=revision)).sha
    names = [*files_of(folder), FILE]
    stale = sorted(_files_before(hub, str(before), ctx.scratch / "before") - set(names))
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in names
    ]
    operations += [CommitOperationDelete(path_in_repo=name) for name in stale]
    ctx.note(
        f"{len(names)} files go to {repo}@{revision}" + (f", {len(stale)} of an earlier release go" if stale else "")
    )
    made = hub.ask(
        "commit",
        lambda: api.create_commit(repo, operations, commit_message=message, revision=revision, parent_commit=before),
    )
    return {
        "commit": str(made.oid),
        "url": f"{api.endpoint}/{repo}/tree/{made.oid}",
        "commit_url": str(made.commit_url),
        "new_commit": made.oid != before,
        "num_files": len(names),
        "num_removed": len(stale),
        "bytes": sum((folder / name).stat().st_size for name in names),
    }


def _files_before(hub: Hub, commit: str, scratch: Path) -> set[str]:
    """What an earlier release in this repository consists of, and is still there; {} where there is none."""
    from components.publish.checkpoint_files import read_json

    there = hub.ask("list its files", lambda: set(hub.api.list_repo_files(hub.repo, revision=commit)))
    if "release.json" not in there:
        return set()
    file = hub.ask(
        "read the release that is there",
        lambda: hub.api.hf_hub_download(hub.repo, "release.json", revision=commit, local_dir=scratch),
    )
    listed = {str(one.get("path")) for one in read_json(Path(file), hub.repo).get("files", []) if isinstance(one, dict)}
    return listed & there


def _look_at_it(hub: Hub, folder: Path, commit: str) -> None:
    """Raises UserError unless the hub lists every file of the release with the bytes that were sent."""
    from huggingface_hub.hf_api import RepoFile
    from huggingface_hub.utils.sha import git_hash

    from components.publish.checksums import FILE, files_of
    from components.targets.file_digests import sha256_of

    listing = hub.ask(
        "read back what is there", lambda: list(hub.api.list_repo_tree(hub.repo, recursive=True, revision=commit))
    )
    there = {one.path: one for one in listing if isinstance(one, RepoFile)}
    for name in [*files_of(folder), FILE]:
        found = there.get(name)
        if found is None:
            raise UserError(f"repo: {hub.repo}: {name} is not there after the commit; upload again with --force")
        large = found.lfs
        same = (
            large.sha256 == sha256_of(folder / name)
            if large
            else found.blob_id == git_hash((folder / name).read_bytes())
        )
        if not same:
            raise UserError(f"repo: {hub.repo}: {name} is not what was sent; upload again with --force")


def _write_page(folder: Path, facts: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """index.html: what is where."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined, autoescape=True
    )
    text = environment.get_template("upload.html.jinja").render(facts=facts, record=record)
    (folder / "index.html").write_text(text, encoding="utf-8")
