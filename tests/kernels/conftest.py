"""Every operation is tested on three backends: the torch reference, Triton's interpreter, and the GPU."""

from __future__ import annotations

import contextlib
import os

import torch

# Read when Triton is first imported, and for the whole process: kernels are interpreted only where there is no GPU.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from hfkvq.kernels import use_interpreter

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def pytest_collection_modifyitems(items):
    """Cases under the interpreter are dropped where a test's mark ``interpreted`` leaves them out.

    ``interpreted("a", "b")`` keeps cases of these values. Of a product, ``turns=2, over=("spec", "kind")`` keeps those
    whose places in both add up to a multiple of two: every second kind of a spec, the others of the next one.
    """

    places = {}

    def is_run(item):
        marker, params = item.get_closest_marker("interpreted"), getattr(item, "callspec", None)
        if marker is None or "interpret" not in params.params.values():
            return True
        # Values of each parameter, in the order in which they come.
        over = [(places.setdefault((item.function, x), {}), params.params[x]) for x in marker.kwargs.get("over", ())]
        if sum(known.setdefault(value, len(known)) for known, value in over) % marker.kwargs.get("turns", 1):
            return False
        named = any(value in marker.args for value in params.params.values() if isinstance(value, str))
        return named or bool(over and not marker.args)

    items[:] = [item for item in items if is_run(item)]


@contextlib.contextmanager
def _dispatch_to(backend):
    """Yields the device on which operations run; within the context they dispatch to the backend."""
    if backend == "reference":
        yield torch.device("cpu")
    elif backend == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        yield torch.device("cuda")
    elif torch.cuda.is_available():
        pytest.skip("kernels are compiled in this process, so they cannot be interpreted")
    else:
        with use_interpreter():
            yield torch.device("cpu")


@pytest.fixture(params=["reference", "interpret", GPU])
def backend(request):
    """The torch reference or the kernels."""
    with _dispatch_to(request.param) as device:
        yield device


@pytest.fixture(params=["interpret", GPU])
def triton_backend(request):
    """The kernels only: for tests that hold them against the reference bit for bit."""
    with _dispatch_to(request.param) as device:
        yield device
