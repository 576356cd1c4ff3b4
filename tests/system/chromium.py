"""A page in a real browser: headless Chromium, one process a question, each with a new empty profile.

A window of headless Chromium is never narrower than 500 pixels, so a page is looked at through a frame of the wanted
width in a page of our own; to the page the frame is its whole window.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--allow-file-access-from-files",  # the framing page reads the sizes of the framed one
    "--enable-logging=stderr",
    "--v=0",
)
FRAME = """<!doctype html><title>not measured</title><style>body {{ margin: 0 }} iframe {{ border: 0 }}</style>
<script>
function measure(frame) {{
  const page = frame.contentDocument.scrollingElement;
  document.title = [page.scrollWidth, page.clientWidth, page.scrollHeight].join(" ");
  frame.height = page.scrollHeight;
}}
</script>
<iframe src="{address}" width="{width}" height="900" onload="measure(this)"></iframe>"""


@dataclass(frozen=True)
class Layout:
    """Sizes of a loaded page in CSS pixels; it scrolls sideways where content_width is more than window_width."""

    content_width: int
    window_width: int
    content_height: int


@dataclass(frozen=True)
class Document:
    """The document after its scripts ran, and the lines that the page wrote to its console."""

    html: str
    console: list[str]


class Chromium:
    """The browser of this machine; `folder` holds its profiles and framing pages."""

    def __init__(self, folder: Path) -> None:
        found = next((path for name in NAMES if (path := shutil.which(name))), None)
        assert found is not None, "no Chromium here: `make test-system` installs it"
        self.program, self.folder, self.visits = found, folder, 0

    def document(self, page: Path) -> Document:
        """Load a local page."""
        done = self._run(page, 1280, 900, "--dump-dom")
        return Document(done.stdout, re.findall(r"^\[.*CONSOLE.*$", done.stderr, re.MULTILINE))

    def layout(self, page: Path, width: int) -> Layout:
        """How a page lies in a window of `width` pixels."""
        title = re.search(r"<title>(\d+) (\d+) (\d+)</title>", self.document(self._framed(page, width)).html)
        assert title is not None, f"{page} did not load in a frame"
        return Layout(*map(int, title.groups()))

    def screenshot(self, page: Path, to: Path, *, width: int, height: int) -> Path:
        """The top `height` pixels of the page in a window of `width` pixels, as a PNG."""
        self._run(self._framed(page, width), width, height, f"--screenshot={to}")
        assert to.is_file(), "the browser wrote no screenshot"
        return to

    def pdf(self, page: Path, to: Path) -> Path:
        """The page as it is printed."""
        self._run(page, 1280, 900, "--no-pdf-header-footer", f"--print-to-pdf={to}")
        assert to.is_file(), "the browser printed nothing"
        return to

    def _framed(self, page: Path, width: int) -> Path:
        file = self.folder / f"frame-{self.visits}.html"
        file.write_text(FRAME.format(address=page.resolve().as_uri(), width=width), encoding="utf-8")
        return file

    def _run(self, page: Path, width: int, height: int, *what: str) -> subprocess.CompletedProcess[str]:
        self.visits += 1
        profile = self.folder / f"profile-{self.visits}"
        profile.mkdir()
        command = [self.program, *OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}", *what]
        done = subprocess.run(
            [*command, page.resolve().as_uri()], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done
