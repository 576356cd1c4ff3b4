"""The steps of components/report, as pipelines.yaml names them: what each takes, its settings, and what it makes.

A step imports its implementation when it runs, so that `check` and `plan` read its settings in no time.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from components.contract import Context, Conversations, DepthPolicy, Draft, Measurements, Page, Release


def write_page(
    policy: DepthPolicy,
    acceptance: list[Measurements],
    cost: list[Measurements],
    end_to_end: Measurements,
    release: Release | None = None,
    drift: Measurements | None = None,
    engines: Measurements | None = None,
    answers: list[Conversations] | None = None,
    *,
    title: Annotated[str, Field(min_length=1, max_length=200)] = "Draft depth report",
    ctx: Context,
) -> Page:
    """Write index.html.

    Args:
        policy: chosen depths with predicted and measured speedups, and the promotion gate.
        acceptance: acceptance maps of the drafters; counted on the page. What speedup.measure_tuning made of them may
            stand among them, and is shown.
        cost: step times of the drafters; counted on the page.
        end_to_end: the timed comparison; counted on the page.
        release: what was exported, if anything was.
        drift: acceptance of the champion on new traffic against that at its release.
        engines: serving engines held against our own loop (speedup.compare_engines).
        answers: what the drafters were trained on; a few of them are shown with the answers in colour.
        title: the heading of the page.
    """
    from components.report.pages.drafter import write_page as run

    return run(policy, acceptance, cost, end_to_end, release, drift, engines, answers, title=title, ctx=ctx)


def compare_languages(
    languages: Measurements,
    policy: DepthPolicy | None = None,
    answers: list[Conversations] | None = None,
    *,
    title: Annotated[str, Field(min_length=1, max_length=200)] = "Acceptance by language",
    ctx: Context,
) -> Page:
    """Write index.html, charts/languages.svg and tables/languages.csv.

    Args:
        languages: the rows of speedup.measure_languages.
        policy: chosen depths of the same drafters; shown for workloads that are named like a language.
        answers: what the drafters were trained on; a few of them are shown with the answers in colour.
        title: the heading of the page.
    """
    from components.report.pages.languages import compare_languages as run

    return run(languages, policy, answers, title=title, ctx=ctx)


def compare_methods(
    drafts: list[Draft],
    policy: DepthPolicy,
    *,
    title: Annotated[str, Field(min_length=1, max_length=200)] = "Drafting methods compared",
    ctx: Context,
) -> Page:
    """Write index.html, charts/methods.svg and tables/methods.csv.

    Args:
        drafts: the drafters, for their parameters and training times.
        policy: what speedup.confirm_depth (or choose_depth) found for all of them.
        title: the heading of the page.
    """
    from components.report.pages.methods import compare_methods as run

    return run(drafts, policy, title=title, ctx=ctx)
