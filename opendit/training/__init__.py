"""A training run, from checked flags to the last checkpoint."""
