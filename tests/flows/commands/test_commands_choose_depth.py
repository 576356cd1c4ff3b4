"""`draftsmith choose-depth`: rows from anywhere, one answer; a wrong row is one line that says where."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

Run = Callable[..., tuple[int, str, str]]

TABLE = """k,al,t_target,t_verify,t_draft
0,,76,,
1,1.80,,90,8
2,2.392,,104,14
3,2.78864,,117,22
"""
COSTS = [{"k": 0, "t_target": 76.0}] + [
    {"k": k, "t_verify": verify, "t_draft": draft} for k, verify, draft in ((1, 90, 8), (2, 104, 14), (3, 117, 22))
]


def chosen(run: Run, *files: Path, options: tuple[str, ...] = ()) -> dict[str, Any]:
    code, out, err = run("choose-depth", *files, "--json", "--draws", 400, *options)
    assert (code, err) == (0, "")
    answer: dict[str, Any] = json.loads(out)
    return answer


def test_the_worked_example_gives_depth_two(draftsmith: Run, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(TABLE)
    policy = chosen(draftsmith, file)
    assert [round(e["al"], 2) for e in policy["evals"]] == [1.0, 1.80, 2.39, 2.79]
    assert [round(e["speedup_pred"], 2) for e in policy["evals"]] == [1.0, 1.40, 1.54, 1.52]
    assert policy["winner"]["depth_k"] == 2 and policy["verdict"] == "undecided"  # one figure has no interval
    assert [f["code"] for f in policy["flags"]] == ["no_interval"]
    code, out, _ = draftsmith("choose-depth", file)
    assert code == 0
    for words in (
        "undecided: the best candidate is depth 2",
        "2 (chosen)",
        "3 (usual on CPUs)",
        "--spec-draft-n-max 2",
        "no_interval",
    ):
        assert words in out
    assert "[1.5" not in out  # no interval is pretended


def test_every_format_and_form_of_the_same_numbers_agrees(draftsmith: Run, tmp_path: Path) -> None:
    """Maps, counts by prompt, and vLLM's counters of the same rounds; JSON, JSON lines, CSV and Parquet."""
    from components.speedup.prediction.replay import count

    accepted = [
        [3, 2, 1, 0, 0, 3, 2, 1, 1, 0] * 6,
        [1, 0, 2, 1, 0, 3, 3, 2, 1, 0] * 6,
        [0, 3, 2, 1, 0, 1, 0, 1, 0, 2] * 6,
    ]
    maps = [{"prompt": f"p{i}", "accepted": row, "k_max": 3} for i, row in enumerate(accepted)]
    counts = [
        {"prompt": f"p{i}", "k": k, "tokens": found.tokens, "rounds": found.rounds}
        for i, row in enumerate(accepted)
        for k in (1, 2, 3)
        for found in [count(row, k)]
    ]
    (tmp_path / "maps.json").write_text(json.dumps({"rows": maps}))
    (tmp_path / "counts.jsonl").write_text("\n".join(map(json.dumps, counts)) + "\n\n")
    columns = {name: [row.get(name) for row in COSTS] for name in ("k", "t_target", "t_verify", "t_draft")}
    pq.write_table(pa.table(columns), tmp_path / "costs.parquet")
    lines = [",".join(("prompt", "accepted", "k_max")), *(f'{m["prompt"]},"{m["accepted"]}",3' for m in maps)]
    (tmp_path / "maps.csv").write_text("\n".join(lines))
    costs = tmp_path / "costs.parquet"
    found = [chosen(draftsmith, tmp_path / name, costs) for name in ("maps.json", "counts.jsonl", "maps.csv")]
    assert found[0] == found[1] == found[2]
    assert found[0]["evals"][3]["pred_lo"] < found[0]["evals"][3]["pred_hi"]
    assert {f["code"] for f in found[0]["flags"]} >= {"few_prompts", "few_rounds"}


def test_counters_of_one_deep_run_serve_shallower_depths_with_a_warning(draftsmith: Run, tmp_path: Path) -> None:
    """vLLM's counters of issue 26191's kind: 3 positions of 1,000 rounds, and its own row for depth 1."""
    rows = [
        {"k": 3, "num_drafts": 1000, "accepted_per_pos": [800, 592, 397]},
        {"k": 1, "num_drafts": 1000, "accepted_per_pos": [820]},
    ]
    (tmp_path / "rows.json").write_text(json.dumps([*rows, *COSTS]))
    policy = chosen(draftsmith, tmp_path / "rows.json")
    assert [e["al"] for e in policy["evals"]] == pytest.approx([1.0, 1.82, 2.392, 2.789])
    assert "prefix_of_deeper_run" in {f["code"] for f in policy["flags"]}
    (tmp_path / "rows.json").write_text(json.dumps([rows[1], *COSTS]))
    only = chosen(draftsmith, tmp_path / "rows.json")
    assert "prefix_of_deeper_run" not in {f["code"] for f in only["flags"]} and len(only["evals"]) == 2


def test_workloads_batches_drafters_and_a_mixture(draftsmith: Run, tmp_path: Path) -> None:
    lengths = {"code": (1.9, 2.7, 3.4), "chat": (1.5, 1.75, 1.85)}
    rows: list[dict[str, Any]] = [
        {"drafter": "eagle3", "draft_vocab": vocab, "workload": name, "k": k, "al": al - 0.01 * (vocab == 32000)}
        for vocab in (32000, 128000)
        for name, values in lengths.items()
        for k, al in enumerate(values, 1)
    ]
    for batch_size, scale in ((1, 0.5), (16, 6.0)):
        for vocab in (32000, 128000):
            shared = {"drafter": "eagle3", "draft_vocab": vocab, "batch_size": batch_size}
            rows += [{**shared, "k": 0, "t_target": 10.0}]
            rows += [{**shared, "k": k, "t_verify": 10 + scale * k, "t_draft": 0.6 * k} for k in (1, 2, 3)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    policy = chosen(draftsmith, tmp_path / "rows.json", options=("--mixture", "code=0.3,chat=0.7"))
    depths = {(c["draft_key"][-6:], c["workload"], c["batch_size"]): c["depth_k"] for c in policy["choices"]}
    assert depths["128000", "chat", 1] <= depths["128000", "mixture", 1] <= depths["128000", "code", 1] == 3
    assert depths["128000", "mixture", 16] < depths["128000", "mixture", 1]
    top = next(c for c in policy["ranking"] if c["chosen"])
    assert top["draft_vocab"] == 32000  # as good within 1 %, and smaller
    ranges = policy["engines"]["vllm"]["speculative_config"]["num_speculative_tokens_per_batch_size"]
    assert [(first, last) for first, last, _ in ranges] == [(1, 1), (2, 16)]
    assert all(m["stated"] and m["shares"] == {"chat": 0.7, "code": 0.3} for m in policy["mixtures"])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("r.csv", "k,al,t_verfy\n1,1.8,3\n", "r.csv:2: unknown column t_verfy; did you mean t_verify?"),
        ("r.csv", "k,al\n1,9\n", "r.csv:2: al is 9, at depth 1 a round keeps at most 2 tokens"),
        ("r.csv", "k,al\n1,soon\n", "r.csv:2: al: "),
        ("r.csv", "k,al\n1,1.5,3\n", "r.csv:2: 3 cells under a head of 2 columns"),
        ("r.jsonl", '{"k": 1, "al": 1.5}\n{"k": 1\n', "r.jsonl"),
        ("r.jsonl", '{"al": 1.5}\n', "r.jsonl:1: k is missing"),
        ("r.jsonl", '{"k": 1, "al": NaN}\n', "r.jsonl:1: says nothing about acceptance"),
        ("r.jsonl", '{"k": 1, "al": Infinity}\n', "r.jsonl:1: al: "),
        ("r.jsonl", "[1]\n", "r.jsonl:1: a row is an object of columns"),
        ("r.json", '{"k": 1}', "expected a list of rows"),
        ("r.json", "[]", "no rows"),
        ("r.json", '[{"workload": "code"}]', "row 1: says nothing about acceptance"),
        ("r.json", '[{"k": 2, "num_drafts": 9, "accepted_per_pos": [4, 5]}]', "position 2 was kept 5 times"),
        ("r.json", '[{"k": 2, "num_drafts": 9, "accepted_per_pos": [4]}]', "accepted_per_pos has 1 positions, k is 2"),
        ("r.json", '[{"k": 2, "tokens": 50, "rounds": 9}]', "9 rounds of depth 2 keep 9 to 27 tokens"),
        ("r.json", '[{"k": 2, "tokens": 5, "rounds": 2, "al": 2.5}]', "acceptance told twice"),
        ("r.json", '[{"accepted": [1, 2]}]', "name the prompt"),
        ("r.json", '[{"k": 1, "t_verify": 5}]', "t_verify and t_draft belong together"),
        ("r.json", '[{"k": 1, "al": 1.5}]', "no cost"),
        ("r.json", '[{"k": 1, "al": 1.5, "tpot": 3}]', "add a row with k = 0 and its tpot"),
        ("r.json", '[{"k": 1, "t_verify": 5, "t_draft": 1, "t_target": 4}]', "no row tells of acceptance"),
        ("r.json", '[{"k": 1, "al": 1.5, "t_verify": 5, "t_draft": 1}]', "target_step cells missing"),
        ("r.json", '[{"k": 1, "al": 1.5}, {"k": 2, "t_verify": 5, "t_draft": 1, "t_target": 4}]', "no depth has both"),
        ("r.xlsx", "", "rows come as .json, .jsonl, .csv"),
        ("r.txt", "", "no rows"),
        ("r.parquet", "PAR", "cannot be read"),
    ],
)
def test_a_wrong_row_is_one_line(name: str, text: str, said: str, draftsmith: Run, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    code, out, err = draftsmith("choose-depth", file)
    assert (code, out) == (2, "")
    assert said in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("mixture", ["code", "code=much", "=1", "poems=1"])
def test_a_wrong_mixture_is_one_line(mixture: str, draftsmith: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(TABLE)
    code, _, err = draftsmith("choose-depth", tmp_path / "rows.csv", "--mixture", mixture)
    assert code == 2 and "mixture" in err and len(err.strip().splitlines()) == 1
    assert draftsmith("choose-depth", tmp_path / "nothing.csv")[0] == 2


def test_it_starts_without_anything_heavy(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(TABLE)
    program = (
        "import sys; from flows.cli import main\n"
        f"assert main(['choose-depth', {str(tmp_path / 'rows.csv')!r}]) == 0\n"
        "heavy = ('torch', 'transformers', 'datasets', 'prefect', 'mlflow', 'duckdb', 'pyarrow')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


ARTICLE = "k,p,t_target,t_verify,t_draft\n1,0.80,76,90,8\n2,0.74,76,104,14\n3,0.67,76,117,22\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", ARTICLE.encode()),
        ("rows.csv", ARTICLE.replace(",", ";").replace(".", ",").encode("utf-16")),
        ("rows.tsv", ARTICLE.replace(",", "\t").upper().encode("utf-8-sig")),
        ("rows.csv", ARTICLE.replace(",", ", ").replace("t_draft", "T_draft (ms)").encode()),
        ("rows.csv", b"t_verify_us,P,k,t_target_s,t_draft\n90000,.8,1,.076,8\n104e3,.74,2,NaN,14\n117e3,.67,3,,22\n"),
    ],
)
def test_the_articles_rows_as_they_are_printed(name: str, content: bytes, draftsmith: Run, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    policy = chosen(draftsmith, tmp_path / name)
    assert [round(e["al"], 2) for e in policy["evals"]] == [1.0, 1.80, 2.39, 2.79]
    assert [round(e["speedup_pred"], 2) for e in policy["evals"]] == [1.0, 1.40, 1.54, 1.52]
    assert [c["depth_k"] for c in policy["choices"]] == [2]
    assert [f["code"] for f in policy["flags"]] == ["no_interval"]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            "k,al,t_verify,t_draft\n1,1.10,90,8\n2,2.80,104,14\n3,3.90,117,22",
            "rows.csv:3: drafter, batch 1: acceptance",
        ),
        ("k,al,t_verify,t_draft\n1,1.80,90,8\n1,1.60,90,8", "rows.csv:3: acceptance of drafter at k = 1 was already"),
        ("k,prompt,al,t_verify,t_draft\n1,a,1.80,90,8\n1,a,1.60,90,8", "rows.csv:3: acceptance of prompt a at k = 1"),
        (
            "k,al,t_verify,t_draft\n1,1.80,90,8\n2,2.39,9000,14",
            "rows.csv:3: drafter, batch 1: t_verify 9000 ms at k = 2",
        ),
        ("k,al,t_verify,t_draft\n1,1.80,90,.008\n3,2.79,117,.022", "rows.csv:2: drafter, batch 1: t_draft 0.008 ms"),
    ],
)
def test_numbers_that_cannot_be_are_one_line_and_exit_code_two(
    columns: str, said: str, draftsmith: Run, tmp_path: Path
) -> None:
    file = tmp_path / "rows.csv"
    head, *rows = columns.splitlines()
    file.write_text("\n".join([f"{head},t_target", *(f"{row},76" for row in rows)]))
    code, out, err = draftsmith("choose-depth", file)
    assert (code, out) == (2, "")
    assert said in err and len(err.strip().splitlines()) == 1


def test_an_invalid_verdict_exits_with_one_and_shows_no_speedup_to_use(draftsmith: Run, tmp_path: Path) -> None:
    """Rounds at a seventh of a plain step's time would be 10.5x."""
    file = tmp_path / "rows.csv"
    file.write_text("k,al,t_target,t_verify,t_draft\n1,1.80,76,9,1\n2,2.39,76,10,1.4\n3,2.79,76,11,2\n")
    code, out, err = draftsmith("choose-depth", file)
    assert (code, err) == (1, "")
    assert out.startswith("invalid: drafter bad_baseline") and "nothing is chosen" in out
    assert "use" not in out.split() and "engines" not in out and not re.search(r"\dx", out)
    code, out, err = draftsmith("choose-depth", file, "--json")
    policy = json.loads(out)
    assert (code, err, policy["verdict"], policy["winner"], policy["engines"]) == (1, "", "invalid", None, {})
    assert [(c["verdict"], c["depth_k"], c["speedup_pred"]) for c in policy["choices"]] == [("invalid", 0, 1.0)]


def test_the_help_shows_a_table_that_works_and_every_column(draftsmith: Run, tmp_path: Path) -> None:
    from components.speedup.imported.columns import COLUMNS, MS_PER_UNIT

    code, out, _ = draftsmith("choose-depth", "--help")
    assert code == 0
    lines = [line.strip() for line in out.splitlines()]
    first = lines.index("k,p,t_target,t_verify,t_draft")
    (tmp_path / "rows.csv").write_text("\n".join(lines[first : first + 4]))
    assert chosen(draftsmith, tmp_path / "rows.csv")["choices"][0]["depth_k"] == 2
    told = set(re.findall(r"[a-z]\w*", out))
    assert set(COLUMNS) <= told
    assert set(MS_PER_UNIT) <= {word.rpartition("_")[2] for word in told}
