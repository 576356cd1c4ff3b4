"""What a plain step, a verification and a draft step cost in time."""
