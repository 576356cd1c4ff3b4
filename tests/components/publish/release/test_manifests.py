"""Manifests say what the card's commands say, in objects that Kubernetes and the operators take."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

import kubernetes_validate
import pytest
import yaml

from components.contract import Draft
from components.engines.depth_settings import settings_for
from components.engines.launch import launch_lines
from components.publish.release.manifests import manifests_of

KEY = "d" * 64


def manifests(method: str, target: str = "owner/model", formats: tuple[str, ...] = ("eagle3",)) -> dict[str, list[Any]]:
    """The objects of a release with these formats at depth 3, by file; "launch": its commands."""
    engines, folders = settings_for(method, {1: 3}), dict(zip(formats, formats, strict=True))
    launch = dict(launch_lines(method, 3, engines, target, folders))
    written = {one: {"format": one, "draft_key": KEY, "method": method} for one in formats}
    serve = {"method": method, "draft_key": KEY}
    record: Any = {"serve": serve, "formats": written, "engines": engines, "launch": launch}
    made = {name: list(yaml.safe_load_all(text)) for name, text in manifests_of(record).items()}
    return made | {"launch": [launch]}


def pod_of(service: Any) -> Any:
    (container,) = service["spec"]["predictor"]["containers"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": service["metadata"], "spec": {"containers": [container]}}
    assert kubernetes_validate.validate(pod, "1.37", strict=True)
    return container


@pytest.mark.parametrize(
    ("method", "target", "formats", "mounted"),
    [
        ("eagle3", "owner/model", ("eagle3",), ["RELEASE"]),
        ("eagle3", "tiny-llama", ("eagle3",), ["RELEASE", "TARGET"]),
        ("mtp", "owner/model", ("stitched",), ["RELEASE"]),
        ("ngram", "owner/model@abc", (), []),
        ("ngram", "folder", (), ["TARGET"]),
    ],
)
def test_kserve_gets_the_arguments_of_the_card(
    method: str, target: str, formats: tuple[str, ...], mounted: list[str]
) -> None:
    made = manifests(method, target, formats)
    (service,), words = made["kserve.yaml"], shlex.split(made["launch"][0]["vLLM"])
    container, mounts = pod_of(service), service["spec"]["predictor"].get("storageUris", [])
    assert [mount["uri"] for mount in mounts] == mounted
    args = container["args"]
    config, of_card = (json.loads(line[line.index("--speculative-config") + 1]) for line in (args, words))
    paths = {mount["mountPath"] for mount in mounts}
    for place, before in ((args[0], words[2]), (config.get("model", ""), of_card.get("model", ""))):
        if before.startswith("./"):
            assert place.removesuffix(before[1:]) in paths, "a folder of the release is where it is mounted"
    assert args[0] == target.partition("@")[0] or args[0].startswith("/mnt/models/draftsmith-")
    assert {**config, "model": ""} == {**of_card, "model": ""} and config["num_speculative_tokens"] == 3
    assert ("--revision" in args) == ("@" in target)


def test_llmkube_gets_the_drafter_and_the_depth() -> None:
    made = manifests("eagle3", formats=("eagle3", "gguf"))
    target, draft, service = made["llmkube.yaml"]
    assert [one["kind"] for one in (target, draft, service)] == ["Model", "Model", "InferenceService"]
    assert draft["spec"]["source"] == "RELEASE/gguf/draft.gguf"
    assert service["spec"]["modelRef"] == target["metadata"]["name"]
    assert service["spec"]["speculativeDecoding"] == {
        "type": "draft-eagle3",
        "draftModelRef": draft["metadata"]["name"],
        "nDraftMax": 3,
        "pMin": 0.0,
    }


def test_a_method_that_no_engine_serves_has_no_manifests() -> None:
    assert manifests("lookahead", formats=())["launch"] != [] and len(manifests("lookahead", formats=())) == 1


def test_a_release_holds_its_manifests_and_its_card_names_them(
    export: Callable[..., Any], drafts: dict[str, Draft]
) -> None:
    release = export()
    listed = {file["path"] for file in json.loads((release.path / "release.json").read_text())["files"]}
    assert "kubernetes/kserve.yaml" in listed
    (service,) = yaml.safe_load_all((release.path / "kubernetes" / "kserve.yaml").read_text())
    assert service["metadata"]["name"] == f"eagle3-{drafts['eagle3'].key[:8]}"
    card = (release.path / "README.md").read_text()
    assert "`kubernetes/kserve.yaml`" in card and "not applied to a cluster" in card
