"""Beside each architecture its plan: what may be parallelised in it, and what it costs, as data (``terms``)."""
