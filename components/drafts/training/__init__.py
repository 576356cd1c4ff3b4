"""Training of drafters: batches, losses, the optimiser and the loop."""
