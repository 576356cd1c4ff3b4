"""Measurements of serving engines: over HTTP, and of llama.cpp by its own programs."""
