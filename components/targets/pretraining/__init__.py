"""How the built-in target was trained."""
