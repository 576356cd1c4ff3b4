"""Rows from files, archives, streams and the hub, in all the shapes that people have."""
