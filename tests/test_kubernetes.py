"""deploy/kubernetes and deploy/slurm: manifests that Kubernetes' own schemas accept, names that exist, GPUs as asked.

The schemas come with the package kubernetes-validate, so no cluster and no network is needed. Where kubectl is
installed, the overlays are also built with it, as `kubectl apply -k` builds them.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import kubernetes_validate
import pytest
import yaml
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.utilities.templating import apply_values
from read_variables import read_by_nobody

from flows.cli import main

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("local", "gpu")
OLDEST, NEWEST = "1.29", "1.37"
"""Versions of Kubernetes that every manifest must fit."""
OF_PREFECT_ALONE = ("parallelism", "completions")
"""What Prefect's worker wants inside a pod, where Kubernetes knows no such field and leaves it out."""
Manifest = dict[str, Any]


def documents(file: Path) -> list[Manifest]:
    return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))


def literals(file: Path, name: str = "workers") -> dict[str, str]:
    """The literals of a config map of a kustomization."""
    (entry,) = (one for one in documents(file)[0]["configMapGenerator"] if one["name"] == name)
    return dict(line.split("=", 1) for line in entry["literals"])


FILES = sorted(FOLDER.rglob("*.yaml"))
MANIFESTS = [
    (f"{file.parent.name}/{file.name}: {one['kind']} {one['metadata']['name']}", one)
    for file in FILES
    if file.name not in ("kustomization.yaml", "pipelines.yaml")
    for one in documents(file)
]
each_manifest = pytest.mark.parametrize("manifest", [one for _, one in MANIFESTS], ids=[name for name, _ in MANIFESTS])


def pods(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """(object, the spec of its pods)."""
    for one in manifests:
        if one["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield one, one["spec"]["template"]["spec"]


PODS = [pod for _, pod in pods([one for _, one in MANIFESTS])]


@each_manifest
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kubernetes_takes_every_manifest(manifest: Manifest, version: str) -> None:
    assert kubernetes_validate.validate(manifest, version, strict=True) == version


def test_a_wrong_field_is_found() -> None:
    manifest = json.loads(json.dumps(next(one for _, one in MANIFESTS if one["kind"] == "Deployment")))
    manifest["spec"]["template"]["spec"]["containers"][0]["imagePullPolciy"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagePullPolciy"):
        kubernetes_validate.validate(manifest, NEWEST, strict=True)


def template_of(overlay: str) -> Manifest:
    """The base job template as the worker's command fills it in."""
    text = (FOLDER / "base" / "job-template.json").read_text(encoding="utf-8")
    given = literals(FOLDER / "base" / "kustomization.yaml")
    if overlay != "local":
        given |= literals(FOLDER / "overlays" / overlay / "kustomization.yaml")
    for name, value in given.items():
        text = text.replace(f"${name}", value)
    assert "$" not in text, "every variable has a value"
    return dict(json.loads(text))


def job_of(overlay: str, **values: Any) -> Manifest:
    """The job that a run becomes: the template with these job variables over its defaults, as Prefect fills it in."""
    template = template_of(overlay)
    variables = template["variables"]["properties"]
    assert set(values) <= set(variables), "Prefect ignores a variable that the template does not have"
    defaults = {name: one["default"] for name, one in variables.items() if "default" in one}
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    assert used == set(variables), "every variable is used and every one used is there"
    run = {"name": "bold-otter", "labels": {}, "annotations": {}, "command": ["prefect", "flow-run", "execute"]}
    env = {"env": [{"name": "PREFECT__FLOW_RUN_ID", "value": "1"}]}
    return dict(apply_values(template["job_configuration"]["job_manifest"], {**defaults, **run, **env, **values}))


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("gpus", [0, 2])
def test_a_run_becomes_a_job_with_the_gpus_that_it_asks_for(overlay: str, gpus: int) -> None:
    job = job_of(overlay, gpus=gpus)
    pod = job["spec"]["template"]["spec"]
    assert [pod.pop(name) for name in OF_PREFECT_ALONE] == [1, 1]
    assert kubernetes_validate.validate(job, NEWEST, strict=True) == NEWEST
    (container,) = pod["containers"]
    assert [container["resources"][kind]["nvidia.com/gpu"] for kind in ("requests", "limits")] == [gpus, gpus]
    assert ("persistentVolumeClaim" in pod["volumes"][1]) == (overlay == "gpu")
    assert container["image"].endswith("-cuda") == (overlay == "gpu")
    assert environments(container) == {"draftsmith", "addresses"}, "runs log to MLflow, and their links open"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.system
def test_prefects_own_worker_makes_a_job_that_kubernetes_takes() -> None:
    worker = importlib.import_module("prefect_kubernetes.worker")  # of the extra `kubernetes`
    values = {"gpus": 1, "env": {"DRAFTSMITH_HOME": "/var/lib/draftsmith"}, "stream_output": False}
    with temporary_settings({PREFECT_API_URL: "http://prefect:4200/api"}):  # as in the worker's pod; is asked nothing
        made = worker.KubernetesWorkerJobConfiguration.from_template_and_values(template_of("gpu"), values)
        configuration = asyncio.run(made)
        configuration.prepare_for_flow_run(FlowRun(name="bold-otter", flow_id=uuid4()))
    job = configuration.job_manifest
    pod = job["spec"]["template"]["spec"]
    assert [pod.pop(name) for name in OF_PREFECT_ALONE] == [1, 1]
    assert kubernetes_validate.validate(job, NEWEST, strict=True) == NEWEST
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert (env["DRAFTSMITH_HOME"], env["PREFECT_API_URL"]) == ("/var/lib/draftsmith", "http://prefect:4200/api")
    assert "PREFECT__FLOW_RUN_ID" in env
    assert env["PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"] == "reschedule", "an evicted run is scheduled anew"


def test_services_find_pods_and_pods_find_what_they_mount() -> None:
    made = {name for file in FILES if file.name == "kustomization.yaml" for name in generated(file)}
    of_pods = [
        one["spec"]["template"].get("metadata", {}).get("labels", {}) for one, _ in pods([o for _, o in MANIFESTS])
    ]
    services = [one for _, one in MANIFESTS if one["kind"] == "Service"]
    for one in services:
        assert any(one["spec"]["selector"].items() <= labels.items() for labels in of_pods), one["metadata"]["name"]
    assert len(services) == 4
    for one, pod in pods([one for _, one in MANIFESTS]):
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        claims = {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", [])}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= {*volumes, *claims}
            assert environments(container) <= made
        assert {volume["configMap"]["name"] for volume in volumes.values() if "configMap" in volume} <= made


def environments(container: Manifest) -> set[str]:
    """Config maps and secrets whose names and values a container has as variables."""
    return {source["name"] for one in container.get("envFrom", []) for source in one.values()}


def generated(file: Path) -> set[str]:
    """Config maps and secrets that a kustomization makes."""
    content = documents(file)[0]
    return {one["name"] for kind in ("configMapGenerator", "secretGenerator") for one in content.get(kind, [])}


def test_files_that_are_there_twice_are_equal_to_those_of_compose() -> None:
    assert (FOLDER / "overlays" / "local" / "databases.sql").read_text() == (ROOT / "deploy/databases.sql").read_text()
    compose = documents(ROOT / "deploy" / "compose.yaml")[0]
    of_compose = {service["image"] for service in compose["services"].values()}
    assert {container["image"] for pod in PODS for container in pod["containers"]} <= of_compose


def test_nothing_runs_as_root_or_without_limits() -> None:
    assert len(PODS) == 7
    for pod in PODS:
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"] and container["resources"]["requests"]["cpu"]
    (role,) = (one for _, one in MANIFESTS if one["kind"] == "Role")
    assert all("*" not in rule["verbs"] + rule["resources"] for rule in role["rules"])
    assert not [one for _, one in MANIFESTS if one["kind"].startswith("Cluster")]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_secret_that_is_named_is_in_the_examples_and_holds_nothing(overlay: str) -> None:
    folder = FOLDER / "overlays" / overlay
    examples = {}
    for name in ("databases", "draftsmith"):
        text = (folder / f"{name}.env.example").read_text(encoding="utf-8")
        examples[name] = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
        ignored = subprocess.run(["git", "check-ignore", "-q", folder / f"{name}.env"], cwd=ROOT, check=False)
        assert ignored.returncode in (0, 128), "a filled-in file must be ignored by git"
    for name, value in (pair for example in examples.values() for pair in example.items()):
        if re.search(r"PASSWORD$|SECRET|KEY|TOKEN", name):
            assert value == "", f"{name} is written out"
    used = [
        one["valueFrom"]["secretKeyRef"]
        for name, manifest in MANIFESTS
        if name.startswith(("base", overlay))
        for _, pod in pods([manifest])
        for container in pod["containers"]
        for one in container["env"]
        if "valueFrom" in one
    ]
    assert used and [one for one in used if one["key"] not in examples[one["name"]]] == []
    assert read_by_nobody(examples["draftsmith"]) == []


def test_every_variable_is_read_by_somebody() -> None:
    names = {one["name"] for pod in PODS for container in pod["containers"] for one in container.get("env", [])}
    names |= set(literals(FOLDER / "base" / "kustomization.yaml", "addresses"))
    ours = {*names} - {"RUNS_AT_ONCE", "KEY", "SECRET", "PGDATA", "MC_CONFIG_DIR"}
    of_the_worker = {name for name in ours if name.startswith("PREFECT_INTEGRATIONS_KUBERNETES_")}
    assert read_by_nobody(ours - of_the_worker) == [] and len(of_the_worker) == 3
    command = next(pod for pod in PODS if pod.get("serviceAccountName") == "worker")["containers"][0]["command"][-1]
    assert "$RUNS_AT_ONCE" in command and "os.path.expandvars" in command


def test_its_pipelines_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path))
    assert main(["check", "-f", str(FOLDER / "base" / "pipelines.yaml")]) == 0, capfd.readouterr().err


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_builds_every_overlay(overlay: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    folder = tmp_path / "kubernetes" / "overlays" / overlay
    for example in folder.glob("*.env.example"):
        shutil.copyfile(example, example.with_suffix(""))
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    assert all(kubernetes_validate.validate(one, NEWEST, strict=True) for one in built)
    assert {one["metadata"].get("namespace") for one in built if one["kind"] != "Namespace"} == {"draftsmith"}
    names = {(one["kind"], one["metadata"]["name"]) for one in built}
    assert {("Secret", "draftsmith"), ("ConfigMap", "pipelines"), ("Deployment", "worker")} <= names
    for one, pod in pods(built):
        stores = [volume for volume in pod.get("volumes", []) if volume["name"] == "store"]
        shared = one["metadata"]["name"] in ("worker", "watch", "prefect", "mlflow")
        assert [("persistentVolumeClaim" in volume) for volume in stores] == ([overlay == "gpu"] if shared else [])


@pytest.mark.parametrize("file", sorted((ROOT / "deploy" / "slurm").iterdir()), ids=lambda file: file.name)
def test_slurm_scripts_are_shell_and_say_what_is_missing(file: Path, tmp_path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
    options = re.findall(r"^#SBATCH --([a-z-]+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    assert {"nodes", "gres", "time", "signal", "output"} <= {*options}
    env = {"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(["bash", str(file)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and re.search(r"name of a pipeline|address of the Prefect server", done.stderr)


def test_the_slurm_script_starts_the_run_that_it_is_given(tmp_path: Path) -> None:
    program = tmp_path / ".venv" / "bin" / "draftsmith"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "$DRAFTSMITH_HOME $PWD $*"\n')
    program.chmod(0o755)
    env = {"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(tmp_path)}
    command = ["bash", str(ROOT / "deploy/slurm/run.sbatch"), "train-8b", "-p", "train_steps=20"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        f"{tmp_path}/.draftsmith",
        str(tmp_path),
        "run",
        "train-8b",
        "-p",
        "train_steps=20",
        "--direct",
    ]
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$DRAFTSMITH_RENDEZVOUS $*" > others.tmp && mv others.tmp others\n')
    srun.chmod(0o755)
    program.write_text("#!/bin/sh\nuntil [ -e others ]; do sleep 0.1; done\n")
    env |= {"PATH": f"{tmp_path}:{env['PATH']}", "SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_PER_TASK": "8"}
    subprocess.run(command, env=env, check=True, timeout=600)
    place, *given = (tmp_path / "others").read_text().split()
    assert place.endswith(":29400") and given == [
        *("--relative=1", "--nodes=2", "--ntasks=2", "--cpus-per-task=8"),
        *(".venv/bin/python", "-m", "components.drafts.training.node"),
    ]
