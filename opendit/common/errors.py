"""Errors that several rooms raise."""


class DataError(RuntimeError):
    """The data can't be used; the message tells the user why, no traceback needed."""
