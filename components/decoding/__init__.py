"""Draft, verify, commit: the decoding loop and its rules."""
