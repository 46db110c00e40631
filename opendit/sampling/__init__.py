"""Sampling: draw pictures and clips from a checkpoint."""
