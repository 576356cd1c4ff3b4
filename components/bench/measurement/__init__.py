"""A measurement in fresh processes: who owns it, what a process does, when it may end."""
