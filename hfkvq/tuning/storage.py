"""Storages of studies: memory, a database, or a journal file."""

from __future__ import annotations

import importlib.util
import logging
import time
import warnings
from pathlib import Path

from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, OperationalError, ProgrammingError

from hfkvq.bounded import DAMAGE, parse_json

logger = logging.getLogger("hfkvq")

JOURNALS = (".log", ".journal")

HEARTBEAT, GRACE = 20, 60
"""Seconds between a process's heartbeats in a database, and without one after which its trial is run again."""

RETRIES = 2
"""Times that a trial is run again after its process died: it may be the trial that kills them."""


def open_storage(where: str | None) -> BaseStorage | None:
    """Opens, or creates, a storage.

    Args:
        where: an SQLAlchemy URL (``sqlite:///tuning.db``, ``postgresql://...``, ``mysql://...``), or a path that ends
            in ``.log`` or ``.journal``. None is memory.

    Raises:
        ValueError: neither, a folder that does not exist, a driver that is missing, or a database that cannot be
            reached.
    """
    if where is None:
        return None
    if "://" not in where:
        path = Path(where).expanduser()
        if path.suffix not in JOURNALS:
            raise ValueError(
                f"storage: got {where!r}, allowed a URL (sqlite:///tuning.db, postgresql://...) or a journal file that "
                f"ends in {' or '.join(JOURNALS)}."
            )
        if not path.parent.is_dir():
            raise ValueError(f"storage: the folder of {where!r} does not exist.")
        try:
            _repair(path)
            return JournalStorage(JournalFileBackend(str(path)))
        except OSError as error:
            raise ValueError(f"storage: {where!r} cannot be opened ({error.strerror}); choose another file.") from None
        except _DamagedJournal as error:
            raise ValueError(f"storage: {where}: {error}") from None
        except (*DAMAGE, RecursionError) as error:
            damage = f"{type(error).__name__} {error}".strip()
            raise ValueError(
                f"storage: {where!r} is not a journal of Optuna, or is damaged ({damage}); choose another file."
            ) from None
    try:
        return _database(_with_driver(where))
    except ImportError as error:
        hint = " pip install 'hfkvq[postgres]' brings one." if where.startswith("postgres") else ""
        raise ValueError(f"storage: {hidden(where)!r} needs a driver that is not installed: {error}.{hint}") from None
    except Exception as error:
        # Errors of SQLAlchemy have many types, and chains of causes.
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ValueError(f"storage: {hidden(where)!r} cannot be reached: {reason}") from None


class _DamagedJournal(Exception):
    """Raised for a line of a journal that no process of Optuna wrote."""


def _repair(path: Path) -> None:
    """Takes a torn last line, of a process that was killed or of a full disk, from a journal.

    Optuna would append to it, and no process could read the journal any more.
    """
    if not path.exists():
        return
    lock = JournalFileSymlinkLock(str(path))
    lock.acquire()
    try:
        *lines, torn = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                operation = parse_json(line.decode("utf-8"))
            except ValueError as error:
                operation = error
            if not isinstance(operation, dict) or "op_code" not in operation:
                raise _DamagedJournal(
                    f"line {number} is no operation of Optuna's journals (got {line[:40]!r}); delete the line, or "
                    "choose another file."
                )
        if torn and not lines:
            raise _DamagedJournal(
                f"line 1 is no operation of Optuna's journals (got {torn[:40]!r}); choose another file."
            )
        if torn:
            with path.open("rb+") as file:
                file.truncate(sum(len(line) + 1 for line in lines))
            logger.warning("%s: the last line was torn, and is taken out: %r", path, torn[:80])
    finally:
        lock.release()


def hidden(where: str) -> str:
    """Storage's name without its password."""
    try:
        return make_url(where).render_as_string(hide_password=True) if "://" in where else where
    except ArgumentError:
        return where


def _with_driver(url: str) -> str:
    """URL with the installed driver of PostgreSQL, whose usual prefixes SQLAlchemy takes for an old one."""
    scheme, _, rest = url.partition("://")
    old = importlib.util.find_spec("psycopg2") is not None
    return f"postgresql{'' if old else '+psycopg'}://{rest}" if scheme in ("postgres", "postgresql") else url


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
