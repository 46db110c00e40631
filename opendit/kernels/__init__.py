"""Fused operations for DiT blocks. A file has one operation: its torch reference, Triton kernels and autograd function.

This package imports nothing, so that it needs neither triton nor a GPU. Before you use a kernel, call
``opendit.kernels.common.kernels_available``, which returns the reason if kernels can't be used.
"""
