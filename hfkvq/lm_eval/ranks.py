"""The processes of an evaluation: the first one leads it, the others do what it asks of them.

lm-eval has each process evaluate its own documents and meet the others in between. There a process without a document
ends the run, one that fails leaves the others waiting, and ranks repeat on several machines.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState

_PATIENCE = timedelta(weeks=52)
"""The quick wait for the slow; a process that dies is noticed at once."""

_END = "end"

Handlers = Mapping[str, Callable[[Any], Any]]
"""What a process can be asked to do, by name."""


class RankError(RuntimeError):
    """A process has died, so that the others cannot go on."""


class Ranks:
    """Processes that were launched together, or this one alone.

    Attributes:
        rank: of this process, over all machines; 0 leads.
        count: processes.
    """

    def __init__(self, rank: int = 0, count: int = 1, group: Any = None) -> None:
        self.rank, self.count, self._group = rank, count, group
        self._sessions = 0
        # Whether the others are at work, and do not listen.
        self._busy = False

    @classmethod
    def join(cls) -> Ranks:
        """The processes that ``accelerate launch`` or ``torchrun`` has started; all of them must call this."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "LOCAL_RANK" not in os.environ:
            return cls()
        # Without ``cpu`` accelerate takes processes on a machine without a GPU for strangers.
        state = PartialState(cpu=not torch.accelerator.is_available(), timeout=_PATIENCE)
        # Objects are sent between processors, whatever the devices speak.
        group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        return cls(state.process_index, state.num_processes, group)

    def call(self, name: str, payloads: Sequence[Any], own: Callable[[Any], Any]) -> list[Any]:
        """Has every process do something, and waits for all results; for the leader.

        Args:
            name: key of the others' handlers.
            payloads: their argument, by rank; picklable.
            own: this process's handler. What it raises is raised at once.

        Raises:
            RankError: another process has failed; it has said why.
        """
        if self.count == 1:
            return [own(payloads[0])]
        self._scatter([(name, payload) for payload in payloads])
        self._busy = True
        found: list[Any] = [None] * self.count
        self._gather(own(payloads[0]), found)
        self._busy = False
        return found

    def ask(self, name: str, payload: Any, own: Callable[[Any], Any]) -> list[Any]:
        """`call` with the same for everyone."""
        return self.call(name, [payload] * self.count, own)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Around what the leader does: when the outermost one ends, the others may go."""
        self._sessions += 1
        done = False
        try:
            yield
            done = True
        finally:
            self._sessions -= 1
            # Those at work are ended by the launcher, or when they miss the leader.
            if not self._sessions and self.count > 1 and not self._busy:
                # After an error there may be nobody to tell, and the error is what matters.
                with contextlib.nullcontext() if done else contextlib.suppress(RankError):
                    self._scatter([(_END, done)] * self.count)

    def follow(self, handlers: Handlers) -> None:
        """Does what the leader asks for, until its session ends.

        Raises:
            SystemExit: the leader has failed, and says why itself.
            RankError: it is gone.
        """
        while True:
            name, payload = self._scatter(None)
            if name == _END:
                if not payload:
                    raise SystemExit(0)
                return
            self._gather(handlers[name](payload), None)

    def _scatter(self, parts: Sequence[Any] | None) -> Any:
        part: list[Any] = [None]
        with self._watching():
            dist.scatter_object_list(part, None if parts is None else list(parts), group=self._group)
        return part[0]

    def _gather(self, mine: Any, found: list[Any] | None) -> None:
        with self._watching():
            dist.gather_object(mine, found, group=self._group)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._busy = True
            raise RankError(f"one of {self.count} processes has died; its own output says why ({error}).") from error


def deal(asked: Sequence[tuple[str, tuple[Any, ...]]], count: int, together: bool) -> list[list[int]]:
    """Numbers of the requests of each process.

    Args:
        asked: task and arguments of each request.
        count: processes.
        together: whether requests of one context stay in one process, which then reads it once.
    """
    groups: dict[Any, list[int]] = {}
    for number, (task, arguments) in enumerate(asked):
        groups.setdefault((task, arguments[0]) if together else number, []).append(number)
    # Like cards, the longest first, each task by itself: everyone has its share of the work.
    tasks = {task: i for i, task in enumerate(dict.fromkeys(task for task, _ in asked))}
    order = sorted(groups.values(), key=lambda group: (tasks[asked[group[0]][0]], -len(asked[group[0]][1][0])))
    return [[number for group in order[rank::count] for number in group] for rank in range(count)]
