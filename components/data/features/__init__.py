"""Hidden states of the target: their format, their size, and how they are recorded."""
