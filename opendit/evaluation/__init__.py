"""How good samples are: FID and its kin, FVD, CLIP score, each with everything that decides it."""
