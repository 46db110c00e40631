"""Data sets that megatron-energon prepared, read as they are and without that package.

``prepared`` reads a folder's ``.nv-meta/`` and makes the indexes of its tars, ``source`` reads a YAML file of several
such folders, and ``cooked`` is the data set whose samples are read by the user's own code.
"""
