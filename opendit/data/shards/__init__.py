"""Shards: WebDataset tars, read by offset from an index beside each, without unpacking.

``index`` is the file beside a tar, and ``scan`` makes it. ``store`` reads bytes from disks and addresses, ``dataset``
and ``latents`` are the data sets for training, and ``program`` implements ``preprocess.py shards`` and ``index``.
"""
