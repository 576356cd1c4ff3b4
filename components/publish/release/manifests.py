"""Manifests that serve a release on Kubernetes: the card's commands as KServe (vLLM) and LLMKube (llama.cpp) take them.

KServe's LLMInferenceService has no field for a drafter yet (its pull request 5687 proposes `spec.speculator`), so that
vLLM's own arguments go into an InferenceService. LLMKube has `speculativeDecoding` with `draftModelRef` (its pull
request 1533). Both were read in August 2026. Two words are the reader's to replace: RELEASE, where the release's folder
lies (hf://, s3://, pvc://), and TARGET, where the target does, if it is no model of a hub.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Final

import yaml

from components.engines.launch import FOLDER_OF_TARGET, HUB_ID
from components.engines.profiles import profile_of
from components.outside_json import JsonObject
from components.release_record import ReleaseRecord

FOLDER: Final = "kubernetes"
KSERVE, LLMKUBE = "kserve.yaml", "llmkube.yaml"
RELEASE_URI: Final = "RELEASE"
_RELEASE_IN_POD, _TARGET_IN_POD = "/mnt/models/draftsmith-release", "/mnt/models/draftsmith-target"
_PORT: Final = 8080


def write_manifests(folder: Path, record: ReleaseRecord) -> None:
    """Write `kubernetes/` for the engines of record["launch"] that have an operator; nothing where there is none."""
    for name, text in manifests_of(record).items():
        (folder / FOLDER).mkdir(exist_ok=True)
        (folder / FOLDER / name).write_text(text, encoding="utf-8")


def manifests_of(record: ReleaseRecord) -> dict[str, str]:
    """File name -> YAML."""
    launch, manifests = record["launch"], {}
    name = f"{record['serve']['method']}-{record['serve']['draft_key'][:8]}"
    if "vLLM" in launch:
        manifests[KSERVE] = _yaml([_inference_service(name, shlex.split(launch["vLLM"]))], "KServe runs vLLM")
    if "llama.cpp" in launch:
        flags = record["engines"]["llama_cpp"]["flags"]
        draft = next((f"{one}/draft.gguf" for one in _gguf_folders(record)), "draft.gguf")
        about = "LLMKube runs llama.cpp" + ("" if "/" in draft else "; the card's command makes draft.gguf")
        manifests[LLMKUBE] = _yaml(_llmkube(name, draft, dict(zip(flags[::2], flags[1::2], strict=True))), about)
    return manifests


def _gguf_folders(record: ReleaseRecord) -> list[str]:
    """Folders with a GGUF file of the drafter that is served."""
    key = record["serve"]["draft_key"]
    return [name for name, one in record["formats"].items() if (one["format"], one["draft_key"]) == ("gguf", key)]


def _inference_service(name: str, command: list[str]) -> JsonObject:
    """KServe's object for `vllm serve MODEL OPTIONS...`, with the release's folder, and a target's, mounted."""
    assert command[:2] == ["vllm", "serve"], command
    model, options = command[2], command[3:]
    at = options.index("--speculative-config") + 1
    config = json.loads(options[at])
    mounts = []
    if model.startswith("./") or str(config.get("model", "")).startswith("./"):
        mounts.append({"uri": RELEASE_URI, "mountPath": _RELEASE_IN_POD})
    if model.startswith("./"):
        model = model.replace(".", _RELEASE_IN_POD, 1)
    elif not HUB_ID.fullmatch(model):
        mounts.append({"uri": FOLDER_OF_TARGET, "mountPath": _TARGET_IN_POD})
        model = _TARGET_IN_POD
    if str(config.get("model", "")).startswith("./"):
        config["model"] = config["model"].replace(".", _RELEASE_IN_POD, 1)
    options[at] = json.dumps(config)
    container = {
        "name": "kserve-container",
        "image": f"vllm/vllm-openai:v{profile_of('vllm').version}",
        "command": ["vllm", "serve"],
        "args": [model, "--port", str(_PORT), "--served-model-name", name, *options],
        "ports": [{"containerPort": _PORT, "protocol": "TCP"}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": _PORT}, "failureThreshold": 120},
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    predictor = ({"storageUris": mounts} if mounts else {}) | {"containers": [container]}
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {"predictor": predictor},
    }


def _llmkube(name: str, draft: str, flags: dict[str, str]) -> list[JsonObject]:
    """LLMKube's objects: the target, the drafter, and the service that names both. flags: llama.cpp's own."""
    api = {"apiVersion": "inference.llmkube.dev/v1alpha1"}
    models = {f"{name}-target": f"{FOLDER_OF_TARGET}/target.gguf", name: f"{RELEASE_URI}/{draft}"}
    speculative = {
        "type": flags["--spec-type"],
        "draftModelRef": name,
        "nDraftMax": int(flags["--spec-draft-n-max"]),
        "pMin": float(flags["--spec-draft-p-min"]),
    }
    return [
        *(api | {"kind": "Model", "metadata": {"name": key}, "spec": {"source": uri}} for key, uri in models.items()),
        api
        | {
            "kind": "InferenceService",
            "metadata": {"name": name},
            "spec": {"modelRef": f"{name}-target", "runtime": "llamacpp", "speculativeDecoding": speculative},
        },
    ]


def _yaml(objects: list[JsonObject], about: str) -> str:
    """The objects under a comment."""
    text = yaml.safe_dump_all(objects, sort_keys=False, width=10_000)
    words = f"{RELEASE_URI} by where this release lies, {FOLDER_OF_TARGET} by where its target does"
    return f"# {about}, at the depth that was chosen. Replace {words}, and set GPUs and memory.\n{text}"
