"""Steps run one after the other or side by side, each in a process of its own."""
