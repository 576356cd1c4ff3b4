"""A release reaches a hub whole, once, and without what must not leave: against a server that speaks the hub's API."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from loopback_hub import TOKEN, LoopbackHub
from saved_drafts import saved_draft
from tiny_formats import KEYS

from components.contract import Context, Measurements, Page, Release, UserError
from components.publish import upload_release
from components.publish.release.validate import validate_folder
from components.rows import EngineComparison, write_rows

Upload = Callable[..., Page]
REPO = "acme/eagle3-for-tiny"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """An empty hub, and an environment that leads to it; large files go by Git LFS, which it speaks."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with LoopbackHub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def upload(tmp_path: Path) -> Upload:
    def run(release: Release, *comparisons: Measurements, repo: str = REPO, **settings: Any) -> Page:
        number = len(list(tmp_path.glob("upload-*")))
        out, scratch = tmp_path / f"upload-{number}", tmp_path / f"scratch-{number}"
        out.mkdir()
        scratch.mkdir()
        ctx = Context(key=f"{number:064d}", out=out, scratch=scratch, num_threads=1)
        return upload_release(release, list(comparisons) or None, repo=repo, ctx=ctx, **settings)

    return run


def copied(hub: LoopbackHub, folder: Path, repo: str = REPO) -> Path:
    """What the hub holds, as somebody downloads it."""
    for name, raw in hub.files(repo).items():
        if name != ".gitattributes":
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(raw)
    return folder


def test_a_release_is_one_commit_and_what_is_downloaded_is_sound(
    hub: LoopbackHub, upload: Upload, export: Callable[..., Any], tmp_path: Path
) -> None:
    release = export()
    page = upload(release)
    assert hub.messages(REPO) == ["initial commit", f"eagle3 at depth {release.info['depth_k']}, release {'r' * 12}"]
    assert hub.repositories[REPO].private
    commit = hub.repositories[REPO].branches["main"][-1][0]
    assert (page.info["commit"], page.info["new_commit"]) == (commit, True)
    assert page.info["url"] == f"{hub.url}/{REPO}/tree/{commit}" and page.info["commit_url"].endswith(
        f"commit/{commit}"
    )
    assert page.info["url"] in (page.path / "index.html").read_text()
    there = copied(hub, tmp_path / "downloaded")
    assert "a release" in validate_folder(there)[0]
    weights = (release.path / "eagle3" / "model.safetensors").read_bytes()
    assert hub.large[hashlib.sha256(weights).hexdigest()] == weights, "by Git LFS, the same bytes"
    assert TOKEN in hub.tokens and TOKEN not in json.dumps(dict(page.info))


def test_the_same_release_twice_makes_no_second_commit_and_sends_no_file(
    hub: LoopbackHub, upload: Upload, export: Callable[..., Any]
) -> None:
    release = export()
    first = upload(release)
    hub.requests.clear()
    second = upload(release)
    assert len(hub.messages(REPO)) == 2
    assert (second.info["commit"], second.info["new_commit"]) == (first.info["commit"], False)
    assert not any("/lfs/put/" in line or "/commit/" in line for line in hub.requests)
    assert "no commit was made" in (second.path / "index.html").read_text()


def test_a_killed_upload_goes_on_without_sending_again_what_the_hub_has(
    hub: LoopbackHub, upload: Upload, export: Callable[..., Any]
) -> None:
    release = export()
    hub.failing["/commit/"] = (503, 1)
    with pytest.raises(UserError, match=rf"repo: {REPO}: cannot commit at {hub.url} \(.*503") as error:
        upload(release)
    assert "\n" not in str(error.value) and TOKEN not in str(error.value)
    assert hub.messages(REPO) == ["initial commit"], "complete or absent"
    sent = [line for line in hub.requests if line.startswith("PUT /lfs/put/")]
    assert sent
    hub.requests.clear()
    upload(release)
    assert len(hub.messages(REPO)) == 2
    assert not any(line.startswith("PUT /lfs/put/") for line in hub.requests)


def test_a_new_release_takes_the_place_of_the_old_one_and_leaves_the_owners_files(
    hub: LoopbackHub, upload: Upload, export: Callable[..., Any], tmp_path: Path
) -> None:
    before = export(include="all")
    upload(before)
    raw = hub.repositories[REPO]
    raw.commit("main", "a picture", {**hub.files(REPO), "picture.png": b"png"})
    before.path.rename(tmp_path / "before")
    page = upload(export(license="MIT"))
    names = set(hub.files(REPO))
    assert "mtp/config.json" not in names and {"picture.png", ".gitattributes", "eagle3/config.json"} <= names
    assert page.info["num_removed"] == 2
    assert b"license: MIT" in hub.files(REPO)["README.md"]


def test_a_branch_of_its_own_leaves_main_alone(hub: LoopbackHub, upload: Upload, export: Callable[..., Any]) -> None:
    upload(export(), revision="depth-3", message="try this")
    assert hub.messages(REPO) == ["initial commit"]
    assert hub.messages(REPO, "depth-3") == ["initial commit", "try this"]


def test_no_folder_of_this_machine_goes_up_and_the_copy_says_which_target_it_is(
    hub: LoopbackHub, upload: Upload, export: Callable[..., Any], source: Any, tmp_path: Path
) -> None:
    release = export()
    assert str(source.folder) in (release.path / "draftsmith" / "target.json").read_text(), "needed to load it here"
    upload(release)
    for name, raw in hub.files(REPO).items():
        assert str(source.folder).encode() not in raw and str(tmp_path).encode() not in raw, name
    target = json.loads(hub.files(REPO)["draftsmith/target.json"])
    assert (target["model"], target["folder"]) == ("tiny-llama", "")
    assert target["files"] == json.loads((release.path / "draftsmith" / "target.json").read_text())["files"]


def test_a_private_targets_name_stays_out_of_a_public_repository(
    hub: LoopbackHub, upload: Upload, export: Callable[..., Any], tmp_path: Path
) -> None:
    release = export()
    with pytest.raises(UserError, match=r"names the private target 'tiny-llama', .* target_name") as error:
        upload(release, private=False)
    assert "\n" not in str(error.value)
    assert REPO not in hub.repositories, "nothing was made"
    release.path.rename(tmp_path / "told")
    hidden = export(target_name="an internal model")
    with pytest.raises(UserError, match="its name has the private target's 'tiny-llama' in it"):
        upload(hidden, private=False, repo="acme/Tiny-Llama-drafter")
    upload(hidden, private=False)
    assert not hub.repositories[REPO].private
    assert not any(b"tiny-llama" in raw.lower() for raw in hub.files(REPO).values())
    card = hub.files(REPO)["README.md"].decode()
    assert "# eagle3 drafter for an internal model" in card and "vllm serve TARGET " in card


def test_weights_of_a_private_target_stay_out_of_a_public_repository(
    hub: LoopbackHub,
    upload: Upload,
    export: Callable[..., Any],
    policy_for: Callable[..., Any],
    networks: Any,
    opened: Any,
    tmp_path: Path,
) -> None:
    """A module in MiMo's shape brings the target's embedding and LM head along."""
    settings = {"mtp_modules": 1, "first_hidden": "post_norm", "intermediate_size": 0}
    draft = saved_draft(tmp_path / "draft", networks("mtp", settings), settings, opened, key=KEYS["mtp"])
    assert draft.info["num_steps"] == draft.info["max_depth"] == 1
    release = export(policy=policy_for("mtp"), only=[draft], engines=["vllm"], target_name="ours")
    assert release.info["formats"] == ["mimo"]
    with pytest.raises(UserError, match=r"mimo/ holds weights of the target, which nobody else can read"):
        upload(release, private=False)
    upload(release)
    assert hub.repositories[REPO].private


@pytest.mark.parametrize(
    ("method", "settings", "engines", "folder", "remedy"),
    [
        ("eagle3", {}, ["speculators"], "speculators", "export other formats"),
        ("p-eagle", {"parallel_depth": 3, "num_layers": 1}, [], "speculators", "export other formats"),
        ("medusa", {"num_heads": 2, "head": "tied"}, [], "medusa", "train with head: own"),
        ("medusa", {"num_heads": 2}, [], "", ""),
        ("draft-model", {"num_layers": 1}, [], "causal-lm", "train with a hidden_size of its own"),
        ("draft-model", {"num_layers": 1, "hidden_size": 16}, [], "", ""),
        ("eagle1", {"fc_bias": False}, [], "", ""),
    ],
)
def test_a_private_targets_embedding_and_head_stay_in_whatever_format_copies_them(
    method: str,
    settings: dict[str, Any],
    engines: list[str],
    folder: str,
    remedy: str,
    hub: LoopbackHub,
    upload: Upload,
    export: Callable[..., Any],
    networks: Any,
    opened: Any,
    tmp_path: Path,
) -> None:
    draft = saved_draft(tmp_path / "draft", networks(method, settings), settings, opened, key=KEYS["eagle3"])
    release = export(only=[draft], engines=engines, target_name="ours")
    if not folder:
        upload(release, private=False)
        assert not hub.repositories[REPO].private
        return
    with pytest.raises(UserError, match=rf"{folder}/ holds weights of the target, .*, {remedy}, or load"):
        upload(release, private=False)
    assert REPO not in hub.repositories, "nothing was made"


def test_of_all_drafters_that_go_out_none_may_hold_the_private_target(
    hub: LoopbackHub,
    upload: Upload,
    export: Callable[..., Any],
    drafts: Any,
    networks: Any,
    opened: Any,
    tmp_path: Path,
) -> None:
    """The winner holds nothing of it; a Medusa beside it, of whose settings release.json tells nothing, does."""
    settings = {"num_heads": 2, "head": "tied"}
    beside = saved_draft(tmp_path / "draft", networks("medusa", settings), settings, opened, key="a" * 64)
    release = export(only=[drafts["eagle3"], beside], include="all", target_name="ours")
    with pytest.raises(UserError, match="medusa/ holds weights of the target"):
        upload(release, private=False)


def test_a_repository_that_is_private_stays_so_and_is_said_to_be(
    hub: LoopbackHub, upload: Upload, export: Callable[..., Any]
) -> None:
    hub.add(REPO, private=True)
    page = upload(export(target_name="ours"), private=False)
    assert hub.repositories[REPO].private and page.info["private"] is True


def test_a_target_that_anybody_can_read_is_named(
    hub: LoopbackHub, upload: Upload, export: Callable[..., Any], tmp_path: Path
) -> None:
    hub.add("meta/Tiny-Llama", private=False)
    hub.add("acme/Tiny-Llama", private=True)
    upload(export(target_name="meta/Tiny-Llama"), private=False)
    assert b'base_model: "meta/Tiny-Llama"' in hub.files(REPO)["README.md"]
    (tmp_path / "release").rename(tmp_path / "one")
    release = export(target_name="acme/Tiny-Llama")
    upload(release, private=False)  # named by intention, as the user's own word


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda hub, patch: patch.delenv("HF_TOKEN"), r"\$HF_TOKEN is not set"),
        (lambda hub, patch: patch.setenv("HF_TOKEN", "hf_wrong"), r"cannot make the repository .*401"),
        (lambda hub, patch: patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9"), "cannot make the repository at http"),
        (
            lambda hub, patch: patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
            r"steps may not reach the hub; allow it with `draftsmith run --online`",
        ),
        (lambda hub, patch: hub.add(REPO, private=False), "is public, and private: true was asked"),
    ],
)
def test_what_keeps_a_release_from_the_hub_is_one_line(
    spoil: Callable[..., Any],
    said: str,
    hub: LoopbackHub,
    upload: Upload,
    export: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil(hub, monkeypatch)
    with pytest.raises(UserError, match=said) as error:
        upload(export())
    assert "\n" not in str(error.value) and "hf_" not in str(error.value).replace("HF_", "")
    assert REPO not in hub.repositories or hub.messages(REPO) == ["initial commit"]


def test_a_release_that_was_changed_is_not_uploaded(
    hub: LoopbackHub, upload: Upload, export: Callable[..., Any]
) -> None:
    release = export()
    (release.path / "README.md").write_text("better numbers")
    with pytest.raises(UserError, match=r"README\.md: not what was released"):
        upload(release)
    assert not hub.requests


def compared(folder: Path, verdict: str, finished: float, engine: str = "vllm") -> Measurements:
    """A comparison of an engine with our own loop, as the store keeps it."""
    folder.mkdir()
    numbers = dict.fromkeys(EngineComparison.__dataclass_fields__, 0)
    words = {"session_id": folder.name, "target_key": "t", "draft_key": "e" * 64, "method": "eagle3", "workload": "all"}
    words |= {"engine": engine, "engine_version": "0.32", "our_rounds_from": "maps", "verdict": verdict}
    write_rows(folder, [EngineComparison(**{**numbers, **words})])  # type: ignore[arg-type]
    (folder / "artifact.json").write_text(json.dumps({"finished_at": finished}))
    return Measurements(key=folder.name, path=folder)


def test_while_the_newest_given_comparison_of_an_engine_differs_nothing_is_uploaded(
    hub: LoopbackHub, upload: Upload, export: Callable[..., Any], tmp_path: Path
) -> None:
    release = export()

    other = compared(tmp_path / "other-engine", "equal", 9.0, engine="llama.cpp")
    wrong, silent = compared(tmp_path / "first", "mismatch", 1.0), compared(tmp_path / "silent", "not_compared", 2.0)
    for given in ([wrong], [other, wrong], [wrong, silent]):  # what could not compare clears nothing
        with pytest.raises(UserError, match=r"engine_mismatch stands for vllm 0\.32"):
            upload(release, *given)
    assert not hub.requests
    upload(release, compared(tmp_path / "mended", "equal", 3.0), wrong)
    assert len(hub.messages(REPO)) == 2


def test_only_comparisons_that_are_given_count(hub: LoopbackHub, upload: Upload, export: Callable[..., Any]) -> None:
    """The key of the step covers its inputs; a neighbour in the store that it read besides would change it unseen."""
    release = export()
    compared(release.path.parent / "beside", "mismatch", 1.0)
    upload(release)
    assert len(hub.messages(REPO)) == 2


def test_a_public_name_does_not_make_a_private_target_public(
    hub: LoopbackHub, upload: Upload, export: Callable[..., Any], tmp_path: Path
) -> None:
    """A model tuned in private, called by the public one that it comes from: its own name must still not go out."""
    hub.add("meta/Base-Llama", private=False)
    release = export(target_name="meta/Base-Llama", license="Tiny_Llama-terms")
    with pytest.raises(UserError, match="names the private target 'tiny-llama'"):
        upload(release, private=False)
    release.path.rename(tmp_path / "spelt")
    sound = export(target_name="meta/Base-Llama")
    for settings in (
        {"repo": "acme/tiny_llama-drafter"},
        {"revision": "for-tiny-llama"},
        {"message": "drafts for Tiny%2DLlama"},
    ):
        with pytest.raises(UserError, match="has the private target's 'tiny-llama' in it"):
            upload(sound, private=False, **settings)
    assert not any(name.startswith("acme/") for name in hub.repositories), "nothing was made"
    upload(sound, private=False)


def test_weights_of_a_private_target_stay_in_whatever_it_is_called(
    hub: LoopbackHub, upload: Upload, export: Callable[..., Any], tmp_path: Path
) -> None:
    from components.publish.release.checksums import write_sums

    hub.add("meta/Base-Llama", private=False)
    release = export(target_name="meta/Base-Llama")
    file = release.path / "release.json"
    record = json.loads(file.read_text())
    record["formats"]["eagle3"]["format"] = "stitched"
    file.write_text(json.dumps(record))
    write_sums(release.path)
    with pytest.raises(UserError, match="eagle3/ holds weights of the target, which nobody else can read"):
        upload(release, private=False)
