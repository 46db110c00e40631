"""Shards: WebDataset tars that are read by offset and never unpacked. Each tar has an index file with the offsets.

``index`` defines the index file and makes it. ``store`` reads bytes from disks and addresses. ``dataset`` and
``latents`` are the data sets for training. ``program`` implements ``preprocess.py shards`` and ``preprocess.py index``.
"""
