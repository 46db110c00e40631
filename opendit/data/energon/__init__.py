"""Data sets that megatron-energon prepared, read unchanged and without that package.

``prepared`` reads a folder's ``.nv-meta/`` and makes the indexes of its tars. ``source`` reads a YAML file that lists
several such folders. ``cooked`` is the data set whose samples the user's own code reads.
"""
