"""Whole generations with and without a drafter, taking turns on the same prompts."""
