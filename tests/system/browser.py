"""A real browser that a test drives: headless Chromium over its DevTools protocol, with real mouse and key events.

with Browser(folder) as page:
    page.open(url)
    page.click("button", "Run")
    page.wait_for("document.body.innerText.includes('Completed')")
    page.screenshot(folder / "run.png")
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from base64 import b64decode, b64encode
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from chromium import NAMES, OPTIONS
from websockets.sync.client import connect

# What a person can see and hit: not hidden, with a size.
FIND = """(selector, text) => [...document.querySelectorAll(selector)].find(e =>
  (!text || e.innerText.trim() === text || e.getAttribute("aria-label") === text)
  && e.getClientRects().length && getComputedStyle(e).visibility !== "hidden")"""


class Browser:
    """One page of one browser with an empty profile. folder: for the profile and the log."""

    def __init__(self, folder: Path, width: int = 1360, height: int = 1000, password: str = "") -> None:
        program = next((path for name in NAMES if (path := shutil.which(name))), None)
        assert program is not None, "no Chromium here: `make test-system` installs it"
        self.folder, self.number, self.password = folder, 0, password
        folder.mkdir(parents=True, exist_ok=True)
        profile = folder / "profile"
        options = [
            *OPTIONS,
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            "--remote-debugging-port=0",
        ]
        with (folder / "chromium.log").open("wb") as log:
            self.process = subprocess.Popen([program, *options, "about:blank"], stdout=log, stderr=log)
        port_file = profile / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not (port_file.is_file() and port_file.read_text().count("\n")):
            assert self.process.poll() is None and time.monotonic() < deadline, (folder / "chromium.log").read_text()
            time.sleep(0.1)
        port = port_file.read_text().splitlines()[0]
        pages: list[dict[str, str]] = []
        while not pages:  # the server of the protocol may be there before the first page
            assert self.process.poll() is None and time.monotonic() < deadline, (folder / "chromium.log").read_text()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [target for target in json.load(answer) if target["type"] == "page"]
        self.socket = connect(pages[0]["webSocketDebuggerUrl"], max_size=None)
        self.send("Page.enable")
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.screenshot(self.folder / "at-failure.png")
        self.socket.close()
        self.process.terminate()
        self.process.wait(timeout=120)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol and its answer."""
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self.socket.recv(timeout=300))
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def open(self, url: str) -> None:
        """Go to a page and wait until it has loaded (not: until its scripts are done)."""
        headers = {}
        if self.password:
            headers = {"Authorization": f"Basic {b64encode(self.password.encode()).decode()}"}
            self.send("Network.enable")
            self.send("Network.setExtraHTTPHeaders", headers=headers)
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def open_when_up(self, url: str, timeout_s: float = 300.0) -> None:
        """Go to a page of a server that is still starting."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.open(url)
            if not self.ask("location.href").startswith("chrome-error:"):
                return
            assert time.monotonic() < deadline, f"{url} does not answer after {timeout_s:g} s"
            time.sleep(0.5)

    def press(self, key: str) -> None:
        """Press and release a key that has a name: "Enter"."""
        code = {"Enter": 13}[key]
        for kind in ("rawKeyDown", "char", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text="\r")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        done = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, f"{expression}: {done['exceptionDetails']}"
        return done["result"].get("value")

    def text(self) -> str:
        """All text that can be seen."""
        return str(self.ask("document.body ? document.body.innerText : ''"))

    def wait_for(self, condition: str, timeout_s: float = 300.0) -> None:
        """Return when a JavaScript condition holds."""
        deadline = time.monotonic() + timeout_s
        while not self.ask(f"Boolean({condition})"):
            assert time.monotonic() < deadline, (
                f"{condition} is not true after {timeout_s:g} s; the page:\n{self.text()}"
            )
            time.sleep(0.2)

    def wait_for_text(self, text: str, timeout_s: float = 300.0) -> None:
        """Return when a text can be read."""
        self.wait_for(f"document.body && document.body.innerText.includes({json.dumps(text)})", timeout_s)

    def click(self, selector: str, text: str = "", timeout_s: float = 300.0) -> None:
        """Click in the middle of the first element that can be seen, matches, and has this text or label. A press that
        meets something else, since the page has moved or drawn itself anew meanwhile, is made again."""
        found = f"({FIND})({json.dumps(selector)}, {json.dumps(text)})"
        middle = f"""(() => {{ const e = {found}; if (!e) return null; e.scrollIntoView({{block: "center"}});
            const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; }})()"""
        # the press itself, not the click: a menu opens on it and swallows the rest
        watch = f"""(() => {{ const e = {found}; window.met = false; document.addEventListener("pointerdown",
            press => {{ window.met = press.composedPath().includes(e); }}, {{capture: true, once: true}}); }})()"""
        deadline = time.monotonic() + timeout_s
        while True:
            place = self.ask(middle)
            time.sleep(0.1)
            if place is not None and self.ask(middle) == place:  # scroll and page are at rest
                self.ask(watch)
                mouse = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
                self.send("Input.dispatchMouseEvent", type="mousePressed", **mouse)
                met = self.ask("window.met")  # nothing where the press has opened another page
                self.send("Input.dispatchMouseEvent", type="mouseReleased", **mouse)
                if met is not False:
                    return
            assert time.monotonic() < deadline, f"{selector} {text} cannot be pressed; the page:\n{self.text()}"

    def fill(self, selector: str, value: str) -> None:
        """Replace the text of an input as a person does: click into it, select all, type."""
        deadline = time.monotonic() + 60
        while True:
            self.click(selector)
            if self.ask(f"document.activeElement.matches({json.dumps(selector)})"):
                self.ask("document.activeElement.select && document.activeElement.select()")
                self.send("Input.insertText", text=value)
                if self.ask("document.activeElement.value") == value:
                    return
            assert time.monotonic() < deadline, f"{selector} does not take {value!r}; the page:\n{self.text()}"
            time.sleep(0.2)

    def screenshot(self, to: Path, of: str = "") -> Path:
        """What can be seen, as a PNG. of: a selector; then all of the first element that matches, and no more."""
        options: dict[str, Any] = {"format": "png"}
        if of:
            rect = f"(({FIND})({json.dumps(of)})).getBoundingClientRect()"
            x, y, width, height = self.ask(f"(r => [r.x + scrollX, r.y + scrollY, r.width, r.height])({rect})")
            clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
            options |= {"clip": clip, "captureBeyondViewport": True}
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(b64decode(self.send("Page.captureScreenshot", **options)["data"]))
        return to
