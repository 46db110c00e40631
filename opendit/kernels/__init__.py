"""Fused operations for DiT blocks. An operation's file has its torch reference, Triton kernels and autograd function.

This file imports nothing, so importing the package needs neither triton nor a GPU. Before you use a kernel, call
``opendit.kernels.common.kernels_available``. The result gives the reason if kernels can't be used.
"""
