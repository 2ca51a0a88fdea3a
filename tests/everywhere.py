"""What every test gets: fixed seeds, one thread, and poisoned memory."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import random
import sys

import torch

# Read when Triton is first imported, and for the whole process: kernels are interpreted only where there is no GPU.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from hfkvq.kernels import use_interpreter

# PyTorch looks up once which functions a device context redirects; it must not find the poisoned ones below.
with torch.device("meta"):
    torch.empty(0)

# Tiny tensors: more threads cost more than they bring, and xdist has processes.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Tests marked `gpu` are skipped where there is none."""
    for item in items if not torch.cuda.is_available() else ():
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish():
    """What was imported is many objects, which no test's search for cycles has to go through again."""
    gc.collect()
    gc.freeze()
    gc.enable()
    # pytest gives its handlers to each logger that does not propagate, six times a test; PyTorch has some fifty.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.partition(".")[0] == "torch":
            logger.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Nor what the tests of a file leave behind (compiled graphs, kernels, reports): half a million objects."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter():
    """Where kernels are interpreted, with as little overhead as that can be had."""
    if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
        from tests.interpreter import hasten

        hasten()


@pytest.fixture(autouse=True)
def seeds():
    """The same random numbers in every test, whatever ran before."""
    random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        # Without a GPU that notes at each call, with the stack it comes from, which GPUs are to be seeded once they are
        # there: a millisecond.
        torch.default_generator.manual_seed(0)


def _fill(x: torch.Tensor) -> torch.Tensor:
    """NaN where there is one, else bits that make an absurd count, index or code."""
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_meta or not x.numel():
        return x
    if x.is_floating_point() and x.element_size() > 1:
        return x.fill_(float("nan"))
    if x.dtype == torch.bool:
        return x.fill_(True)
    # Not 0xFF alone: as an i32 that is -1, a legal "no such token".
    x.view(torch.uint8).fill_(0xFF if x.element_size() == 1 else 0x5A)
    return x


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Uninitialized memory that hfkvq asks for holds NaN or nonsense, so whoever reads it is found out."""

    def poisoned(make):
        def wrapper(*args, **kwargs):
            made = make(*args, **kwargs)
            if torch.compiler.is_compiling():
                return made
            caller = sys._getframe(1).f_globals.get("__name__", "")
            return _fill(made) if caller.split(".")[0] == "hfkvq" else made

        return wrapper

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def kernels_at_their_launch(monkeypatch):
    """Kernels are compiled when they are launched: a test needs few of those that a cache compiles for."""
    if torch.cuda.is_available():
        monkeypatch.setattr("hfkvq.caches.cache.compile_kernels", lambda *_: None)


@pytest.fixture(params=["reference", "interpret", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    """Name of the backend; within the test operations dispatch to it. Tensors go to `device`."""
    if request.param == "cuda":
        yield "cuda"
    elif request.param == "reference":
        yield "reference"
    elif torch.cuda.is_available():
        pytest.skip("kernels are compiled in this process, so they cannot be interpreted")
    elif importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    else:
        with use_interpreter():
            yield "interpret"


@pytest.fixture
def device(backend):
    """Device of the backend's tensors."""
    return torch.device("cuda" if backend == "cuda" else "cpu")
