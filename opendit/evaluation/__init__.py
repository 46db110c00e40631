"""Measure the quality of samples by FID and similar metrics, and record the settings behind each value."""
