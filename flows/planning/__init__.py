"""What has to run: wiring, keys, checks and the plan."""
