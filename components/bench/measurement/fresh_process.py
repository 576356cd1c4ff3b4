"""A Python of its own that holds one object: constructed with an order, called with each request, ended by its owner.

`FreshProcess` starts it and names the object's class as `module:class`: JSON lines over two pipes. The process ends
when the pipe to it closes, even if its owner is killed. It loads what the class needs and no more: a start is paid
for in every measurement.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from components.contract import UserError
from components.outside_json import JsonObject
from components.source_code import import_to_stay

ROOT = Path(__file__).resolve().parents[3]


class FreshProcess:
    """The owner's end of the process. reply_at_start: the `facts` of the constructed object."""

    def __init__(self, what: str, order: Mapping[str, object]) -> None:
        from_us, to_us = os.pipe(), os.pipe()
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            self._process = subprocess.Popen(
                # -P: a folder in which the owner runs may hold a package of the same name
                [sys.executable, "-P", "-m", __name__, str(from_us[0]), str(to_us[1]), what],
                pass_fds=(from_us[0], to_us[1]),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        finally:
            os.close(from_us[0])
            os.close(to_us[1])
        self._requests = os.fdopen(from_us[1], "w", encoding="utf-8")
        self._replies = os.fdopen(to_us[0], "r", encoding="utf-8")
        try:
            self.reply_at_start = self.ask(order)
        except BaseException:
            self.close()
            raise

    def ask(self, request: Mapping[str, object]) -> Any:
        """The reply to one request.

        Raises:
            UserError: the process raised one.
            RuntimeError: the process failed, with its traceback, or it has ended.
        """
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
            line = self._replies.readline()
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):  # empty, or cut off when the process ended
            code = self._process.wait()
            raise RuntimeError(
                f"the measuring process ended with exit code {code} and without an answer (out of memory?)"
            )
        reply = json.loads(line)
        if "user_error" in reply:
            raise UserError(reply["user_error"])
        if "failed" in reply:
            raise RuntimeError(f"the measuring process failed:\n{reply['failed']}")
        return reply["reply"]

    def close(self) -> None:
        """Kill the process and wait for it: it has nothing to save, and an orderly exit takes a second."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):  # the process has ended with a request unread
            self._requests.close()
        self._replies.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _answer(make: Any, text: str) -> JsonObject:
    try:
        return {"reply": make(json.loads(text))}
    except UserError as error:
        return {"user_error": str(error)}
    except Exception as error:  # the owner gets every failure and decides
        if type(error).__name__ == "OutOfMemoryError":  # torch's: a process whose class needs no torch loads none
            full = str(error).split(". ")[0]
            return {
                "user_error": f"measuring: {full}: ask for smaller batch sizes or contexts, or free the GPU's memory"
            }
        return {"failed": traceback.format_exc()}


def main() -> int:
    """Serve the two pipes named on the command line until the first is closed."""
    requests = os.fdopen(int(sys.argv[1]), "r", encoding="utf-8")
    replies = os.fdopen(int(sys.argv[2]), "w", encoding="utf-8")
    module, name = sys.argv[3].split(":")
    answer: Any = None

    def begin(order: JsonObject) -> Any:
        nonlocal answer
        import_to_stay(module)
        answer = getattr(sys.modules[module], name)(order)
        return answer.facts

    for line in requests:
        replies.write(json.dumps(_answer(begin if answer is None else answer, line)) + "\n")
        replies.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
