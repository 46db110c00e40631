"""The names of attention kernels and rematerialization policies. Needs no torch, so that flags can be checked without
it."""

TORCH_ATTENTION = ("cudnn", "flash", "efficient", "math")  # torch's own kernels
PACKAGE = "flash_attn"  # the package of that name
ATTENTION = ("auto", *TORCH_ATTENTION, PACKAGE)
RECOMPUTE = ("none", "norms", "cheap", "half", "mlp")
