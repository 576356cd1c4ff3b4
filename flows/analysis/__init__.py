"""Comparisons, trends and generations asked for at the command line."""
