"""`draftsmith remeasure`: nothing is made anew but measurements and what decides by them, and the newest decide."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pipeline_builder import Pipeline, pipeline, step
from toy_garden import LIGHT, PACKAGES

from components.contract import UserError
from components.speedup.comparison.promotion_rule import judge
from flows.commands.remeasure import plan_remeasurement, run_remeasurement
from flows.execution.local_run import execute
from flows.planning.plan import RunOptions, plan_run
from storage import journal
from storage.artifacts.store import Store
from storage.history.query import query
from storage.registry import versions as model_versions
from storage.registry.aliases import aliases_of
from storage.registry.fact_tags import as_tags
from storage.registry.registry import promote
from storage.registry.tracking import open_client

NAME = "toy"
MARKET = pipeline(
    "market",
    {"steps": {"type": "int", "default": 6, "min": 1}},
    corpus=step("toys.plant"),
    draft=step("toys.grow", "corpus", num_steps="${params.steps}"),
    timed=step("toys.clock", "draft"),
    verdict=step("toys.settle", "timed"),
    release=step("toys.sell", "draft", {"policy": "verdict", "end_to_end": "timed"}),
    sown=step("toys.judge", "draft", "corpus"),
)
Cli = Callable[..., tuple[int, str, str]]


class Market:
    """A pipeline whose drafter is as fast as a file says, in its own home."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.speed, self.file, self.home = folder / "speed", folder / "pipelines.yaml", home
        self.write(MARKET)

    @property
    def options(self) -> RunOptions:
        return RunOptions(file=self.file, home=self.home, device="cpu", packages=PACKAGES)

    def write(self, market: Pipeline) -> None:
        self.file.write_text(market.with_setting("timed", source=str(self.speed)).text)

    def run(self, speed: float, **params: object) -> str:
        """Run the whole pipeline on a machine that is so fast; the key of the release."""
        self.speed.write_text(str(speed))
        return execute(*plan_run("market", params, self.options), how="direct").artifacts["release"].key

    def again(self, speed: float, said: str = NAME) -> Any:
        """Measure a release again on a machine that is so fast."""
        self.speed.write_text(str(speed))
        return run_remeasurement(plan_remeasurement(said, self.options), lambda *_: None)

    def made(self) -> dict[str, list[str]]:
        """Step -> the sessions of what it has made, the newest first."""
        store = Store(self.home)
        return {
            store.record_of(key)["record"]["step"]: [session.name for session in store.sessions(key)]
            for key in store.keys()  # noqa: SIM118
        }

    def aliases(self) -> dict[str, int]:
        return aliases_of(open_client(self.home), NAME)


@pytest.fixture
def market(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Market:
    def register_only(home: Path, release: Path, facts: Any, run: str | None, code: Path) -> int:
        client = open_client(home)
        if not client.search_registered_models(f"name = '{facts.name}'"):
            client.create_registered_model(facts.name)
        return int(client.create_model_version(facts.name, str(release), tags=as_tags(facts.tags)).version)

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(model_versions, "log_version", register_only)
    monkeypatch.setattr(
        "flows.execution.engine.Engine.__init__.__kwdefaults__", {"run_id": "", "num_threads": 1, "preload": ()}
    )
    return Market(tmp_path, home)


def test_a_release_that_a_noisy_hour_refused_is_promoted_by_what_a_quiet_one_measures(
    market: Market, draftsmith: Cli
) -> None:
    key = market.run(0.9)
    first = market.made()
    assert "champion" not in market.aliases()
    code, _, err = draftsmith("promote", NAME)
    assert code == 2 and "the gate refuses: " in err and "measured" in err
    market.speed.write_text("1.05")
    code, out, err = draftsmith("remeasure", NAME, "-f", market.file)
    assert (code, err) == (0, ""), err
    assert "3 steps to measure and decide again, 1 inputs as they were" in out
    assert "fern at depth 3: 0.90x, own gate refused" in out and "fern at depth 3: 1.05x, own gate refused" in out
    assert draftsmith("promote", NAME)[0] == 2 and "champion" not in market.aliases()
    assert draftsmith("remeasure", key[:9], "-f", market.file)[0] == 0
    market.speed.write_text("1.3")
    code, out, err = draftsmith("remeasure", f"{NAME}@1", "-f", market.file)
    assert (code, err) == (0, "") and f"newer evidence for {NAME} version 1 (" in out
    assert market.aliases() == {"candidate": 1, "challenger": 1, "champion": 1}
    assert "champion already" in draftsmith("promote", NAME)[1]
    now = market.made()
    for name in ("corpus", "draft", "sown"):
        assert now[name] == first[name], f"{name} was made again"
    for name in ("timed", "verdict", "release"):
        assert len(now[name]) == 4 and now[name][-1:] == first[name], f"{name} has lost a session"
    values = "SELECT value FROM {} WHERE code = 'speed' ORDER BY created_at"
    assert query(values.format("quality_flag"), market.home)[1] == [(0.9,), (1.05,), (1.05,), (1.3,)]
    assert query(values.format("v_flags"), market.home)[1] == [(1.3,)]
    assert len(query(values.format("v_flags"), market.home, all_sessions=True)[1]) == 4
    log = [row for row in journal.promotions(market.home) if row.action == "evidence"]
    before = [json.loads(json.loads(row.numbers)["before"])["draftsmith.speedup_meas"] for row in log]
    assert before == ["0.9", "1.05", "1.05"] and "gate failed -> passed" in log[-1].why
    told = query("SELECT how, num_executed, num_reused, status FROM run ORDER BY started_at", market.home)[1]
    assert told == [("direct", 6, 0, "completed"), *[("remeasure", 3, 1, "completed")] * 3]
    shown = draftsmith("show", key[:9])[1]
    assert all(session in shown for session in now["release"][1:]) and "evidence" in draftsmith("show", NAME)[1]
    record = Store(market.home).record_of(key)["record"]
    assert record["input_sessions"][record["inputs"]["policy"]] == now["verdict"][0], "it says of which session it is"


def test_what_stands_before_the_measurements_is_taken_as_it_was_whatever_has_changed_since(market: Market) -> None:
    key = market.run(0.9)
    market.write(MARKET.with_setting("corpus", num_rows=3).with_param("steps", default=9))
    newer = market.run(0.8)
    assert newer != key
    before = market.made()
    outcome = market.again(1.2, key)
    assert outcome.artifacts["release"].key == key and outcome.registered[0].version == 1
    assert set(market.made()["draft"]) == set(before["draft"]), "nothing was trained"
    assert [step.name for step in outcome.plan.steps] == ["draft", "timed", "verdict", "release"]
    again = market.again(1.4, key)
    assert again.artifacts["release"].key == key and len(Store(market.home).sessions(key)) == 3
    assert market.aliases()["champion"] == 1 and market.aliases()["challenger"] == 2


def test_an_alias_that_has_moved_since_names_what_it_named_then(market: Market) -> None:
    drafted = Store(market.home).record_of(market.run(1.2))["info"]["draft_key"]
    champion = MARKET.with_setting("timed", reps=2)
    for name in ("timed", "release", "sown"):
        champion = champion.with_inputs(name, draft=f"registry:{NAME}@champion")
    market.write(champion)
    key = market.run(1.3)
    market.write(MARKET)
    other = Store(market.home).record_of(market.run(2.0, steps=9))["info"]["draft_key"]
    promote(market.home, NAME, 3, "it was measured elsewhere", force=True, judge=judge)
    market.write(champion)
    plan, _ = plan_run("market", {}, market.options)
    assert plan.step("timed").parts["inputs"]["draft"] == other != drafted
    outcome = market.again(1.4, key)
    assert outcome.artifacts["release"].key == key and outcome.artifacts["release"].info["draft_key"] == drafted


def test_measured_with_other_settings_it_is_a_release_of_its_own_and_says_so(market: Market) -> None:
    key = market.run(0.9)
    market.write(MARKET.with_setting("timed", reps=3))
    again = plan_remeasurement(key, market.options)
    assert again.notes == (
        "it becomes a release of its own, since step 'timed' is not what it was: setting reps 1 -> 3",
    )
    outcome = market.again(1.3, key)
    assert outcome.artifacts["release"].key != key and outcome.registered[0].version == 2
    assert len(Store(market.home).keys()) == 9 and {len(sessions) for sessions in market.made().values()} == {1}


def test_what_is_gone_or_is_no_release_costs_one_line_that_says_what_to_do(market: Market, draftsmith: Cli) -> None:
    key = market.run(0.9)
    store = Store(market.home)
    draft = str(store.record_of(key)["info"]["draft_key"])

    def refused(said: str) -> str:
        code, _, err = draftsmith("remeasure", said, "-f", market.file)
        assert code == 2 and len(err.splitlines()) == 1, err
        return err

    assert "is a Draft, not a Release" in refused(draft[:9])
    assert "no artifact in" in refused("ffff")
    assert "toy has no champion: the gate refused version 1; `draftsmith remeasure toy@1`" in refused(
        f"{NAME}@champion"
    )
    market.write(MARKET.with_step_named("release", "sold"))
    assert "pipeline 'market' has no step 'release' any more; `draftsmith run market`" in refused(key)
    market.write(replace(MARKET, name="bazaar"))
    assert "its pipeline is not what it was" in refused(key) and "bazaar" in refused(key)
    market.write(MARKET)
    shutil.move(store.path_of(draft), market.home / "aside")
    assert "step 'draft' would have to run" in refused(key) and "`draftsmith run market`" in refused(key)
    shutil.move(market.home / "aside", store.path_of(draft))
    (market.home / "runs").rename(market.home / "forgotten")
    assert "is gone: what that run was made of is not known any more" in refused(key)


def test_a_measurement_that_fails_leaves_everything_as_it_was(market: Market) -> None:
    market.run(1.2)
    made, log = market.made(), (market.home / "promotions.jsonl").read_bytes()
    market.speed.write_text("")
    with pytest.raises(UserError, match="the clock has stopped"):
        run_remeasurement(plan_remeasurement(NAME, market.options), lambda *_: None)
    assert market.made() == made and (market.home / "promotions.jsonl").read_bytes() == log
    assert query("SELECT value FROM v_flags", market.home)[1] == [(1.2,)]


MEASURING = f"""{LIGHT}from flows.planning.plan import RunOptions, plan_run
options = RunOptions(file=Path(sys.argv[1]), device='cpu', packages={PACKAGES!r}, force=('timed',), to_step='release')
while True:
    plan, store = plan_run('market', {{}}, options)
    flows.execution.engine.Engine(store, plan).run()
    print(*(store.sessions(step.key)[0].name for step in plan.steps), flush=True)
"""


@pytest.mark.parametrize("lines", [1, 3, 5])
def test_killed_while_it_measures_again_and_again_nothing_that_was_measured_is_lost(
    lines: int, market: Market, start: Callable[..., Any]
) -> None:
    market.speed.write_text("1.2")
    process = start(MEASURING, market.file)
    said = [process.stdout.readline().split() for _ in range(lines)]
    time.sleep(0.03 * lines)
    process.send_signal(signal.SIGKILL)
    said += [line.split() for line in process.communicate()[0].splitlines()]
    assert all(len(names) == 5 for names in said)
    store = Store(market.home)
    store.settle_all()
    kept = {session for sessions in market.made().values() for session in sessions}
    assert {name for names in said for name in names} <= kept
    for key in store.keys():  # noqa: SIM118
        assert store.verify_local(key).artifact is not None
        for session in store.sessions(key):
            assert store.verify_local(store.name_of_session(key, session.name)).artifact is not None
    market.run(1.3)
    assert kept <= {session for sessions in market.made().values() for session in sessions}
    assert len(query("FROM quality_flag", market.home)[1]) == len(market.made()["timed"]), "each is in the history"


def test_forcing_a_step_adds_a_session_as_well(market: Market) -> None:
    market.run(1.2)
    market.speed.write_text("1.3")
    execute(*plan_run("market", {}, replace(market.options, force=("timed",))), how="direct")
    assert [len(market.made()[step]) for step in ("draft", "timed", "verdict", "release")] == [1, 2, 2, 2]
    assert query("SELECT value FROM quality_flag ORDER BY 1", market.home)[1] == [(1.2,), (1.3,)]
    plan, _ = plan_run("market", {}, market.options)
    assert plan.num_reused == len(plan.steps)
