"""Captured steps without a GPU: what a CUDA graph does, run again in Python in place of being replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from hfkvq.caches import capture, once
from hfkvq.caches.model_calls import inside_call
from hfkvq.caches.recorded import recording


class PythonGraph:
    """Stands for `hfkvq.caches.capture.CapturedGraph`: records nothing, and runs the step at every replay.

    As of a graph, nothing is carried out when it is made, its inputs and outputs stay where they are, and it may ask
    for nothing that the host knows: layers answer as in a recorded step.
    """

    made = 0
    failing = False

    def __init__(self, devices: list[torch.device], run: Callable[[Any], Any], cache: Any) -> None:
        if PythonGraph.failing:
            raise RuntimeError("operation not permitted when stream is capturing")
        PythonGraph.made += 1
        self._run, self.replays = run, 0

    def replay(self, cache: Any) -> Any:
        """The step, and its outputs as somebody else's."""
        self.replays += 1
        with inside_call(), recording():
            out = self._run(cache)
        return pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, out)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[PythonGraph]]:
    """Steps on the CPU are captured; how often is counted."""
    monkeypatch.setitem(capture.RECORDERS, "cpu", PythonGraph)
    PythonGraph.made, PythonGraph.failing = 0, False
    once.say_once.cache_clear()
    yield PythonGraph
    once.say_once.cache_clear()
