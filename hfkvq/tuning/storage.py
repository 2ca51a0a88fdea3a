"""Storages of studies: memory, or a database."""

from __future__ import annotations

import importlib.util
import time
import warnings

from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, OperationalError, ProgrammingError

HEARTBEAT, GRACE = 20, 60
"""Seconds between a process's heartbeats in a database, and without one after which its trial is run again."""

RETRIES = 2
"""Times that a trial is run again after its process died: it may be the trial that kills them."""


def open_storage(where: str | None) -> BaseStorage | None:
    """Opens, or creates, a storage.

    Args:
        where: an SQLAlchemy URL (``sqlite:///tuning.db``, ``postgresql://...``, ``mysql://...``). None is memory.

    Raises:
        ValueError: no URL, a driver that is missing, or a database that cannot be reached.
    """
    if where is None:
        return None
    if "://" not in where:
        raise ValueError(f"storage: got {where!r}, allowed a URL (sqlite:///tuning.db, postgresql://...).")
    try:
        # SQLAlchemy takes the usual prefixes of PostgreSQL for an old driver.
        scheme, _, rest = where.partition("://")
        old = scheme not in ("postgres", "postgresql") or importlib.util.find_spec("psycopg2") is not None
        return _database(where if old else f"postgresql+psycopg://{rest}")
    except ImportError as error:
        hint = " pip install 'hfkvq[postgres]' brings one." if where.startswith("postgres") else ""
        raise ValueError(f"storage: {hidden(where)!r} needs a driver that is not installed: {error}.{hint}") from None
    except Exception as error:
        # Errors of SQLAlchemy have many types, and chains of causes.
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ValueError(f"storage: {hidden(where)!r} cannot be reached: {reason}") from None


def hidden(where: str) -> str:
    """Storage's name without its password."""
    try:
        return make_url(where).render_as_string(hide_password=True) if "://" in where else where
    except ArgumentError:
        return where


def _database(url: str) -> RDBStorage:
    for attempt in range(10):
        try:
            with warnings.catch_warnings():
                # Heartbeats are experimental in Optuna since 2.9.
                warnings.simplefilter("ignore", ExperimentalWarning)
                return RDBStorage(
                    url,
                    heartbeat_interval=HEARTBEAT,
                    grace_period=GRACE,
                    heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=RETRIES),
                )
        except (IntegrityError, OperationalError, ProgrammingError) as error:
            # Processes that start together all create the tables, and all but one find them there.
            if attempt == 9 or not any(words in str(error) for words in ("UNIQUE", "already exists", "Duplicate")):
                raise
            time.sleep(0.1 * (attempt + 1))
    raise AssertionError
