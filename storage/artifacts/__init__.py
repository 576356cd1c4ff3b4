"""Artifacts: the local store, a shared store, sessions and checksums."""
