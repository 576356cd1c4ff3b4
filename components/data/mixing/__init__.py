"""Several sources in given shares, dealt into train, validation and test."""
