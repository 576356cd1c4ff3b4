"""Depth policies from rows that other people measured."""
