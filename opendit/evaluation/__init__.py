"""Measure the quality of samples by FID and similar metrics, and record all settings that affect each value."""
