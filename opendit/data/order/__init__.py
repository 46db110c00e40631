"""The order of samples: the rows of a data set that each step trains on, as a pure function of (seed, step)."""
