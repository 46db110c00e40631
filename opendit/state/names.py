"""What can be asked for by name of checkpoints, and what the names of their files end with. Needs no torch, so that
flags are checked by it."""

BEST = ("val_loss",)  # by which a checkpoint can be the best one
CHECKPOINT_FORMATS = ("auto", "whole", "sharded")
# The file that stands for a set of tensors: the tensors themselves, the index of shards that ranks have written, or the
# index of files that share out the tensors, as transformers and diffusers write it.
WHOLE, SHARDS, PARTS = ".safetensors", ".shards.json", ".safetensors.index.json"
