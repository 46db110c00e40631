"""Collect the messages that the package logs."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect messages of level INFO and above that the package logs in this process within the block."""
    messages: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("opendit")
    handler.emit = lambda record: messages.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
