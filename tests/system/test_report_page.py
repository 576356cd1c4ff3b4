"""The pages as a reader sees them in a real browser: on a desk, on a phone, on paper."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from chromium import Chromium
from PIL import Image, ImageStat
from report_study import make_ctx, make_methods_study, make_report_study

from components.report import compare_methods, write_page
from components.rows import DepthEval, read_rows

pytestmark = pytest.mark.system
WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Chromium:
    return Chromium(tmp_path_factory.mktemp("browser"))


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_report_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def page(study: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """index.html of a study with two drafters, a winner, a gate and flags."""
    given = {name: artifact for name, artifact in study.items() if name != "chosen"}
    ctx = make_ctx(tmp_path_factory.mktemp("page") / "out", "g" * 64)
    return write_page(**given, title="Draft depth report", ctx=ctx).path / "index.html"


@pytest.fixture(scope="module")
def methods_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """index.html of ten methods side by side."""
    root = tmp_path_factory.mktemp("methods")
    drafts, policy = make_methods_study(root, 10)
    return compare_methods(drafts, policy, ctx=make_ctx(root / "out", "m" * 64)).path / "index.html"


def visible(document: str) -> str:
    """The text of a document: markup gone, white space joined."""
    return " ".join(html.unescape(re.sub(r"<style.*?</style>|<[^>]+>", " ", document, flags=re.DOTALL)).split())


def test_the_verdict_and_every_depth_are_there(browser: Chromium, page: Path, study: dict[str, Any]) -> None:
    text = visible(browser.document(page).html)
    policy = study["policy"]
    assert f"draft {policy.info['depth_k']} tokens a round: {policy.info['speedup_meas']:.2f}x" in text
    evals = [e for e in read_rows(policy.path, DepthEval) if e.workload == "all" and e.depth_k]
    assert {e.method for e in evals} == {"eagle3", "mtp"}
    for e in evals:
        row = f"{e.al:.2f} [{e.al_lo:.2f}, {e.al_hi:.2f}]"
        assert row in text, f"{e.method} k={e.depth_k}"
        assert f"{e.speedup_pred:.2f}x [{e.pred_lo:.2f}, {e.pred_hi:.2f}]" in text, f"{e.method} k={e.depth_k}"


@pytest.mark.parametrize("which", ["page", "methods_page"])
def test_the_page_says_nothing_on_the_console(request: pytest.FixtureRequest, browser: Chromium, which: str) -> None:
    assert browser.document(request.getfixturevalue(which)).console == []


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_sticks_out_sideways(browser: Chromium, page: Path, width: int) -> None:
    layout = browser.layout(page, width)
    assert layout.window_width == width
    assert layout.content_width == width, "the page scrolls sideways"
    assert layout.content_height > 2000


@pytest.mark.parametrize("which", ["page", "methods_page"])
def test_on_a_phone_no_table_has_to_be_scrolled_sideways(
    request: pytest.FixtureRequest, tmp_path: Path, which: str
) -> None:
    """Every box with a table in it shows its whole width at 390 x 844, and text is not smaller than 11 pixels."""
    with Browser(tmp_path, width=390, height=844) as window:
        window.open(request.getfixturevalue(which).as_uri())
        assert window.ask("innerWidth") == 390 and window.ask("document.scrollingElement.scrollWidth") == 390
        boxes = "[...document.querySelectorAll('.scroll')].filter(e => e.getClientRects().length)"
        assert window.ask(f"{boxes}.length") >= 2
        assert window.ask(f"{boxes}.filter(e => e.scrollWidth > e.clientWidth).length") == 0
        sizes = "[...document.querySelectorAll('td, p, dd, dt, li')].map(e => parseFloat(getComputedStyle(e).fontSize))"
        assert window.ask(f"Math.min(...{sizes})") >= 11
        names = "getComputedStyle(document.querySelector('td'), '::before').content"
        assert len(window.ask(names)) > 2, "a cell says the name of its column"


@pytest.mark.parametrize("which", ["page", "methods_page"])
def test_on_paper_everything_fits_and_what_is_folded_on_screen_is_open(
    request: pytest.FixtureRequest, browser: Chromium, tmp_path: Path, which: str
) -> None:
    page: Path = request.getfixturevalue(which)
    document = browser.pdf(page, tmp_path / "page.pdf").read_bytes()
    pages = len(re.findall(rb"/Type\s*/Page\b", document))
    assert document.startswith(b"%PDF") and 2 <= pages <= 12
    with Browser(tmp_path / "window", width=703, height=1000) as window:  # A4 without its margins
        window.open(page.as_uri())
        window.send("Emulation.setEmulatedMedia", media="print")
        assert window.ask("document.scrollingElement.scrollWidth") == 703
        wide = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > 703).length"
        assert window.ask(wide) == 0, "a table is cut off at the edge of the paper"
        folded = (
            "[...document.querySelectorAll('details table')].filter(e => e.getBoundingClientRect().height < 20).length"
        )
        assert window.ask(folded) == 0
        assert window.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_drawn(browser: Chromium, page: Path, tmp_path: Path, width: int) -> None:
    """Ink on every part of the page: no blank band as high as a window, and charts in more than one colour."""
    height = browser.layout(page, width).content_height
    file = browser.screenshot(page, tmp_path / "page.png", width=width, height=height)
    with Image.open(file) as image:
        picture = image.convert("RGB")
    assert picture.size == (width, height)
    for top in range(0, height - 600, 600):
        band = picture.crop((0, top, width, top + 600))
        assert min(ImageStat.Stat(band).stddev) > 5, f"blank from {top} to {top + 600}"
    coloured = picture.convert("HSV").split()[1].histogram()
    assert sum(coloured[100:]) > 500, "no chart is drawn in colour"


def test_these_checks_can_fail(browser: Chromium, tmp_path: Path) -> None:
    """A page with a script error and a box wider than the window is caught."""
    bad = tmp_path / "bad.html"
    bad.write_text("<!doctype html><div style='width: 900px'>wide</div><script>missing()</script>", encoding="utf-8")
    assert any("missing is not defined" in line for line in browser.document(bad).console)
    layout = browser.layout(bad, 420)
    assert layout.content_width > layout.window_width == 420
