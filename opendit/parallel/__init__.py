"""Device mesh, the Colossal-AI engine and the parallel strategies."""
