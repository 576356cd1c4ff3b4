"""Forward passes of a target: our own, and transformers'."""
