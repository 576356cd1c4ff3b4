"""Exact and near duplicates, and contamination by benchmarks."""
