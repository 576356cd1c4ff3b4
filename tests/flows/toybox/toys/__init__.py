"""A room of toy steps."""

from toybox.toys.grow import fail, grow, hang, judge, judge_all, leak, measure, plant
from toybox.toys.quiet import gather
from toybox.toys.weed import weed

__all__ = ["fail", "gather", "grow", "hang", "judge", "judge_all", "leak", "measure", "plant", "weed"]
