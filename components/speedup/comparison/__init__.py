"""A challenger against a champion on the same prompts, and the rule of promotion."""
