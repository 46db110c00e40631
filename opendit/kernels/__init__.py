"""Fused operations for DiT blocks, one file per operation: torch reference, Triton kernels, autograd, in that order.

Nothing is imported here, so ``import opendit.kernels`` needs neither triton nor a GPU. Take each function from its
own module, e.g. ``from opendit.kernels.layernorm_modulate import layernorm_modulate``, and ask
``opendit.kernels.common.kernels_available`` first: it says why when a kernel can't be used.
"""
