"""What the user types: the flags of each program, recipes, and the checks that need nothing heavy: no torch."""
