"""A rehearsal runs every step of a pipeline small, finds every fault in one go, and leaves nothing behind."""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path

import pytest
from pipeline_builder import Pipeline, pipeline, step, written
from tiny_families import family_config
from tiny_pipeline import NUM_STEPS, main_job
from tiny_targets import make_tiny_tokenizer
from toy_garden import Cli

from flows.planning.this_machine import open_machine_lock

pytestmark = pytest.mark.usefixtures("fresh_fork_server")  # which loads what steps import, once for them all

ONLY_QUESTIONS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


def model_without_weights(folder: Path, **changes: object) -> Path:
    """A target of usual widths as a configuration and a tokenizer."""
    folder.mkdir()
    make_tiny_tokenizer(folder)
    config = {**family_config("qwen3").to_dict(), "hidden_size": 2048, "num_attention_heads": 16, **changes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def talk_about(number: int) -> list[dict[str, str]]:
    """A turn and its answer."""
    return [
        {"role": "user", "content": f"Say {number} trees."},
        {"role": "assistant", "content": f"{number} trees " * 9},
    ]


def rehearse(draftsmith: Cli, made: Pipeline, folder: Path) -> tuple[int, str, dict[str, str]]:
    """The exit code of a rehearsal, all that it printed, and the state of each step with the reason."""
    file = folder / "pipelines.yaml"
    file.write_text(made.text, encoding="utf-8")
    code, out, err = draftsmith("rehearse", made.name, "-f", file)
    lines = (
        re.fullmatch(r"(\S+) +(passed|failed|not reached|left out) +(?:\d+\.\d s)?(.*)", line)
        for line in out.splitlines()
    )
    return code, out + err, {found[1]: f"{found[2]}: {found[3].strip()}" for found in lines if found}


def test_a_pipeline_over_a_model_without_weights_is_rehearsed_whole_beside_what_measures_and_leaves_nothing(
    draftsmith: Cli, home: Path, tmp_path: Path
) -> None:
    upload = step("publish.upload_release", "release", repo="nobody/nothing")
    served = step(
        "data.features_from_server", {"target": "target", "answers": "answers"},
        base_url="http://far.example:8001", folder="/far/states",
    )  # fmt: skip
    made = main_job(model_without_weights(tmp_path / "model")).with_steps(upload=upload, served=served)
    lock = open_machine_lock()
    fcntl.flock(lock, fcntl.LOCK_EX)
    code, out, states = rehearse(draftsmith, made, tmp_path)
    os.close(lock)
    assert code == 0, out
    assert sum(state.startswith("passed") for state in states.values()) == NUM_STEPS + 2, out
    assert states["release.reopened"] == "passed: eagle3: same, mtp: same"
    assert states["served"] == "passed: "
    assert states["upload"] == "left out: not rehearsed: it would upload"
    assert "stand-in" in states["target"]
    assert not [path for path in home.rglob("*") if path.is_file() and "logs" not in path.parts]


def test_a_night_is_rehearsed_with_the_champion_which_stays_and_nothing_of_it_is_kept(
    draftsmith: Cli, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    file, speed = tmp_path / "pipelines.yaml", tmp_path / "speed"
    speed.write_text("1.5", encoding="utf-8")
    market = pipeline(
        "market",
        corpus=step("toys.plant"),
        draft=step("toys.grow", "corpus"),
        timed=step("toys.clock", "draft", source=str(speed)),
        verdict=step("toys.settle", "timed"),
        release=step("toys.sell", "draft", {"policy": "verdict", "end_to_end": "timed"}),
    )
    judged = step("toys.judge", "corpus", {"draft": "registry:toy@champion"})
    night = pipeline("nightly", **market.with_setting("corpus", num_rows=4).with_steps(judged=judged).steps)
    file.write_text(written(market, night), encoding="utf-8")
    code, out, err = draftsmith("run", "market", "--direct", "-f", file)
    assert code == 0 and "toy version 1 (candidate, challenger, champion)" in out, out + err

    def kept() -> dict[Path, bytes]:
        places = [
            home / "promotions.jsonl",
            *(p for of in ("store", "runs", "history") for p in (home / of).rglob("*")),
        ]
        return {path: path.read_bytes() for path in places if path.is_file()}

    before = kept()
    code, out, err = draftsmith("night", "--rehearse", "-f", file)
    assert code == 0 and "nightly: 6 of 6 steps passed" in out, out + err
    assert kept() == before and not list((home / "rehearsals").iterdir())


def test_one_rehearsal_finds_every_fault_that_would_come_up_later(draftsmith: Cli, home: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"promt": "Say something about trees."}\n' * 40, encoding="utf-8")
    chats, roles, torn = tmp_path / "chats.jsonl", tmp_path / "roles.jsonl", tmp_path / "torn.parquet"
    chats.write_text(
        "".join(f"{json.dumps({'messages': talk_about(number)})}\n" for number in range(400)), encoding="utf-8"
    )
    roles.write_text('{"messages": [{"speaker": "me", "words": "Say trees."}]}\n' * 40, encoding="utf-8")
    torn.write_bytes(b"PAR1 and no more")

    def model(name: str, **changes: object) -> str:
        return str(model_without_weights(tmp_path / name, **changes))

    def of_a_template(name: str, template: str) -> str:
        settings = Path(model(name)) / "tokenizer_config.json"
        said = json.loads(settings.read_text(encoding="utf-8"))
        settings.write_text(json.dumps({**said, "chat_template": template}), encoding="utf-8")
        return str(settings.parent)

    answered, learned = {"target": "target", "answers": "answers"}, {"target": "target", "features": "features"}
    made = pipeline(
        "faulty",
        target=step("targets.load_target", model=model("sound")),
        prompts=step("data.collect_prompts", source="python-stdlib", num_train=4000, num_test=64),
        answers=step("data.write_answers", "target", "prompts", max_new_tokens=2048),
        features=step("data.record_features", answered),
        taps_beyond=step("data.record_features", answered, tap_layers=[2, 4, 99]),
        after_taps=step("drafts.train_draft", {"target": "target", "features": "taps_beyond"}),
        misnamed=step("data.collect_prompts", source=str(rows)),
        no_key=step(
            "data.write_answers_by_server", "target", "prompts",
            base_url="http://far.example:8000", api_key_variable="NO_SUCH_VARIABLE",
        ),
        shallow=step("targets.load_target", model=model("shallow", num_hidden_layers=2, layer_types=None)),
        wrong_end=step("targets.load_target", model=model("wrong_end", eos_token_id=10**6)),
        unknown=step("targets.load_target", model=model("unknown", model_type="nobody")),
        heads=step("targets.load_target", model=model("heads", num_key_value_heads=3)),
        short=step("targets.load_target", model=model("short", max_position_embeddings=48)),
        short_answers=step("data.write_answers", "prompts", {"target": "short"}, max_new_tokens=2048),
        draft=step("drafts.train_draft", learned, method="eagle3"),
        narrower=step("targets.load_target", model=model("narrower", hidden_size=1024)),
        of_others=step("drafts.train_draft", {"target": "narrower", "features": "features"}, method="eagle3"),
        for_others=step("bench.measure_acceptance", "draft", "prompts", {"target": "narrower"}),
        torn=step("data.collect_prompts", source=str(torn)),
        roles=step("data.collect_chats", sources=[{"path": str(roles), "name": "mine"}]),
        chats=step("data.collect_chats", sources=[{"path": str(chats), "name": "mine"}]),
        talks=step("data.mix_chats", "chats"),
        raising=step("targets.load_target", model=of_a_template("raising", "{{ raise_exception('no systems') }}")),
        refused=step("data.write_answers", {"target": "raising", "prompts": "talks"}),
        hiding=step("targets.load_target", model=of_a_template("hiding", ONLY_QUESTIONS)),
        unmasked=step("data.write_given_answers", {"target": "hiding", "prompts": "talks"}),
        few_tokens=step("targets.load_target", model=model("few_tokens", vocab_size=10)),
        foreign=step("data.write_answers", {"target": "few_tokens", "prompts": "talks"}),
        twisted=step("targets.load_target", model=model("twisted", rope_scaling={"rope_type": "nonsense"})),
        no_drafter=step("drafts.import_draft", "target", model=str(tmp_path)),
    )  # fmt: skip
    code, out, states = rehearse(draftsmith, made, tmp_path)
    faults = {
        "taps_beyond": "the target has 8 layers",
        "misnamed": "promt",
        "no_key": "NO_SUCH_VARIABLE",
        "shallow": "2 layers",
        "wrong_end": "eos_token_id",
        "unknown": "nobody",
        "heads": "do not go together",
        "short_answers": "no prompt has at most",
        "of_others": "wire both from one step",
        "for_others": "trained for a target of hidden_size",
        "torn": "not readable as Parquet",
        "roles": "unknown role",
        "refused": "chat template refuses",
        "unmasked": "by its chat template no assistant's tokens can be told",
        "foreign": "another model's",
        "twisted": "nonsense",
        "no_drafter": "no config.json in it",
    }
    for name, words in faults.items():
        assert states.get(name, "").startswith("failed") and words in states[name], out
    assert states.pop("after_taps") == "not reached: it needs 'taps_beyond'"
    assert all(states[name].startswith("passed") for name in states.keys() - faults.keys()), out
    assert code == 1


def test_data_that_are_elsewhere_are_stood_for_and_that_is_said(draftsmith: Cli, home: Path, tmp_path: Path) -> None:
    sources = ["ultrachat", {"path": "s3://bucket/chats", "name": "archive"}]
    made = pipeline(
        "elsewhere",
        chats=step("data.collect_chats", sources=sources),
        benchmarks=step("data.collect_workloads", sources=["mt-bench"]),
        kept=step("data.deduplicate", {"chats": "chats", "keep_out": "benchmarks"}),
        prompts=step("data.collect_prompts", source="hf:nobody/nothing:train", keep_out="hf:nobody/test:test"),
    )
    code, out, states = rehearse(draftsmith, made, tmp_path)
    assert code == 0, out
    assert [name for name, state in states.items() if "--online tries" in state] == ["chats", "benchmarks", "prompts"]
