"""The measured numbers of the documentation: docs/benchmarks.md between its two marks, made from the newest records.

    python -m benchmarks.numbers_table [--print]

Without --print the page is written anew. Only records of one machine count, two cores without a GPU, so that what
somebody else's `make bench` leaves beside them changes nothing. A heading is the name of a record; README and pages
link numbers to it, and tests/test_readme_numbers.py looks each of them up there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from statistics import fmean, quantiles
from typing import Any

from benchmarks import opening, own_pass, plan_validation, rehearsals
from benchmarks.engines_table import ELSEWHERE, line_of, table
from benchmarks.record import ROOT
from benchmarks.tables import markdown, record
from benchmarks.training_tables import dflash_parity, packing, training_memory, training_processes, training_speed
from components.engines.profiles import PROFILES, SAID

PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- numbers: begin -->", "<!-- numbers: end -->"


def repeatability() -> tuple[str, str]:
    """Ten measurements of the same drafters."""
    found = record("repeatability")
    of, reached, busy = len(found["runs"]), found["reached"], sum(run["busy"] for run in found["runs"])
    return (
        f"The same two drafters of `quickstart` were measured {of} times, {busy} of them beside a load on one of "
        "the cores that comes and goes.",
        markdown(
            ("what", "times"),
            [
                ("the chosen depth is the best one or within 2 % of it", f"{reached['choice']} of {of}"),
                ("the prediction is within 10 % of what was measured", f"{reached['predicted']} of {of}"),
                ("the printed interval holds the speed pooled over all of them", f"{reached['holds']} of {of}"),
            ],
        ),
    )


def trees(dtype: str) -> tuple[str, str]:
    """Chains beside trees."""
    found = record(f"trees-{dtype}")
    best: dict[tuple[str, str], float] = {}
    for drafter in found["drafters"]:
        for arm in drafter["arms"]:
            kind = (drafter["method"], arm["arm"].split()[0])
            best[kind] = max(best.get(kind, 0.0), arm["speedup"])
    names = {
        ("eagle3", "chain"): "EAGLE-3 chain",
        ("eagle3", "tree"): "EAGLE-3 tree",
        ("mtp", "chain"): "MTP chain",
        ("mtp", "tree"): "MTP tree",
        ("mtp", "two-row"): "MTP two-row",
    }
    return (
        f"Speed against plain decoding in {dtype}, one sequence, best of several depths and tree sizes, at commit "
        f"{found['commit'].rstrip('+')}.",
        markdown(tuple(names.values()), [tuple(f"{best[kind]:.2f}" for kind in names)]),
    )


def million_rows() -> tuple[str, str]:
    """Datasets of a hundred thousand and a million rows."""
    sizes = record("datasets_at_scale")["sizes"]
    large, small = sizes["1000000"], sizes["100000"]
    seconds = round(large["seconds"]["all"])
    shares = {value for name, value in large["planted"].items() if name.startswith(("recall", "precision"))}
    assert shares == {1.0}, "the text says that all was found and nothing else lost"
    return (
        "A million rows of chats are collected, deduplicated and mixed. All planted duplicates and benchmark prompts "
        "were found, and nothing else was lost to them.",
        markdown(
            ("what", "number"),
            [
                ("time", f"{seconds // 60} min {seconds % 60} s"),
                ("memory at most", f"{large['peak_gib']:.1f} GiB"),
                ("times the time of a tenth of the rows", f"{large['seconds']['all'] / small['seconds']['all']:.1f}"),
            ],
        ),
    )


def answering_speed() -> tuple[str, str]:
    """The target's answers beside transformers."""
    found = record("answering-speed")["found"]
    rows = [
        (name, f"{v['tokens_per_s']['ours']:.0f}", f"{v['tokens_per_s']['generate']:.0f}", f"{v['ratio']:.1f}")
        for name, v in found.items()
    ]
    return (
        "The target's answers (`data.write_answers`) beside `transformers` `generate`, in tokens a second.",
        markdown(("model and dtype", "ours", "generate", "times as fast"), rows),
    )


def feature_precision() -> tuple[str, str]:
    """Features in fp8 beside bf16."""
    found = record("feature-precision")["results"]
    assert all(abs(v["mean_difference"]) < v["spread_between_seeds"] for v in found.values()), "the text says so"
    rows = [
        (method, *(f"{fmean(result['held_out_al'][kind]):.3f}" for kind in ("bf16", "fp8")))
        for method, result in found.items()
    ]
    return (
        "Held-out acceptance length of drafters trained on stored features, means of two seeds, which differ by more.",
        markdown(("method", "bf16", "fp8"), rows),
    )


def languages() -> tuple[str, str]:
    """What a bilingual mix is worth."""
    names = {"zh": "Chinese", "en": "English"}
    rows = []
    by_place = {(row["language"], len(row["trained_on"])): row for row in record("languages")["results"]}
    for code, name in names.items():
        both, one = by_place[code, 2], by_place[code, 1]
        change = f"{one['change']:.2f} [{one['change_lo']:.2f}, {one['change_hi']:.2f}]"
        rows.append((name, f"{both['al']:.2f}", f"{one['al']:.2f}", change))
    return (
        "Acceptance length of EAGLE-3 by language on about 1,000 English and 1,000 Chinese Alpaca chats "
        "(`eaglechat-mini`).",
        markdown(("language", "trained on both", "trained without Chinese", "change"), rows),
    )


def fewer_bits() -> tuple[str, str]:
    """What rounding a drafter's weights costs."""
    rows = []
    for drafter in record("quantised-drafts")["drafters"]:
        for row in drafter["rows"]:
            if row["depth_k"] != 3 or (row["weights"] == "int4" and (row["group_size"] != 32 or not row.get("keep"))):
                continue
            group = f", groups of {row['group_size']}" if row["group_size"] else ""
            keep = f", {' and '.join(row['keep'])} kept in bf16" if row.get("keep") else ""
            cost = f"{-row['change']:.3f} [{-row['change_hi']:.3f}, {-row['change_lo']:.3f}]"
            shown = "no loss shown" if row["verdict"] == "undecided" else cost
            rows.append((drafter["method"], f"{row['weights']}{group}{keep}", shown))
    return (
        "What fewer bits cost two drafters of `quickstart` at depth 3, in tokens a round, with 95 % intervals.",
        markdown(("method", "weights", "cost"), rows),
    )


def history() -> tuple[str, str]:
    """How long questions take."""
    found = record("history")
    times = found["query_ms_p50"]
    slowest = max(times, key=times.__getitem__)
    return (
        f"Named queries over a history of {found['runs']:,} runs, each of which registered a version, medians.",
        markdown(
            ("what", "number"),
            [
                ("named queries", str(len(times))),
                (f"the slowest (`{slowest}`)", f"{times[slowest] / 1000:.2f} s"),
                (
                    "over a fifth of a second",
                    f"{sum(ms >= found['limit_ms'] for ms in times.values())} of {len(times)}",
                ),
                ("size of the history", f"{found['megabytes']:.1f} MB"),
            ],
        ),
    )


def commands() -> tuple[str, str]:
    """How long commands take to answer."""
    rows = []
    for name, times in record("commands")["commands"].items():
        command, comma, rest = name.partition(",")
        rows.append((f"`draftsmith {command}`{comma}{rest}", f"{times['median_s']:.2f} s"))
    return "How long a command takes, medians.", markdown(("command", "time"), rows)


SOAK = {
    "soak-kills": ("a tiny pipeline is killed at random moments; nothing finished is lost or made twice", "kills"),
    "soak-services": ("a server, the worker or a run is killed under `draftsmith up`", "kills"),
    "soak-pipeline-mutants": (
        "mutants of `pipelines.yaml`: what `check` accepts compiles and runs, every fault is named where it stands",
        "mutants",
    ),
    "soak-torn-homes": ("torn and flipped bytes in every kind of kept file", "cases"),
    "soak-full-disks": ("runs on disks that fill up", "disks"),
    "soak-models": ("mutants of models, drafters and checkpoints", "cases"),
    "soak-data-files": ("damaged data files", "num_files"),
    "soak-clocks": ("jumps of the clock", "jumps"),
    "soak-vanishing-store": ("a shared store that goes away and comes back", "outages"),
    "soak-thirty-nights": ("nights on one home: every conversation used once, every night explained", "nights"),
}
"""Record of a campaign -> what it does, and the field that counts its cases."""


def soak() -> tuple[str, str]:
    """Campaigns: how many cases, how many faults."""
    rows = []
    for name, (what, count) in SOAK.items():
        found = record(name, timed=False)
        rows.append((f"`{name}`", what, f"{found[count]:,}", str(len(found["faults"]))))
    return (
        "Campaigns of `make soak`. After a kill the weights are those of an undisturbed run, bit for bit.",
        markdown(("record", "what happens", "cases", "faults"), rows),
    )


def engines() -> tuple[str, str]:
    """Which engine serves which format."""
    elsewhere = json.loads(ELSEWHERE.read_text(encoding="utf-8"))
    return (
        "Every format in every engine, on drafters trained for a minute. AL is in tokens a round. Engines show a draft "
        "model the first token of a text, which our loop does not; the lines of the small LM count ours with that "
        "token.",
        table([line_of(line) for line in [*record("engines", timed=False)["lines"], *elsewhere]]),
    )


def imposed_acceptance() -> tuple[str, str]:
    """The speedup model beside vLLM, whose acceptance is imposed."""
    found = record("engine-vllm-synthetic", timed=False)
    lines = sorted(found["lines"], key=lambda line: (line["concurrency"], line["depth_k"], line["rate"]))
    rows = []
    for line in lines:
        if not line["rate"]:
            continue
        quarters = quantiles([error for error in line["error_by_rep"] if error is not None], n=4)
        rows.append(
            (
                *(str(line[name]) for name in ("concurrency", "depth_k", "rate")),
                f"{line['al_pred']:.2f} / {line['al_engine']:.2f}",
                f"{line['t_target_ms']:.1f}",
                f"{line['t_round_at_zero_ms']:.1f} / {line['t_round_ms']:.1f}",
                f"{line['speedup_pred']:.2f} / {line['speedup_engine']:.2f}",
                f"{line['error']:+.0%}",
                f"{quarters[0]:+.0%} to {quarters[-1]:+.0%}",
            )
        )
    alone, together = (_within_a_tenth(lines, concurrency) for concurrency in (1, 4))
    off = max(abs(line["al_pred"] / line["al_engine"] - 1) for line in lines)
    return (
        f"{found['engine']} drafts with an EAGLE-3 that learned nothing, and dice accept each draft at a given rate "
        "(given those before it). The plain server tells T_target, the one at rate 0 T_round, and the model predicts "
        f"the speedup of the others: within 10 % in {alone} with one answer at a time and in {together} with four. Its "
        f"acceptance length is counted within {100 * off:.1f} % of what was told; where the speedup misses, a round "
        "took another time than the one at rate 0. Times are medians in ms, on two cores beside other work, so "
        "single repetitions scatter (the last column has their quartiles). The build by itself stops at the first "
        f"round (`{found['without_plugin']}`); a plugin of the benchmark adds the branch that its kernel lacks.",
        markdown(
            (
                "at once",
                "depth",
                "rate",
                "AL told / counted",
                "T_target",
                "T_round at 0 / here",
                "speedup predicted / measured",
                "gap",
                "gap of single repetitions",
            ),
            rows,
        ),
    )


def _within_a_tenth(lines: Iterable[dict[str, Any]], concurrency: int) -> str:
    gaps = [line["error"] for line in lines if line["rate"] and line["concurrency"] == concurrency]
    return f"{sum(abs(gap) <= 0.1 for gap in gaps)} of {len(gaps)}"


def imported_parity() -> tuple[str, str]:
    """Imported drafters beside the projects that wrote them."""
    found = record("imported-parity", timed=False)
    rows = []
    for name, case in found["cases"].items():
        kind = "hidden" if "hidden_0" in case else "logits"
        apart = max(value for key, value in case.items() if key.startswith(f"{kind}_"))
        chains = f"{case['chains_equal']:.0%} of {case['draft_tokens']}"
        rows.append((f"`{name}`", kind, f"{apart:.1e}", f"{case[f'largest_{kind}']:.1f}", chains))
    projects = {
        "eagle": "EAGLE",
        "specforge": "SpecForge",
        "medusa": "Medusa",
        "angelslim": "AngelSlim",
        "mimo": "MiMo's own modelling code,",
        "transformers": "transformers",
        "speculators": "speculators",
    }
    sources = ", ".join(f"{title} {found[name]}" for name, title in projects.items() if name in found)
    return (
        "Checkpoints that other projects' own classes wrote with random weights, read by `drafts.import_draft`: the "
        "largest difference from what those classes say, and how many of the draft tokens that they propose greedily "
        "after every position of a text, up to three deep, are ours: equal draft tokens are accepted alike. "
        "`own-mtp-*` are whole models with a module, run by transformers' class (Ernie's under vLLM's names); "
        "`speculators-mtp` is what speculators' converter takes out of one. "
        f"{sources}.",
        markdown(("checkpoint", "of", "largest difference", "largest value", "draft tokens equal"), rows),
    )


def families() -> tuple[str, str]:
    """Families of targets: what trains for them, how drafters decode for them, and the engines that name them."""
    found, training = record("soak-families", timed=False), record("soak-family-training", timed=False)
    rows, tried = [], training["families"]
    for name, family in found["families"].items():
        trees = str(len(family["tree"])) if family["tree"] else "refused"
        chains = f"{len(family['chain'])} alone, {len(family['batch'])} in a batch"
        trained = of_all(tried[name]["trained"], training["methods"]) if name in tried else "not tried"
        ours = "ours" if name in own_pass.FAMILIES or family["kernel"] != "transformers" else "transformers'"
        seen, engines = ", ".join(family["layers"]), engines_naming(family["architecture"])
        rows.append((f"`{name}`", f"`{family['architecture']}`", seen, ours, trained, chains, trees, engines))
    refused = "; ".join(f"`{name}` ({why})" for name, why in found["refused"].items())
    anywhere = ", ".join(one.title for one in PROFILES.values() if "eagle3" in one.methods and not one.architectures)
    return (
        f"Tiny random models of each family, with every drafting method: {found['decodings']:,} decodings, "
        f"{len(found['faults'])} that differ from the model's own greedy text by more than a tie. Every family loads, "
        f"and gives features. Trained: methods whose loss fell in {training['steps']} steps on the family's own text, "
        f"of {', '.join(training['methods'])}; tried for {len(tried)} families. Methods that decode "
        "as the model does, as chains and as trees; lookahead decodes one text at a time. Experts and latent attention "
        "have no column: they change no cache. Engines: those whose sources name the architecture among the targets "
        f"that they tap for EAGLE-3, or serve this method for; {anywhere} name none, and were not read so far. "
        f"Refused: {refused}.",
        markdown(
            ("family", "architecture", "what layers see", "pass of this run", "trained", "chains", "trees", "engines"),
            rows,
        ),
    )


def quantised_targets() -> tuple[str, str]:
    """Quantised targets beside transformers' own loader."""
    found = record("soak-quantised-targets", timed=False)
    rows = [
        (
            name.replace(": ", ", "),
            way["dtype"],
            f"{way['features_apart']:.0f} / {way['logits_apart']:.0f}",
            f"{way['loader_apart']:.1e}",
            str(len(way["faults"])),
            ", ".join(f"{package} {number}" for package, number in way["packages"].items()),
        )
        for name, way in found["ways"].items()
    ]
    missing = ", ".join(name.replace(": ", ", ") for name in found["not_installed"]) or "none"
    return (
        "Tiny random targets that each project's own code wrote, opened here and by transformers' loader in the same "
        "dtype: largest difference of features / logits. Beside it, by how much the loader's own two ways differ, all "
        "of a text at once and token by token: a greedy answer while an EAGLE-3 drafter drafts, as a chain, in a batch "
        "and as a tree, may be another only where the best two tokens lie closer than twice that. Where this is as "
        "large as the logits themselves (4-bit activations) equal answers show nothing. LLM.int8 with an outlier "
        f"threshold is refused by name. Not installed for this record: {missing}.",
        markdown(
            ("quantised by", "computes in", "features / logits", "loader's two ways", "other answers", "packages"), rows
        ),
    )


def suffix_repetition() -> tuple[str, str]:
    """Suffix decoding beside prompt lookup, on text that repeats and on ordinary text."""
    found = record("suffix-repetition", timed=False)
    names = {
        "edit": "code is written again with a change",
        "again": "the same, after such an answer",
        "functions": "functions of the standard library",
        "own answers": "the target's own text",
    }
    arms = ("ngram", "ngram, 2 to 8 tokens", "suffix")
    cells = {(row["workload"], row["depth"], row["arm"]): row for row in found["rows"]}
    rows = [
        (
            what,
            str(depth),
            *(f"{row['tokens_a_round']:.2f} / {row['time_over_plain']:.2f}" for row in line),
            "{:.2f} to {:.2f}".format(*line[-1]["time_over_plain_quartiles"][::2]),
        )
        for workload, what in names.items()
        for depth in found["depths"]
        for line in [[cells[workload, depth, arm] for arm in arms]]
    ]
    return (
        "Tokens a round, and the time of decoding over plain decoding's, "
        f"{found['prompts']} prompts of each kind. Held-out files of Python's library stand in for an agent's: "
        "a name is changed, a line left out, a line added, and the target replays the answer. Processor time of one "
        "thread in float32, arms in turns on a quiet machine; the last column has suffix decoding's quartiles over "
        "prompts.",
        markdown(("answers", "depth", "prompt lookup", "of 2 to 8 tokens", "suffix", "suffix, single prompts"), rows),
    )


def suffix_beside_drafter() -> tuple[str, str]:
    """Suffix decoding beside a trained EAGLE-3 drafter, and each alone, on the same texts."""
    found = record("suffix-repetition-trained", timed=False)
    chain, depth = found["chain_depth"], max(found["depths"])
    arms = {
        "suffix": f"suffix alone, depth {depth}",
        "eagle3": f"EAGLE-3 alone, depth {chain}",
        f"eagle3 k={chain} with suffix": "both",
    }
    cells = {(row["workload"], row["arm"], row["depth"]): row["time_over_plain"] for row in found["rows"]}
    rows = [
        (name, *(f"{cells[name, arm, chain if arm == 'eagle3' else depth]:.2f}" for arm in arms))
        for name in found["workloads"]
    ]
    return (
        f"Time of decoding over plain decoding's, with a drafter of {found['train_steps']} training steps; "
        f"{found['prompts']} prompts of each kind of answers, as in the table before; quiet machine.",
        markdown(("answers", *arms.values()), rows),
    )


def long_context() -> tuple[str, str]:
    """What drafting and a training step cost at long contexts, with a window in the drafter and without."""
    found = record("long-context", timed=False)
    drafting, training = (
        {(row["attention"], row[by]): row for row in found[part]["rows"]}
        for part, by in (("drafting", "context"), ("training", "tokens"))
    )
    window = next(name for name, _ in drafting if name != "full")
    rows = [
        (
            f"a round at {length // 1024}k positions",
            *(f"{row['round_ms']:.1f} ms, cache {row['cache_bytes'] / 2**20:.1f} MiB" for row in pair),
        )
        for length in sorted({length for _, length in drafting})
        for pair in [(drafting["full", length], drafting[window, length])]
    ]
    rows += [
        (
            f"a training step of one text of {length // 1024}k tokens",
            *(f"{row['step_seconds']:.1f} s, peak {row['peak_bytes'] / 2**30:.1f} GiB" for row in pair),
        )
        for length in sorted({length for _, length in training})
        for pair in [(training["full", length], training[window, length])]
    ]
    width, trained = found["drafting"]["shape"]["hidden_size"], found["training"]["shape"]
    return (
        f"EAGLE-3 with random weights: rounds of {found['drafting']['depth']} draft tokens at width {width}, training "
        f"at width {trained['hidden_size']} with {trained['ttt_steps']} steps of the training-time test. It says what "
        "they cost, and nothing of acceptance.",
        markdown(("what", "full attention", window), rows),
    )


def compared_methods(name: str, target: str) -> tuple[str, str]:
    """Every method on one target."""
    found = record(name, timed=False)

    def speed(row: dict[str, Any], value: str, low: str) -> str:
        if row[value] is None:
            return "-"
        return f"{row[value]:.2f} [{row[f'{low}_lo']:.2f}, {row[f'{low}_hi']:.2f}]"

    rows = []
    for method in found["methods"]:
        at = next(row for row in method["depths"] if row["depth_k"] == method["shown_depth"])
        price = method["row_of_verification"]
        rows.append(
            (
                f"`{method['method']}`",
                str(method["shown_depth"]),
                f"{at['al']:.2f} [{at['al_lo']:.2f}, {at['al_hi']:.2f}]",
                f"{at['cost_ratio']:.2f}",
                speed(method["shown"], "speedup_pred", "pred"),
                speed(method["shown"], "speedup_meas", "meas"),
                "-" if price is None else f"{price['measured']:.1%}",
                "-" if price is None else f"{price['break_even'][0]:.1%}",
                method["chosen"]["verdict"].replace("_", " "),
            )
        )
    header = ("method", "draft tokens", "AL", "cost of a round", "speedup, predicted", "measured")
    return (
        f"`compare-methods` on {target}: {found['params']['num_prompts']} training prompts, "
        f"{found['params']['train_steps']} steps for each trained method, {found['params']['num_test_prompts']} test "
        f"prompts, with 95 % intervals. At the chosen depth, or the best that drafts where none pays. The last "
        "two numbers are shares of a plain step: what a row of verification costs, and what it may cost until the "
        "method no longer pays.",
        markdown((*header, "a row costs", "pays below", "verdict"), rows),
    )


def stop_rule() -> tuple[str, str]:
    """Chains that end by confidence beside the best fixed depth, on trained drafters."""
    found = record("stop-rule", timed=False)

    def gain(row: dict[str, Any], name: str, low: str) -> str:
        return f"{row[name]:.2f} [{row[f'{low}_lo']:.2f}, {row[f'{low}_hi']:.2f}]"

    rows = [
        (
            f"`{row['method']}`",
            str(row["batch_size"]),
            str(row["fixed_depth"]),
            f"{row['drafted']:.1f}",
            gain(row, "gain", "gain"),
            gain(row, "gain_meas", "meas"),
            f"{row['p_min']:.2f} ({row['p_min_depth']})",
            gain(row, "p_min_gain_meas", "p_min_meas"),
            f"{row['calibration_error']:.3f}",
            f"{row['reading_share']:.1%}" if "reading_share" in row else "not measured",
        )
        for row in found["rows"]
    ]
    header = ("drafter", "batch", "fixed depth", "drafted by the rule", "gain, predicted", "measured")
    return (
        "Speed of chains that end by the drafter's confidence over that of the best fixed depth, built-in target, "
        f"{found['train_steps']} training steps, {found['num_threads']} threads, arms in turns; p_min is a single "
        "threshold with its depth. Predicted on prompts that the rule was not fitted to. Reading is the time that the "
        "confidences of the fixed depth take, as a share of a round; where it was not measured, the prediction is "
        "without it, and lets each sequence of a batch pay for its own chain while decoding waits for the longest. "
        "Where it was, the prediction pays for it, and a batch has one length.",
        markdown((*header, "p_min (depth)", "measured", "calibration error", "reading"), rows),
    )


def opened() -> tuple[str, str]:
    """Opening a target, and plain decoding, beside others: on the usual machine, and the newest record of another."""
    of_usual, newest = record("opening"), record("opening", timed=False)
    what, head, rows = opening.table_of(of_usual)
    table = markdown(head, rows)
    if newest != of_usual:
        _, head, rows = opening.table_of(newest)
        table += (
            f"\n\nOn another machine, {newest['measured_at'][:10]}.{newest.get('note', '')}\n\n{markdown(head, rows)}"
        )
    return what, table


def rehearsed() -> tuple[str, str]:
    """The rehearsal of every recipe."""
    what, head, rows = rehearsals.table_of(record("rehearsals"))
    return what, markdown(head, rows)


def planned() -> tuple[str, str]:
    """What a plan says of steps, held against them."""
    what, head, rows = plan_validation.table_of(record("plan-validation"))
    return what, markdown(head, rows)


def own_model() -> tuple[str, str]:
    """What a plan says of memory at a user's own model, beside a run."""
    what, head, rows = plan_validation.table_of_run(record("own-model", timed=False))
    return what, markdown(head, rows)


def mlflow_load() -> tuple[str, str]:
    """MLflow's server asked by many."""
    found = record("mlflow-load")
    rows = [
        (
            people,
            f"{one['requests_a_second']:.0f}",
            f"{one['ms_p50']:.0f} ms",
            f"{one['ms_p95']:.0f} ms",
            f"{one['list_ms_p50']:.0f} ms",
            f"{one['server_cpu_ms_a_request']:.0f} ms",
        )
        for people, one in found["by_people"].items()
    ]
    return (
        f"MLflow's server of `up`, on SQLite and behind its password. A run of {found['steps']} steps asks it "
        f"{found['requests_a_run']} times. People log runs without a pause, as threads of one process on the same two "
        "cores, and open the list of the newest hundred runs before each; all begin with it at once. "
        f"{found['people']:,} people with {found['runs_a_day_each']} runs a day each would ask "
        f"{found['requests_a_second_in_the_busiest_hour']} times a second in the busiest hour (a fifth of the runs).",
        markdown(
            (
                "people",
                "requests a second",
                "a request",
                "the slowest twentieth",
                "the list",
                "the server's CPU a request",
            ),
            rows,
        ),
    )


def scale_simulation() -> tuple[str, str]:
    """Drafters for three targets on clusters that were not at hand."""
    found = record("scale-simulation", timed=False)
    rows = []
    for streamed, stored in zip(found["runs"][::2], found["runs"][1::2], strict=True):
        assert (streamed["way"], stored["way"]) == ("streamed", "stored")
        rows.append(
            (
                streamed["target"],
                f"{streamed['conversations']:,}",
                str(streamed["gpus"]),
                f"{streamed['hours']:.1f} h ({streamed['bottleneck']})",
                f"{streamed['engine_gpus']} + {streamed['trainer_gpus']}",
                f"{stored['hours']:.1f} h ({stored['bottleneck']})",
                f"{stored['stored_tb']:.1f} TB",
            )
        )
    targets = "; ".join(
        f"{name} {one['feature_bytes'] / 1000:.1f} kB and {one['training_gflop']:.1f} GFLOP a token to train, "
        f"{one['engine_tokens_per_s']:,} tokens a second of an engine of {one['engine_gpus']} GPUs, "
        f"{one['trainer_tokens_per_s']:,} of a training GPU"
        for name, one in found["targets"].items()
    )
    assumed, history, asked = found["assumed"], found["history"], record("scale-people", timed=False)
    people, counts = asked["people"], asked["by_steps"].items()
    counted = ", ".join(
        f"a run of {size} steps asks Prefect's server {one['requests']} times, leaves {one['rows']} rows and takes "
        f"{one['cpu_seconds']:.1f} s of the server's CPU"
        for size, one in counts
    )
    by_gpus = {way: [one for one in found["growth"] if one["way"] == way] for way in ("streamed", "stored")}
    gpus = " / ".join(str(one["gpus"]) for one in by_gpus["streamed"])
    hours = {way: " / ".join(f"{one['hours']:.1f}" for one in line) for way, line in by_gpus.items()}
    deaths = [one for one in found["failures"] if one["times_as_often"] == 1000]
    cost = " / ".join(f"{60 * (one['hours'] - one['hours_without']) / one['failures']:.0f}" for one in deaths)
    every = " / ".join(f"{one['checkpoint_every_s'] / 60:.0f}" for one in deaths)
    return (
        "Nothing of this was measured: a discrete simulation (`python -m benchmarks.scale.simulate`) of EAGLE-3 for "
        f"{found['tokens_a_conversation']:,} tokens a conversation and {found['epochs']} epochs. Hidden states are "
        "streamed from engines to trainers, made anew in each epoch, or stored first by all GPUs and read by all. "
        "In brackets is the busiest part. From published shapes and from speeds that SpecForge and TorchSpec "
        f"publish: {targets}. Assumed: "
        f"{assumed['link'] / 1e9:.1f} GB/s a node, {assumed['store'] / 1e9:.0f} GB/s of the store, a failure in "
        f"{assumed['gpu_hours_between_failures']:,.0f} GPU hours (Llama 3's report). A million conversations of 8B on "
        f"{gpus} GPUs: {hours['streamed']} h streamed, {hours['stored']} h stored. A failure costs {cost} minutes with "
        f"a checkpoint every {every} minutes (70B, 64 GPUs, streamed; a thousand times as many failures, so that there "
        f"are some). By arithmetic from the record of {history['of_record']:,} runs, a history of "
        f"{history['runs']:,} would have {history['gigabytes']:.1f} GB, its slowest "
        f"query would take {history['slowest_query_s']:.0f} s, and the file "
        f"that names its artifacts would have {history['key_file_gb']:.1f} GB; the limit of 0.2 s holds up to "
        f"{history['runs_within_the_limit']:,} runs. Counted on one machine with its runs: {counted}. "
        "From them, for a run of "
        f"{people['steps']} steps {people['requests_a_run']} requests, {people['rows_a_run']} rows and "
        f"{people['server_cpu_seconds_a_run']} s, so one core of a server on SQLite bears at most "
        f"{people['runs_a_second_of_one_core']} runs a second, where {people['runs_a_second']} come; "
        f"{people['people']:,} people with "
        f"{people['runs_a_day_each']} runs a day each, a fifth of a day's in its busiest hour, are "
        f"{people['requests_a_second']} requests a second in it, {people['million_rows_a_day']} million rows a day, "
        f"and {people['days_to_ten_million_runs']} days to ten million runs.",
        markdown(("target", "conversations", "GPUs", "streamed", "engines + training", "stored", "in the store"), rows),
    )


def of_all(some: list[str], every: list[str]) -> str:
    """How many of them, and which are missing."""
    missing = [one for one in every if one not in some]
    return f"all {len(every)}" if not missing else f"{len(some)}, not {', '.join(missing)}"


def engines_naming(architecture: str) -> str:
    """The engines whose profile names this architecture: for EAGLE-3's taps, or for one method."""
    named = [one.title for one in PROFILES.values() if architecture in one.architectures]
    for profile in PROFILES.values():
        for kind, served in profile.methods.items():
            if architecture in served.architectures:
                named.append(f"{profile.title} ({SAID.get(kind, kind)})")
    return ", ".join(named) or "-"


def adopted_elsewhere() -> tuple[str, str]:
    """A drafter of another project's making, before and after tuning, and after its target was changed."""
    found = record("adopt-foreign", timed=False)
    theirs, asked, target = found["theirs"], found["asked"], found["target"]
    words = {
        ("adopted", "tuning"): "as it came, then tuned",
        ("after_change", "target"): "as it came, before and after its target was changed (lost)",
        ("after_change", "tuning"): "on the changed target, as it came, then tuned",
        ("after_change", "both"): "as it came before the change, tuned after it",
    }
    rows = []
    for (part, what), label in words.items():
        row = next(row for row in found[part]["changes"] if (row["what"], row["workload"]) == (what, "all"))
        before, after, change = (
            f"{row[value]:{sign}.2f} [{row[lo]:{sign}.2f}, {row[hi]:{sign}.2f}]"
            for value, lo, hi, sign in (
                ("al_before", "before_lo", "before_hi", ""),
                ("al_after", "after_lo", "after_hi", ""),
                ("change", "lo", "hi", "+"),
            )
        )
        verdict = "no difference shown" if row["verdict"] == "undecided" else row["verdict"]
        rows.append((label, str(row["depth_k"]), before, after, change, verdict))
    verdicts = "; ".join(
        f"{'before' if part == 'adopted' else 'after'} the change: {found[part]['verdict'].replace('_', ' ')}"
        for part in ("adopted", "after_change")
    )
    return (
        f"EAGLE-3 for the built-in target, trained by speculators {theirs['version']} with its own code "
        f"({theirs['steps']} steps on {theirs['num_prompts']} prompts of another kind), run through `adopt` on "
        f"{asked['num_test_prompts']} held-out prompts of the standard library and tuned {asked['train_steps']} steps. "
        f"Then {target['num_steps']} steps on other code changed the target: its loss there fell from "
        f"{target['held_out_loss_before']:.2f} to {target['held_out_loss']:.2f}. Acceptance length with 95 % "
        f"intervals, changes paired over prompts. So few steps make a weak drafter, which has little to lose. "
        f"Verdict, timed on one core beside other work, {verdicts}.",
        markdown(("drafter", "depth", "before", "after", "change", "verdict"), rows),
    )


def sections() -> dict[str, tuple[str, str]]:
    """Name of a record -> (what was measured, its table), in the order of the page."""
    return {
        "repeatability": repeatability(),
        "training-speed": training_speed(),
        "training-memory-8b": training_memory(),
        "training-processes": training_processes(),
        "compare-methods": compared_methods("compare-methods", "the built-in target"),
        "compare-methods-512": compared_methods(
            "compare-methods-512", "a target of width 512 (8 layers, trained for 1,200 steps on an H100)"
        ),
        "dflash-parity": dflash_parity(),
        "packing": packing(),
        "trees-float32": trees("float32"),
        "trees-bfloat16": trees("bfloat16"),
        "opening": opened(),
        "rehearsals": rehearsed(),
        "plan-validation": planned(),
        "own-model": own_model(),
        "answering-speed": answering_speed(),
        "datasets_at_scale": million_rows(),
        "scale-simulation": scale_simulation(),
        "mlflow-load": mlflow_load(),
        "feature-precision": feature_precision(),
        "quantised-drafts": fewer_bits(),
        "languages": languages(),
        "engines": engines(),
        "engine-vllm-synthetic": imposed_acceptance(),
        "families": families(),
        "quantised-targets": quantised_targets(),
        "imported-parity": imported_parity(),
        "adopt-foreign": adopted_elsewhere(),
        "stop-rule": stop_rule(),
        "suffix-repetition": suffix_repetition(),
        "suffix-repetition-trained": suffix_beside_drafter(),
        "long-context": long_context(),
        "history": history(),
        "commands": commands(),
        "soak": soak(),
    }


def text() -> str:
    """Everything between the marks."""
    parts = [f"## {name}\n\n{what}\n\n{numbers}" for name, (what, numbers) in sections().items()]
    return "\n\n".join(parts)


def committed() -> str:
    """What stands between the marks of the page now."""
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()


def main() -> None:
    """Print the table, or write it into the page."""
    if "--print" in sys.argv[1:]:
        print(text())
        return
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{text()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
