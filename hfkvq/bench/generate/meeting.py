"""Several runs of the benchmark that prepare side by side, and take turns at the GPU when it counts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Meeting:
    """Where runs wait for each other: compiling takes most of a line's time, and only processors.

    A run that is ready to time a line waits until so many are, or its patience is at an end; then one after another
    times its own, while the others wait. Each run is a process with a model of its own.

    Attributes:
        folder: one that all runs see.
        of: how many runs there are.
        patience: seconds to wait for the others.
    """

    folder: Path
    of: int
    patience: float = 300.0
    _turns: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        """Checks the number, and makes the folder."""
        if self.of < 1:
            raise ValueError(f"of: got {self.of}, allowed 1 or more runs.")
        self.folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Within this context no other run times anything, and all are done with preparing the same turn."""
        self._turns += 1
        (self.folder / f"ready-{self._turns}-{os.getpid()}").touch()
        end = time.monotonic() + self.patience
        while len(list(self.folder.glob(f"ready-{self._turns}-*"))) < self.of and time.monotonic() < end:
            time.sleep(0.05)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
