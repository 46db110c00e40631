"""Data sources: one file for each thing that ``--data_path`` can name.

To add a source, write ``NAME.py`` here with a function ``open_source(asked: Request) -> MediaDataset | None``, and a
row in ``opendit.config.data_sources.SOURCES``. The function returns None for what is not of its kind. It raises
ValueError, which names the flag and what to do, for what is of its kind and can't be used.
"""
