"""Ground of the caches: warnings that are said once, switches, and tensors that outlive inference mode."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from hfkvq.kernels.dispatch import exact

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def warn_once(what: str) -> None:
    """Logs a warning, the first time."""
    logger.warning(what)


def read_switch(variable: str, default: bool, meaning: str) -> bool:
    """An environment variable that is 1 or 0; ``meaning`` is that of 1, for the error."""
    given = os.environ.get(variable, str(int(default))).strip().lower()
    if given not in ("0", "1", "false", "true", "off", "on"):
        raise ValueError(f"{variable}: got {given!r}, allowed 1 ({meaning}) or 0.")
    return given in ("1", "true", "on")


def outside_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Lets a function make ordinary tensors of its own dtypes also where its caller is in inference mode or autocast.

    What is made in inference mode can be written to in no other, and a prompt need not run in the mode of the steps
    after it. Autocast would join tensors of several dtypes in one of them, and refuses float8.
    """
    function = exact(function)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # The compiler cannot trace the question, and has left the mode before it traces.
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return run
