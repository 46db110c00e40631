"""Fused operations for DiT blocks.

Each file has one operation: its torch reference, Triton kernels and autograd function, in this order.

This package imports nothing, so that ``import opendit.kernels`` needs neither triton nor a GPU. Import each function
from its own module, e.g. ``from opendit.kernels.layernorm_modulate import layernorm_modulate``, and call
``opendit.kernels.common.kernels_available`` first: it returns the reason if kernels can't be used.
"""
