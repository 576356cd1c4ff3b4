"""A drafter on disk: its files, and weights of few bits."""
