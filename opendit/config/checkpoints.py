"""The names that flags accept for checkpoints, and the suffixes of checkpoint files. Needs no torch, so that flags can
be checked without it."""

# By which a checkpoint can be the best one -> whether less is better: the held-out loss, and figures of samples.
BEST = {
    "val_loss": True,
    "fid": True,
    "sfid": True,
    "kid": True,
    "fvd": True,
    "frame_fid": True,
    "frechet_distance": True,
    "precision": False,
    "recall": False,
    "is": False,
    "accuracy": False,
    "direction": False,
}
CHECKPOINT_FORMATS = ("auto", "whole", "sharded")
# The file that stands for a set of tensors: the tensors themselves, the index of shards that ranks have written, or the
# index of files that share out the tensors, as transformers and diffusers write it.
WHOLE, SHARDS, PARTS = ".safetensors", ".shards.json", ".safetensors.index.json"
