"""Layers, attention masks, sampling and vocabularies that several methods share."""
