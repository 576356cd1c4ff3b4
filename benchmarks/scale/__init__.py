"""Training drafters on clusters that were not at hand: bytes and work by arithmetic, time by a discrete simulation."""
