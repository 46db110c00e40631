"""Measure the quality of samples: FID and its kin, FVD and CLIP score, each with everything that decides it."""
