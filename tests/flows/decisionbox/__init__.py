"""One toy room whose step decides a depth, to see what the UI shows of a decision."""
