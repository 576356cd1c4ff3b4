"""A room of toy steps."""

from toybox.toys.grow import fail, grow, hang, judge, judge_all, leak, measure, plant

__all__ = ["fail", "grow", "hang", "judge", "judge_all", "leak", "measure", "plant"]
