"""A room of toy steps that decide and publish."""

from decisionbox.decisions.decide import decide
from decisionbox.decisions.publish import release

__all__ = ["decide", "release"]
