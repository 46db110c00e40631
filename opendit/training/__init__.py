"""A training run, from its checked flags to its last checkpoint."""
