"""The drafting methods, one file each."""
