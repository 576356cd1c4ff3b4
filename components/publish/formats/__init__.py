"""One file for each checkpoint format that others can load."""
