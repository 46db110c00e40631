"""Data sources: what ``--data_path`` can name, one file each.

To add one, write ``NAME.py`` here with a function ``open_source(asked: Request) -> MediaDataset | None``, and the
constants of ``opendit.data.names.SourceDescription``, which are read without running the file. It returns None for
what is not of its kind, and raises ValueError, which names the flag and what to do, for what is and can't be used.
"""
