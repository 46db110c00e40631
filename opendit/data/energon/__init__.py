"""Data sets that megatron-energon prepared, read as they are and without that package.

``prepared`` reads a folder's ``.nv-meta/``, ``metadataset`` a YAML file of several such folders, ``indexes`` makes the
indexes of their tars, and ``cooked`` is the data set whose samples are read by the user's own code.
"""
