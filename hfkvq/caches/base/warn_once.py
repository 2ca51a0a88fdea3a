"""Warnings that are said once."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger(__name__)


@functools.cache
def say_once(what: str) -> None:
    """Logs a warning, the first time."""
    logger.warning(what)
