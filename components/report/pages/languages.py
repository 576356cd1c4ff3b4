"""Step `report.compare_languages`: acceptance of each training mix in each language, in a table and charts.

It reads the rows of `speedup.measure_languages` and, where a depth was chosen by language, the speedups of a policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from components.contract import Context, Conversations, DepthPolicy, Measurements, Page, UserError
from components.html_pages import write_html
from components.outside_json import JsonObject
from components.report.charts.export import side_by_side, write_pictures
from components.report.charts.svg import PALETTE, Point, Series, bar_chart, line_chart
from components.report.pages.training_data import trained_on
from components.report.summary import origin_of
from components.report.tables import measured_speedup, method_title, predicted_speedup
from components.rows import ALL, AcceptanceByLanguage, DepthChoice, QualityFlag, read_rows
from components.tables import Table, format_interval, format_percent

NAMES: Final = {
    "ar": "Arabic",
    "de": "German",
    "en": "English",
    "es": "Spanish",
    "fr": "French",
    "hi": "Hindi",
    "ja": "Japanese",
    "ko": "Korean",
    "pt": "Portuguese",
    "ru": "Russian",
    "zh": "Chinese",
    "all": "all languages",
    "unknown": "unknown language",
}


def compare_languages(
    languages: Measurements,
    policy: DepthPolicy | None,
    answers: list[Conversations] | None,
    *,
    title: str,
    ctx: Context,
) -> Page:
    """The step `report.compare_languages`; its settings are explained in components/report/steps.py."""
    facts = languages_facts(languages, policy, title)
    facts["trained_on"] = trained_on(answers or [])
    size = write_html(ctx.out, Path(__file__).parent / "languages.html.jinja", facts)
    one_chart = side_by_side((name, chart) for name, _, chart in facts["charts"])
    write_pictures(ctx.out, {"languages": one_chart}, [("languages", facts["table"]), ("speedups", facts["speedups"])])
    return Page.of_step(ctx, {"title": title, "bytes": size, "verdict": " ".join(facts["sentences"])})


def languages_facts(languages: Measurements, policy: DepthPolicy | None, title: str) -> JsonObject:
    """The variables of the template."""
    rows = read_rows(languages.path, AcceptanceByLanguage)
    if not rows:
        raise UserError(f"languages ({languages.key[:12]}): no rows by language; wire speedup.measure_languages")
    mixes = mix_names(rows)
    choices = read_rows(policy.path, DepthChoice) if policy is not None else []
    flags = read_rows(languages.path, QualityFlag)
    return {
        "title": title,
        "origin": origin_of(str(languages.info.get("model", "")), rows[0].target_key, languages),
        "sentences": findings(rows),
        "shown": any(row.verdict == "lower" for row in rows),
        "depth": rows[0].depth_k,
        "method": method_title(rows[0].method),
        "table": language_table(rows),
        "charts": language_charts(rows, mixes),
        "speedups": speedup_table(choices, rows, mixes),
        "doubts": [flag.detail for flag in flags],
    }


def in_english(code: str) -> str:
    """The English name of a language, or its code where it is not in NAMES."""
    return NAMES.get(code, code)


def mix_names(rows: Sequence[AcceptanceByLanguage]) -> dict[str, str]:
    """Key of a drafter -> name of its mix: the training languages, with the key where two mixes have the same."""
    trained = {row.draft_key: " + ".join(map(in_english, sorted(row.trained_on))) or "nothing" for row in rows}
    names = list(trained.values())
    return {key: name if names.count(name) == 1 else f"{name} ({key[:6]})" for key, name in trained.items()}


def findings(rows: Sequence[AcceptanceByLanguage]) -> list[str]:
    """A sentence for each language that a mix lacks and the baseline has; else one for each mix over all prompts."""
    first = {row.language: row for row in rows if row.verdict == "baseline"}
    others = [row for row in rows if row.verdict != "baseline"]
    lacking = [
        row for row in others if row.language in first[row.language].trained_on and row.language not in row.trained_on
    ]
    sentences = []
    for row in lacking or [row for row in others if row.language == ALL]:
        before, name = first[row.language], in_english(row.language)
        mix = f"Without {name} in the training mix" if row in lacking else f"Trained on {' + '.join(row.trained_on)}"
        sentences.append(f"{mix}, acceptance length on {name} {_describe_change(row, before)}.")
    return sentences or ["One training mix: nothing to compare it with."]


def _describe_change(row: AcceptanceByLanguage, before: AcceptanceByLanguage) -> str:
    how = {"lower": "falls", "higher": "rises"}.get(row.verdict, "moves")
    caveat = "" if row.verdict in ("lower", "higher") else ", which is not shown to be a difference"
    return f"{how} from {before.al:.2f} to {row.al:.2f}: {format_change(row)} tokens a round{caveat}"


def format_change(row: AcceptanceByLanguage) -> str:
    """The paired difference with its interval; "-" for the baseline."""
    if row.change is None or row.change_lo is None or row.change_hi is None:
        return "-"
    return f"{row.change:+.2f} [{row.change_lo:+.2f}, {row.change_hi:+.2f}]"


def language_table(rows: Sequence[AcceptanceByLanguage]) -> Table:
    """One line for each language and mix, grouped by language; "all languages" is last."""
    mixes = mix_names(rows)
    return Table.of(
        sorted(rows, key=lambda row: (row.language == ALL, row.language)),  # a stable sort: the baseline stays first
        {
            "language": lambda row: in_english(row.language),
            "trained on": lambda row: mixes[row.draft_key],
            "its training prompts": lambda row: f"{row.num_trained_on:,}",
            "test prompts": lambda row: str(row.num_prompts),
            "acceptance length": lambda row: f"{row.al:.2f}{format_interval(row.al_lo, row.al_hi)}",
            "change": format_change,
            "verdict": lambda row: row.verdict,
            "in vocabulary": lambda row: format_percent(row.coverage),
        },
    )


def language_charts(rows: Sequence[AcceptanceByLanguage], mixes: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(title, description, chart): acceptance, differences between mixes, and draft vocabulary where it was counted."""
    codes = sorted({row.language for row in rows} - {ALL}) or [ALL]
    at = {code: place for place, code in enumerate(codes)}
    labels = [in_english(code) for code in codes]
    colours = dict(zip(mixes, PALETTE * len(mixes), strict=False))
    lengths: list[Series] = []
    changes: list[Series] = []
    for number, (key, name) in enumerate(mixes.items()):
        of_mix = [row for row in rows if row.draft_key == key and row.language in at]
        aside = 0.16 * (number - (len(mixes) - 1) / 2)
        points = [Point(at[row.language] + aside, row.al, row.al_lo, row.al_hi) for row in of_mix]
        lengths.append(Series(f"trained on {name}", colours[key], "dots", points))
        changed = [(row, row.change) for row in of_mix if row.change is not None]
        if changed:
            points = [Point(at[row.language] + aside, by, row.change_lo, row.change_hi) for row, by in changed]
            changes.append(Series(f"trained on {name}", colours[key], "dots", points))
    charts = [
        (
            "Acceptance length",
            "Tokens kept a round, the target's own included, with 95 % intervals over prompts.",
            line_chart(lengths, "language of the prompt", "acceptance length by language", x_labels=labels),
        )
    ]
    if changes:
        first = next(iter(mixes.values()))
        changes.append(Series(f"trained on {first} (first mix)", colours[next(iter(mixes))], "level", [Point(0, 0.0)]))
        chart = line_chart(
            changes, "language of the prompt", "change of acceptance length by language", x_labels=labels
        )
        charts.append(("Difference", "Against the first mix on the same prompts, resampled together.", chart))
    if all(row.coverage is not None for row in rows):
        share = {(row.language, row.draft_key): row.coverage for row in rows}
        groups = [(in_english(code), [share[code, key] for key in mixes]) for code in codes]
        names = [(f"trained on {name}", colours[key]) for key, name in mixes.items()]
        chart = bar_chart(groups, names, "language of the prompt", "answer tokens in the draft vocabulary by language")
        charts.append(("Draft vocabulary", "Share of the answers' tokens that can be guessed at all.", chart))
    return charts


def speedup_table(
    choices: Sequence[DepthChoice], rows: Sequence[AcceptanceByLanguage], mixes: Mapping[str, str]
) -> Table | None:
    """Chosen depth and speedups of every mix in every language; None where depths were not chosen by language."""
    codes = {row.language for row in rows}
    of_languages = sorted(
        (c for c in choices if c.workload in codes and c.draft_key in mixes and c.kv_len is None),
        key=lambda c: (c.workload == ALL, c.workload, list(mixes).index(c.draft_key), c.batch_size),
    )
    if not any(c.workload != ALL for c in of_languages):
        return None
    return Table.of(
        of_languages,
        {
            "language": lambda c: in_english(c.workload),
            "trained on": lambda c: mixes[c.draft_key],
            "depth": lambda c: str(c.depth_k),
            "predicted": predicted_speedup,
            "measured": measured_speedup,
            "verdict": lambda c: c.verdict.replace("_", " "),
        },
    )
