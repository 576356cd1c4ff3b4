"""The model card: claims, limits, lineage, training data and provenance."""
