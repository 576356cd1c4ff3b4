"""A room of one step."""

from decisionbox.decisions.decide import decide

__all__ = ["decide"]
