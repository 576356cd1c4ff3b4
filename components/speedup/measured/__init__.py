"""What whole generations show beside what the model predicts."""
