"""What a fresh process of the tests opens: it says where it is, fails, or ends, as it is told."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from components.contract import UserError


class Toy:
    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        do_as_told(order)

    @property
    def facts(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "folder": os.getcwd(), "order": self.order}

    def __call__(self, request: dict[str, Any]) -> Any:
        return do_as_told(request)


def do_as_told(request: dict[str, Any]) -> Any:
    match request.get("do"):
        case "refuse":
            raise UserError("batch_sizes: too many: ask for fewer")
        case "fill":
            import torch  # two seconds, which the other tests do not wait for

            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.88 GiB. GPU 0 has 79.18 GiB.")
        case "fail":
            raise ValueError("our own mistake")
        case "exit":
            os._exit(3)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sleep":
            time.sleep(600)
        case "long":
            return "x" * request["length"]
    return request
