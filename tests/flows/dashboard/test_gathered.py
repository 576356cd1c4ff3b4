"""The dashboard of a home: what it says after thirty nights, that each point has its row, that it is one whole file."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from thirty_nights import FAILED, PROMOTED, fill

from components.report.board import Board
from flows.cli import main
from flows.dashboard import served
from flows.dashboard.gathered import make_dashboard
from storage.history.query import open_history

PASSWORD = ("draftsmith", "a secret")


class Document(HTMLParser):
    """Ids, links and texts of a page, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.links, self.loads, self.said = set[str](), list[str](), list[str](), list[str]()
        self.within, self.specs = "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.within = (named.get("id") or tag) if tag in ("script", "style") else self.within
        self.ids |= {str(named["id"])} if "id" in named else set()
        self.links += [str(named["href"])] if tag == "a" else []
        self.loads += [str(value) for name, value in attrs if name == "src" or (name == "href" and tag != "a")]

    def handle_endtag(self, tag: str) -> None:
        self.within = "" if tag in ("script", "style") else self.within

    def handle_data(self, data: str) -> None:
        if self.within == "specs":
            self.specs += data
        elif not self.within:
            self.said.append(data)

    @property
    def text(self) -> str:
        """What a reader sees."""
        return " ".join(" ".join(self.said).split())


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Board, Document]:
    """A home of thirty nights, what is on its dashboard, and the page."""
    home = tmp_path_factory.mktemp("nights") / "home"
    fill(home)
    page = home / "page.html"
    board = make_dashboard(home, page, days=90, reports="store")
    return home, board, Document(page.read_text(encoding="utf-8"))


def hrefs(spec: Any) -> set[str]:
    """Where the points of a chart lead."""
    if isinstance(spec, dict):
        here = {spec["href"]} if isinstance(spec.get("href"), str) else set()
        return here.union(*map(hrefs, spec.values()))
    return set().union(*map(hrefs, spec)) if isinstance(spec, list) else set()


def test_it_says_who_is_champion_and_how_each_night_ended(nights: tuple[Path, Board, Document]) -> None:
    _, board, page = nights
    assert "builtin version 19, mtp at depth 3: 1.43x" in page.text.replace("\N{NO-BREAK SPACE}", " ")
    assert [run.outcome for run in board.runs].count("failed") == len(FAILED)
    assert [run.outcome for run in board.runs].count("promoted") == len(PROMOTED)
    assert len(board.runs) == 30 and all(run.sentence for run in board.runs)
    assert all(" ".join(run.sentence.split()) in page.text.replace("\N{NO-BREAK SPACE}", " ") for run in board.runs)
    assert {machine.name for machine in board.machines} == {
        "EPYC 7B13, 8 cores, 31 GiB",
        "Ampere Altra, 16 cores, 63 GiB",
    }
    assert len(board.failures) == 3 and "No space left on device" in page.text
    assert {seen.drifted for seen in board.drift} == {True, False}


def test_the_lineage_of_the_champion_ends_at_the_drafter_it_goes_on_from(nights: tuple[Path, Board, Document]) -> None:
    (champion,) = nights[1].champions
    kinds = [one.kind for one in champion.lineage]
    assert champion.goes_on and kinds[0] == "Release" and kinds.count("Draft") == 2
    assert [one.note for one in champion.lineage if one.kind in ("Prompts", "Target")] == [
        "builtin",
        "traffic/*.jsonl",
    ]


def test_every_point_has_its_row_and_every_row_its_sql(nights: tuple[Path, Board, Document]) -> None:
    home, board, page = nights
    specs = json.loads(page.specs)
    assert len(specs) == 10
    targets = set().union(*map(hrefs, specs)) | {link for link in page.links if link.startswith("#")}
    assert len(targets) > 90 and {target.removeprefix("#") for target in targets} <= page.ids
    for link in page.links:
        assert link.startswith("#") or (home / link).is_file(), link
    every = [*board.choices[::15], *board.depths[::5], *board.drift[::12]]
    with open_history(home, all_sessions=True) as ask:
        for point in every:
            columns, rows = ask(point.origin.sql, {})
            assert len(rows) == 1, point.origin.sql
            assert dict(zip(columns, rows[0], strict=True))["run_id"] == point.origin.run_id


def test_nothing_is_loaded_and_no_text_of_a_run_becomes_a_program(nights: tuple[Path, Board, Document]) -> None:
    home, _, page = nights
    assert page.loads == []
    written = (home / "page.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in written
    assert "<script>document.title" not in written, "the reason of a killed night is a text"
    assert "</script><script>document.title = 'taken'" in page.text


def test_the_commands_below_each_part_answer(
    nights: tuple[Path, Board, Document], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    home, board, _ = nights
    monkeypatch.setenv("DRAFTSMITH_HOME", str(home))
    for name, question in board.questions.items():
        program, *arguments = shlex.split(question.command)
        assert program == "draftsmith" and main(arguments) == 0, name
        assert "\n0 rows" not in capfd.readouterr().out, name


def test_an_empty_home_says_what_to_do(
    nights: tuple[Path, Board, Document], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command as it is given, in a process of its own: it never loads torch."""
    told = "import sys; from flows.cli import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules"
    told += "; sys.exit(code)"
    file = tmp_path / "page.html"
    shutil.copytree(nights[0] / "dashboard", tmp_path / "home" / "dashboard")  # bundling the program takes seconds
    command = [sys.executable, "-c", told, "dashboard", "--to", str(file)]
    environment = {"DRAFTSMITH_HOME": str(tmp_path / "home"), "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    page = Document(file.read_text(encoding="utf-8"))
    assert len(json.loads(page.specs)) <= 1, "what the home itself takes"
    assert "Nothing has run in this home" in page.text and "draftsmith run quickstart" in page.text
    assert main(["dashboard", "--to", str(tmp_path / "no" / "page.html")]) == 2
    assert "there is no folder" in capfd.readouterr().err


def test_the_served_page_asks_for_the_password_and_serves_reports_alone(
    nights: tuple[Path, Board, Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, board, _ = nights
    monkeypatch.setenv("DRAFTSMITH_HOME", str(home))
    prefect = Starlette(routes=[Route("/", lambda request: PlainTextResponse("Prefect"))])
    with TestClient(served.WithDashboard(prefect, home, ":".join(PASSWORD))) as client:
        assert client.get("/").text == "Prefect"
        assert client.get("/dashboard/").status_code == 401
        client.auth = PASSWORD
        page = client.get("/dashboard")
        assert page.status_code == 200 and "how this was asked" in page.text
        report = next(link for link in Document(page.text).links if "reports/" in link)
        answer = client.get(report)
        assert answer.status_code == 200 and "night" in answer.text
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        release = next(one.key for one in board.champions[0].lineage)
        for other in (release, "..", "%2e%2e", "..%2f..%2fprefect", release[:12]):
            assert client.get(f"/dashboard/reports/{other}/index.html").status_code == 404
        made = (home / "dashboard" / "served.html").stat().st_mtime_ns
        assert client.get("/dashboard/").status_code == 200
        assert (home / "dashboard" / "served.html").stat().st_mtime_ns == made, "a second look needs no second page"


def test_a_page_that_cannot_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    (home / "history" / "run").mkdir(parents=True)
    (home / "history" / "run" / "r.parquet").write_text("no table", encoding="utf-8")
    monkeypatch.setenv("DRAFTSMITH_HOME", str(home))
    problem = asyncio.run(served._make(home / "dashboard" / "served.html"))
    assert re.search(r"r\.parquet.*doctor --repair", problem), problem
