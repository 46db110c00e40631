"""What can be asked for by name: attention kernels and rematerialization policies. Needs no torch, so flags are checked
by it."""

TORCH_ATTENTION = ("cudnn", "flash", "efficient", "math")  # torch's own kernels
PACKAGE = "flash_attn"  # the package of that name
ATTENTION = ("auto", *TORCH_ATTENTION, PACKAGE)
RECOMPUTE = ("none", "norms", "cheap", "half", "mlp")
