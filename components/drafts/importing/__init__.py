"""Reads drafters that other projects wrote: one file for each family of formats."""
