"""The order of samples: which rows of a data set every step trains on, as a pure function of (seed, step)."""
