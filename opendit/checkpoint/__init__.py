"""Read and write weights and checkpoints, and check the files that hold them."""
