"""Shards: WebDataset tars that are read by offset and never unpacked. Each tar has an index file with the offsets."""
