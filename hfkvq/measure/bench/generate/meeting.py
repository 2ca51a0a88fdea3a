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

    A run that is ready to time a line waits until all are, or its patience is at an end; then one after another times
    its own, and none prepares its next line before all have. Each run is a process with a model of its own.

    Attributes:
        folder: one that all runs see, empty before the first of them begins.
        of: how many runs there are.
        patience: seconds to wait for the others to be ready, and then for them to be done.
        name: of this run.
    """

    folder: Path
    of: int
    patience: float = 300.0
    name: str = field(default_factory=lambda: str(os.getpid()))
    _turns: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        """Checks the number, and makes the folder."""
        if self.of < 1:
            raise ValueError(f"of: got {self.of}, allowed 1 or more runs.")
        self.folder.mkdir(parents=True, exist_ok=True)

    def _say(self, what: str) -> None:
        (self.folder / f"{what}-{self._turns}-{self.name}").touch()

    def _await(self, what: str) -> None:
        """Waits until all runs have said so of this turn, or have left."""
        end = time.monotonic() + self.patience
        while time.monotonic() < end:
            said = [*self.folder.glob(f"{what}-{self._turns}-*"), *self.folder.glob("left-*-*")]
            if len({path.name.split("-", 2)[2] for path in said}) >= self.of:
                return
            time.sleep(0.05)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Within this context no other run times or prepares anything, as long as all have patience."""
        self._turns += 1
        self._say("ready")
        self._await("ready")
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        self._say("done")
        self._await("done")

    @contextlib.contextmanager
    def line(self) -> Iterator[None]:
        """Around a line that is to have a turn: if it fails before, nobody waits for it."""
        before = self._turns
        try:
            yield
        finally:
            if self._turns == before:
                self._turns += 1
                self._say("ready")
            self._say("done")
        # Not where a line ends the run.
        self._await("done")

    def leave(self) -> None:
        """Says that this run has no more lines."""
        self._say("left")
