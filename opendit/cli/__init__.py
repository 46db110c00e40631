"""Parse and check what the user types: the flags of each program and recipes. Needs no torch."""
