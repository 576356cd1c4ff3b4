"""A room of toy steps."""

from toybox.toys.grow import fail, grow, hang, judge, judge_all, leak, measure, plant
from toybox.toys.market import clock, sell, settle
from toybox.toys.quiet import gather
from toybox.toys.weed import weed

__all__ = [
    "clock",
    "fail",
    "gather",
    "grow",
    "hang",
    "judge",
    "judge_all",
    "leak",
    "measure",
    "plant",
    "sell",
    "settle",
    "weed",
]
