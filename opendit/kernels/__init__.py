"""Fused operations for DiT blocks, one file per operation: torch reference, Triton kernels, autograd, in that order.

Nothing is imported here, so that ``import opendit.kernels`` needs neither triton nor a GPU. Import each function from
its own module, e.g. ``from opendit.kernels.layernorm_modulate import layernorm_modulate``, and call
``opendit.kernels.common.kernels_available`` first, which gives the reason when kernels can't be used.
"""
