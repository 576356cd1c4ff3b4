"""The machine is described without torch, and a device is part of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from components.contract import UserError
from components.machine import describe_machine


def test_describing_the_machine_needs_no_torch_and_is_stable() -> None:
    program = (
        "import sys\nfrom components.machine import describe_machine\n"
        "print(describe_machine().machine_id, 'torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert said == [describe_machine().machine_id, "False"]


def test_another_device_is_another_machine() -> None:
    with pytest.raises(UserError, match="no such GPU"):
        describe_machine("cuda:97")
