"""Steps of simulated nights: what is measured of a drafter follows from a truth that the campaign knows."""
