"""A shell that starts pytest in the background makes it, and all it starts, deaf to Ctrl-C: these tests send it."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
