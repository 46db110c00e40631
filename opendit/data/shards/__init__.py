"""Shards: WebDataset tars, read by offset from an index beside each, without unpacking.

``index`` is the file beside a tar, and ``scan`` makes it. ``store`` and ``remote`` read bytes from disks and addresses,
``dataset`` and ``latents`` are the data sets for training. ``writer`` and ``program`` implement ``preprocess.py
shards`` and ``preprocess.py index``.
"""
