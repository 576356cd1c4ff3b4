"""Serving engines: their HTTP interface, what each one serves, and how each one is launched."""
