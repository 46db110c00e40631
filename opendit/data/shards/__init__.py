"""Shards: WebDataset tars, read by offset from an index beside each, without unpacking.

``index`` is the file beside a tar, ``scan`` makes one, ``store`` reads bytes, ``dataset`` is what trains on them,
``writer`` and ``program`` are ``preprocess.py shards`` and ``preprocess.py index``.
"""
