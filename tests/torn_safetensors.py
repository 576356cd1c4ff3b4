"""What a SIGKILL leaves of a safetensors file that was just being written, made by a real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

WRITER = """
import sys, torch
from safetensors.torch import save_file
tensors = {str(number): torch.zeros(1 << 20, dtype=torch.uint8) for number in range(64)}
while True:
    save_file(tensors, sys.argv[1])
"""


def killed_while_writing(folder: Path) -> list[str]:
    """Kill a writer of folder/model.safetensors half-way; the names of what lies in the folder beside that file."""
    file = folder / "model.safetensors"
    deadline = time.monotonic() + 120
    with subprocess.Popen([sys.executable, "-c", WRITER, str(file)]) as writer:
        while True:
            assert writer.poll() is None and time.monotonic() < deadline, "it was never seen writing"
            os.kill(writer.pid, signal.SIGSTOP)
            left = sorted(path.name for path in folder.iterdir() if path != file)
            if left:
                writer.kill()
                break
            os.kill(writer.pid, signal.SIGCONT)
            time.sleep(0.002)
    file.unlink(missing_ok=True)
    return left
