"""Real Dask and Ray clusters of two workers: the bytes of a serial run, whatever is killed, and nothing left behind."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
import tiny_pipeline
from pipeline_builder import only
from prefect_server import temporary_server
from tiny_targets import make_tiny_target
from toy_garden import COMMAND_LINE, ROOT, gone
from usual_pipeline import usual

from flows.orchestration.prefect_server import TemporaryServer
from storage.artifacts.store import Store

pytestmark = [pytest.mark.system, pytest.mark.timeout(1500)]  # on a busy machine a cluster takes minutes to come up
WIDE_STEPS = {"answers": "ray", "features": "dask", "acceptance": "ray"}
"""Where each of them runs in these tests: what a shard does is not known to the code of either cluster."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemporaryServer]:
    """One Prefect server for all commands of this file."""
    with temporary_server(tmp_path_factory.mktemp("prefect")) as started:
        yield started


@pytest.fixture(autouse=True)
def its_server(server: TemporaryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.client_environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PREFECT_HOME")  # each command has its own


@pytest.fixture(params=["dask", "ray"])
def cluster(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def weed(
    cluster: str, pipelines: Callable[[str], Path], start: Callable[..., subprocess.Popen[str]]
) -> Callable[..., subprocess.Popen[str]]:
    """Starts a run of the toy pipeline on the cluster."""

    def run(num_beds: int, pause_s: float, how: str = "well", **at: object) -> subprocess.Popen[str]:
        place = {"runs_on": {"cluster": cluster, **(at or {"workers": 2})}}
        beds = only("toys.weed", keys=place, num_beds=num_beds, pause_s=pause_s, how=how)
        return start(COMMAND_LINE, "run", "p", "-f", pipelines(beds.text))

    return run


@pytest.fixture
def address(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A cluster of two workers that somebody else has started, as its documentation says."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(place) for place in (ROOT, ROOT / "tests" / "flows")))
    bin_folder = Path(sys.executable).parent
    port, client_port = free_port(), free_port()
    if cluster == "dask":
        scheme, client_port = "tcp", port
        scheduler = ("dask", "scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard")
        options = ("--nworkers", "2", "--nthreads", "1", "--no-dashboard", "--local-directory", str(tmp_path / "dask"))
        commands = [scheduler, ("dask", "worker", f"tcp://127.0.0.1:{port}", *options)]
    else:
        scheme = "ray"
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        monkeypatch.setenv("RAY_worker_niceness", "0")  # at 15, its own, workers wait for the tests beside this one
        head = ("ray", "start", "--head", "--block", "--node-ip-address", "127.0.0.1", "--port", str(port))
        head += ("--ray-client-server-port", str(client_port), "--min-worker-port", "10002")
        head += ("--max-worker-port", "10101", "--include-dashboard", "false", "--num-cpus", "2", "--num-gpus", "2")
        commands = [(*head, "--object-store-memory", str(128 << 20))]
    with ExitStack() as stack:
        if cluster == "ray":  # a socket's path may hold 107 characters
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp"))
            commands = [(*commands[0], "--temp-dir", place)]
        for program, *arguments in commands:
            started = subprocess.Popen([bin_folder / program, *arguments], stdout=subprocess.DEVNULL, cwd=ROOT)
            stack.callback(end_tree, started)
        until_it_listens(client_port)
        yield f"{scheme}://127.0.0.1:{client_port}"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def until_it_listens(port: int) -> None:
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError(f"nothing listens on {port}")


def end_tree(process: subprocess.Popen[bytes]) -> None:
    below = psutil.Process(process.pid).children(recursive=True)
    for one in (*below, process):
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait(30)


def beds(store: Store) -> dict[str, str]:
    """The shards of the only artifact."""
    (key,) = store.keys()
    return {file.name: file.read_text() for file in sorted(store.path_of(key).glob("bed-*.txt"))}


def worker_of_a_bed(store: Store, process: subprocess.Popen[str]) -> int:
    """The pid of a worker that is at it, once a bed is finished."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        if list((store.home / "partial").glob("*/bed-*.txt")):
            (diary,) = (store.home / "partial").glob("*.scratch/pids")
            return int(diary.read_text().split()[-1])
        time.sleep(0.05)
    raise AssertionError(f"no bed was finished: {process.communicate()[0] if process.poll() is not None else 'late'}")


def tree_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


Made = dict[str, tuple[str, object, dict[str, str]]]


def make(home: Path, model: Path, clusters: Mapping[str, str], *options: str) -> Made:
    """Run the tiny pipeline; (kind, info, sha256 of every file) of what its wide steps made, by key."""
    home.mkdir()
    file = home / "pipelines.yaml"
    tiny = (
        usual("tiny", model, to="acceptance")
        .with_setting("prompts", num_train=32, num_validation=8, num_test=12, num_warm_up=2)
        .with_setting("answers", max_new_tokens=24, batch_size=4, shard_size=4, sampled_share=0.5)
        .with_setting("draft", method="mtp", num_steps=12, draft_vocab_size=128)
        .with_setting("acceptance", max_new_tokens=16, batch_size=3)
    )
    for name, cluster in clusters.items():
        tiny = tiny.with_step_keys(name, {"runs_on": {"cluster": cluster, "workers": 2}})
    file.write_text(tiny.text)
    done = tiny_pipeline.draftsmith(home, "run", "tiny", "-f", str(file), *options)
    assert done.returncode == 0, done.stderr
    artifacts = tiny_pipeline.artifacts(home).values()
    elsewhere = {a["record"]["step"] for a in artifacts if a["record"]["runs_on"] != "here"}
    assert elsewhere == clusters.keys()
    return {
        a["key"]: (a["kind"], a["info"], {name: facts["sha256"] for name, facts in a["files"].items()})
        for a in artifacts
        if a["record"]["step"] in WIDE_STEPS
    }


def test_the_wide_steps_give_the_same_keys_and_bytes(tmp_path: Path) -> None:
    model = make_tiny_target("qwen3", tmp_path / "model")
    made_here = make(tmp_path / "here", model, {}, "--direct")
    assert len(made_here) == 3
    assert sum(len(files) for _, _, files in made_here.values()) > 20
    assert make(tmp_path / "there", model, WIDE_STEPS) == made_here


def test_a_cluster_that_is_there_carries_the_shards_and_stays(
    address: str, cluster: str, weed: Callable[..., subprocess.Popen[str]], store: Store
) -> None:
    process = weed(5, 0.0, address=address)
    said, _ = process.communicate(timeout=1500)
    assert process.returncode == 0, said
    assert beds(store) == {f"bed-{number}.txt": f"{number} of 5\n" for number in range(1, 6)}
    assert store.record_of(store.keys()[0])["record"]["runs_on"] == f"{cluster}, {address}"
    until_it_listens(int(address.rsplit(":", 1)[1]))


@pytest.mark.parametrize("cluster", ["ray"], indirect=True)
def test_a_server_that_rays_head_loses_at_the_first_knock_costs_a_second_knock(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, weed: Callable[..., subprocess.Popen[str]]
) -> None:
    """Ray's head forks a server for every client and now and then loses it at birth; here it is killed at birth."""
    monkeypatch.setenv("RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S", "20")  # the head says so after that,
    monkeypatch.setenv("RAY_CLIENT_RECONNECT_GRACE_PERIOD", "1")  # the client hears of it after that; both take 30 s
    address = request.getfixturevalue("address")
    process = weed(5, 0.0, address=address)
    lost = server_of_the_head(process, unlike=0)
    lost.kill()
    server_of_the_head(process, unlike=lost.pid)
    said, _ = process.communicate(timeout=1500)
    assert process.returncode == 0, said


@pytest.mark.parametrize("cluster", ["ray"], indirect=True)
def test_a_shard_sees_the_gpus_that_are_set_aside_for_it(
    address: str, weed: Callable[..., subprocess.Popen[str]], store: Store
) -> None:
    """The cluster says that it has two; no shard of this step uses one."""
    process = weed(5, 0.0, address=address, gpus_per_shard=1)
    said, _ = process.communicate(timeout=1500)
    assert process.returncode == 0, said
    (key,) = store.keys()
    seen = [file.read_text() for file in store.path_of(key).glob("bed-*.gpus")]
    assert len(seen) == 5 and {*seen} <= {"0", "1"}
    process = weed(6, 0.0, address=address, gpus_per_shard=3)
    said, _ = process.communicate(timeout=1500)
    assert process.returncode == 2
    assert "gpus_per_shard: 3, and no machine of the cluster has more than 2 GPUs; set gpus_per_shard" in said


def server_of_the_head(process: subprocess.Popen[str], unlike: int) -> psutil.Process:
    """The server that Ray's head keeps for a client, once there is another than the one with that pid."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        for one in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if one.pid != unlike and "--mode=specific-server" in one.cmdline():
                    return one
        time.sleep(0.02)
    raise AssertionError(f"no server: {process.communicate()[0] if process.poll() is not None else 'late'}")


def test_a_worker_killed_half_way_costs_nothing(
    weed: Callable[..., subprocess.Popen[str]], store: Store, cluster: str
) -> None:
    process = weed(12, 0.5)
    worker = psutil.Process(worker_of_a_bed(store, process))
    assert worker.nice() == psutil.Process(process.pid).nice(), "it waits for nothing else that the machine does"
    worker.kill()
    said, _ = process.communicate(timeout=1500)
    assert process.returncode == 0, said
    assert beds(store) == {f"bed-{number}.txt": f"{number} of 12\n" for number in range(1, 13)}
    assert store.record_of(store.keys()[0])["record"]["runs_on"] == f"{cluster}, 2 workers here"


def test_a_shard_that_kills_its_workers_is_told_in_one_line_and_the_rest_is_kept(
    weed: Callable[..., subprocess.Popen[str]], store: Store, cluster: str
) -> None:
    process = weed(3, 0.0, "die")
    said, _ = process.communicate(timeout=1500)
    assert process.returncode == 1, said
    assert len([line for line in said.splitlines() if f"shard 3 of 3 on {cluster}: " in line]) == 1, said
    assert "Traceback" not in said
    kept = {file.name: file.stat().st_mtime_ns for file in (store.home / "partial").glob("*/bed-*")}
    assert sorted(kept) == ["bed-1.txt", "bed-2.txt"]
    process = weed(3, 0.0, "die")
    said, _ = process.communicate(timeout=1500)
    assert process.returncode == 0, said
    (key,) = store.keys()
    assert {name: (store.path_of(key) / name).stat().st_mtime_ns for name in kept} == kept


def test_a_wrong_input_found_by_a_worker_costs_one_line(weed: Callable[..., subprocess.Popen[str]]) -> None:
    process = weed(3, 0.0, "wrong")
    said, _ = process.communicate(timeout=1500)
    assert process.returncode == 2, said
    assert "step 'only': no spade: buy one (docs: first-pipeline)" in said.splitlines()
    assert "Traceback" not in said


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["cancelled", "killed"])
def test_no_process_of_a_cluster_outlives_its_run(
    how: signal.Signals, weed: Callable[..., subprocess.Popen[str]], store: Store
) -> None:
    process = weed(200, 0.5)
    worker = worker_of_a_bed(store, process)
    below = tree_of(process)
    assert worker in [child.pid for child in below]
    process.send_signal(how)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == {signal.SIGTERM: 130, signal.SIGKILL: -9}[how], said
    assert [child for child in below if not gone(child.pid, within=15)] == []
