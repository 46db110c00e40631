"""What can be asked for by name of checkpoints. Needs no torch, so flags are checked by it."""

CHECKPOINT_FORMATS = ("auto", "whole", "sharded")
