"""Helpers for all other packages, of which it imports none: atomic file writes, strict JSON, and lazy imports."""
