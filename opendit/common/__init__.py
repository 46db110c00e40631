"""Helpers for all other packages: atomic file writes, strict JSON, and lazy imports.

This package imports no other package of OpenDiT.
"""
