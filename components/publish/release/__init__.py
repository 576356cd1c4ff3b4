"""A release folder: written, checked, tried and uploaded."""
