"""Helpers for all other packages: atomic file writes, strict JSON, and lazy imports.

This package imports none of the others.
"""
