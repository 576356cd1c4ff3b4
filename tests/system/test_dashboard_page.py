"""The dashboard in a real browser that has no network: all charts are drawn, a click on a point leads to its row."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import Browser
from chromium import Chromium
from thirty_nights import fill

from flows.dashboard.gathered import make_dashboard

pytestmark = pytest.mark.system
WIDTHS = (1280, 390)
DRAWN = "document.documentElement.dataset.drawn"
OFFLINE = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dashboard of thirty nights."""
    home = tmp_path_factory.mktemp("nights") / "home"
    fill(home)
    make_dashboard(home, home / "page.html", days=90, reports="store")
    return home / "page.html"


@pytest.mark.parametrize("width", WIDTHS)
def test_every_chart_is_drawn_without_a_network(page: Path, tmp_path: Path, width: int) -> None:
    with Browser(tmp_path, width=width, height=900) as window:
        window.send("Network.enable")
        window.send("Network.emulateNetworkConditions", **OFFLINE)
        window.open(page.as_uri())
        window.wait_for(f"{DRAWN} || document.documentElement.dataset.broken")
        assert window.ask(DRAWN) == "10" == str(window.ask("document.querySelectorAll('.vega').length"))
        marks = "e => e.querySelectorAll('.role-mark path, .role-mark line').length"
        assert min(window.ask(f"[...document.querySelectorAll('.vega')].map({marks})")) >= 2, "a chart without marks"
        assert window.ask("document.scrollingElement.scrollWidth") == width, "the page scrolls sideways"
        sizes = "[...document.querySelectorAll('td, p, dd, dt, li')].map(e => parseFloat(getComputedStyle(e).fontSize))"
        assert window.ask(f"Math.min(...{sizes})") >= 11
        charts = "[...document.querySelectorAll('figure:not(.lineage) .vega svg')]"
        ends = window.ask(f"{charts}.map(e => e.getBoundingClientRect().right)")
        assert max(ends) <= width, "a chart sticks out"
        assert window.ask("document.title") == "Draftsmith", "a text of a run has become a program"
        names = "performance.getEntriesByType('resource').map(e => e.name)"
        assert window.ask(names) == [], "the page asked for something"
        window.screenshot(tmp_path / "page.png")


def test_a_click_on_a_point_leads_to_its_row(page: Path, tmp_path: Path) -> None:
    with Browser(tmp_path, width=1280, height=900) as window:
        window.open(page.as_uri())
        window.wait_for(DRAWN)
        window.click("#measured ~ .charts .mark-symbol path")
        window.wait_for("document.querySelector('tr:target')")
        row = "document.querySelector('tr:target')"
        assert window.ask(f"{row}.getBoundingClientRect().height") > 10, "the row is folded away"
        said = window.ask(f"{row}.nextElementSibling.innerText")
        assert said.startswith("draftsmith show ") and "draftsmith query --all-sessions" in said
        window.click("tr:target td[data-name='run'] a")
        window.wait_for("location.hash.startsWith('#run-')")
        assert "nightly" in window.ask(f"{row}.innerText") or "quickstart" in window.ask(f"{row}.innerText")


def test_it_says_nothing_on_the_console_and_shows_its_dark_colours(page: Path, tmp_path: Path) -> None:
    assert Chromium(tmp_path).document(page).console == []
    with Browser(tmp_path / "dark", width=1280, height=900) as window:
        window.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        window.open(page.as_uri())
        window.wait_for(DRAWN)
        colour = "getComputedStyle(document.querySelector('.vega .role-axis-label text')).fill"
        assert window.ask(colour) == "rgb(154, 167, 184)", "labels keep the light page's colour"
