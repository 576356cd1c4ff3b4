"""Resampling and distributions behind every interval."""
