"""What can be asked for by name: engines, precisions and ways to share a sequence. Needs no torch, so flags are checked
by it."""

PLUGINS = ("zero2", "gemini", "ddp")
PRECISIONS = ("fp16", "bf16", "fp32")
SEQUENCE_TYPES = ("auto", "fastseq", "ulysses", "ring", "usp")
OWN_ATTENTION = ("ring", "usp")  # that attend to a part of the keys at a time, by a kernel of their own
