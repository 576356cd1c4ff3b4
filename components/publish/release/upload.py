"""Step `publish.upload_release`: a release to the Hugging Face hub, in one commit, only where a pipeline asks for it.

Our pipelines do not have this step, and steps reach a hub only under `draftsmith run --online`. The step uploads a copy
without this machine's folders. The copy is validated again and searched for private names, and the upload is refused
while an engine that serves the drafter is known to differ from our own loop.

The token comes only from the environment, $HF_TOKEN. One commit holds the whole release, and removes files of an
earlier release that are not in this one; other files of the repository stay. huggingface_hub neither sends files again
that the hub has (after a killed upload) nor makes an empty commit, so a second upload of a release makes no second
commit. The hub's listing is then compared with our checksums.

The promotion gate's rule about engines (storage/registry/engine_gate.sql) holds here without a database: the newest
comparison of an engine counts, and one that could not compare is ignored.

In the copy, draftsmith/target.json and draft.json, which alone name folders of this machine, name models as the rest of
the release does; release.json and SHA256SUMS are written anew. Copies of the same release are equal byte for byte.
Weights are hard-linked, not copied, where the disk allows.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
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
from components.publish.formats.checkpoint import link_or_copy, read_json
from components.publish.formats.gguf import gguf_texts
from components.publish.names import find_name, public_name, public_settings
from components.publish.release.checksums import FILE, file_records, files_of, write_sums
from components.publish.release.target_copies import formats_with_target_weights
from components.publish.release.validate import validate_folder
from components.release_record import RELEASE, ReleaseRecord, write_json
from components.rows import ALL, EngineComparison, read_rows, table_of
from components.targets.file_digests import sha256_of
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
    write_html(ctx.out, Path(__file__).with_name("upload.html.jinja"), {"facts": facts, "record": record})
    ctx.note(f"{'uploaded to' if done['new_commit'] else 'already at'} {done['url']} as commit {done['commit'][:12]}")
    return Page.of_step(ctx, facts)


def _hub(repo: str, revision: str, token: str) -> Hub:

    return Hub(HfApi(endpoint=os.environ.get(ENDPOINT) or None, token=token), repo, revision, token)


def _refuse_flagged(record: ReleaseRecord, engines: list[str]) -> None:
    """Raises UserError where the release, or a comparison of it with an engine, is flagged as a mismatch."""
    flags = (flag for flag in record["policy"]["flags"] if flag["draft_key"] in ("", record["serve"]["draft_key"]))
    flagged = [str(flag["detail"]) for flag in flags if flag["code"] == "engine_mismatch"]
    if mismatches := [*engines, *flagged]:
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


def engines_with_mismatch(folders: Iterable[Path], draft_key: str) -> list[str]:
    """Engines, with their versions, whose newest comparison is a mismatch. folders: of Measurements artifacts."""
    newest: dict[tuple[str, str, int, int], tuple[float, list[EngineComparison]]] = {}
    for folder in folders:
        finished = _finished_at(folder)
        for row in read_rows(folder, EngineComparison):
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


def sibling_comparisons(artifact: Path) -> list[Path]:
    """Folders of the artifacts in the same store that hold comparisons with engines."""
    table = f"{table_of(EngineComparison)}.jsonl"
    return sorted(file.parent for file in artifact.absolute().parent.glob(f"*/{table}"))


def _finished_at(folder: Path) -> float:
    file = folder / ARTIFACT_RECORD
    return float(json.loads(file.read_text(encoding="utf-8")).get("finished_at", 0.0)) if file.is_file() else 0.0


TARGET, DRAFT = "draftsmith/target.json", "draftsmith/draft.json"
SCANNED_BYTES = 1 << 20
"""Bytes of a binary file that are searched: headers and metadata are at its beginning."""
BINARY = (".safetensors",)
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab*", "merges*")
"""The target's tokenizer files, which are not searched: they are full of words and pieces of paths."""
PLAIN_FOLDERS = frozenset(
    {"base", "best", "builtin", "checkpoint", "checkpoints", "draft", "final", "hf", "hub", "last", "latest", "main"}
    | {"model", "models", "output", "outputs", "release", "snapshots", "target", "weights"}
)
"""Common names of folders, which reveal nothing and occur in every release."""
_OF_SYSTEM = frozenset({"data", "home", "mnt", "opt", "root", "srv", "tmp", "users", "var", "workspace"})
_KEY = re.compile(r"[0-9a-f]{64}")
_NUMBERED = re.compile(r"(?:checkpoint|epoch|global_step|iter|run|step|v)?[-_]?\d+|[0-9a-f]{40}", re.IGNORECASE)
"""checkpoint-1200 or a commit: folders that are identified by their parent."""
_OF_HUB_CACHE = "models--"
_HOME = re.compile(r"(?<![\w.:/-])/(?:home|Users|root)/[^\s\"'`|]+")
_PATH = re.compile(r"(?<![\w./:<-])/(?:[\w.@+-]+/)+[\w.@+-]+")


def write_public_copy(release: Path, folder: Path) -> ReleaseRecord:
    """Write the copy into an emptied folder; returns its release.json. Raises UserError for a broken release."""
    record: ReleaseRecord = read_json(release / RELEASE, release.name)  # type: ignore[assignment]  # validated before
    shutil.rmtree(folder, ignore_errors=True)
    for name in files_of(release):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name not in (TARGET, DRAFT, RELEASE):
            link_or_copy(release / name, folder / name)
    target = read_json(release / TARGET, release.name)
    is_builtin = target["folder"] == BUILTIN
    public = {"model": BUILTIN, "folder": BUILTIN} if is_builtin else {"model": record["target"]["model"], "folder": ""}
    write_json(folder / TARGET, {**target, **public})
    if (release / DRAFT).is_file():
        draft = read_json(release / DRAFT, release.name)
        write_json(folder / DRAFT, {**draft, "settings": public_settings(draft["settings"])}, indent=2)
    record["files"] = file_records(folder, [name for name in files_of(folder) if name != RELEASE])
    write_json(folder / RELEASE, record)
    write_sums(folder)
    return record


def private_names(release: Path, record: ReleaseRecord) -> tuple[str, ...]:
    """The names of a private target on this machine: its hub id and the last part of it, or the name of its folder.

    For a folder with a common name (final, checkpoint-1200, a commit) it is the first folder above with another one.
    The built-in target has none, and a name that the user has put into `target_name` is not private.
    """
    target = read_json(release / TARGET, release.name)
    model, folder = str(target["model"]), str(target["folder"])
    if folder == BUILTIN:
        return ()
    public_target = str(record["target"]["model"])
    # Without a target_name the release has the target's own public name, which was not chosen to be published.
    by_intention = public_target if public_target != public_name(model) else ""
    is_hub_id = public_name(model) == model and not Path(model).is_absolute()
    names = _hub_id_names(model.partition("@")[0]) if is_hub_id else _folder_names(Path(model))
    if folder and folder != model:
        names += _folder_names(Path(folder))
    return tuple(
        name
        for name in dict.fromkeys(names)
        if len(name) > 1 and name.lower() not in PLAIN_FOLDERS and not find_name(by_intention, [name])
    )


def _hub_id_names(name: str) -> list[str]:
    return [name, name.rpartition("/")[2]]


def _folder_names(folder: Path) -> list[str]:
    """The last part of a path that is not a common name; for a folder of a hub's cache, the names of its hub id."""
    for part in reversed(folder.expanduser().absolute().parts[1:]):
        if part.startswith(_OF_HUB_CACHE):
            return _hub_id_names(part.removeprefix(_OF_HUB_CACHE).replace("--", "/"))
        if part.lower() in _OF_SYSTEM or _KEY.fullmatch(part):  # a key: an artifact of our store
            break
        if part.lower() not in PLAIN_FOLDERS and not _NUMBERED.fullmatch(part):
            return [part]
    return []


def refuse_leaks(folder: Path, release: Path, names: Collection[str] = ()) -> None:
    """Raises UserError, one line, for the first file that names a folder of this machine, or one of the names.

    names: searched as whole words, in any spelling (names.py).
    """
    for name, what in find_leaks(folder, _local_folders(release), names):
        raise UserError(
            f"{name}: names {what}, which must not leave this machine; export the release anew with a target_name that"
            " tells nothing, and without that path in any setting"
        )


def find_leaks(folder: Path, places: Collection[str], names: Collection[str]) -> Iterator[tuple[str, str]]:
    """(file, what it names) for every file that contains a place or a name, in its text or its file name."""
    for name in [*files_of(folder), FILE]:
        file = folder / name
        if any(fnmatch.fnmatch(file.name, pattern) for pattern in VOCABULARIES):
            continue
        text = f"{name}\n{_read_text(file)}"
        path = next((place for place in places if place in text), "") or _first_local_path(text)
        if path:
            yield name, f"the folder {path!r:.120}"
        elif named := find_name(text, names):
            yield name, f"the private target {named!r:.120}"


def _read_text(file: Path) -> str:
    """The text of a file; of a binary file its metadata."""
    if file.suffix == ".gguf":
        return "\n".join(gguf_texts(file))
    with file.open("rb") as stream:
        raw = stream.read(SCANNED_BYTES if file.suffix in BINARY else -1)
    return raw.decode("utf-8", errors="replace")


def _first_local_path(text: str) -> str:
    """The first path in a text that is in a home directory or exists on this machine; "" for none."""
    home = _HOME.search(text)
    return home[0] if home else next((one[0] for one in _PATH.finditer(text) if Path(one[0]).exists()), "")


def _local_folders(release: Path) -> list[str]:
    """Folders of this machine that a file might name: the target's, a draft model's, the store, home, temporary."""
    target = read_json(release / TARGET, release.name)
    models = [str(target["folder"]), str(target["model"])]
    if (release / DRAFT).is_file():
        models.append(str(read_json(release / DRAFT, release.name)["settings"].get("model") or ""))
    models_here = [Path(one).expanduser() for one in models if one.startswith(("/", "~", "."))]
    machine_folders = [release.absolute().parent, Path.home(), Path.cwd(), Path(tempfile.gettempdir())]
    folders = {str(form) for place in [*models_here, *machine_folders] for form in (place.absolute(), place.resolve())}
    folders |= {json.dumps(place)[1:-1] for place in folders}
    return sorted(
        place if Path(place) in models_here else f"{place}/" for place in folders if len(Path(place).parts) > 1
    )
