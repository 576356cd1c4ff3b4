"""Timings and campaigns that are run by hand and leave a record in benchmarks/results/."""
