"""Every operation is tested on three backends: the torch reference, Triton's interpreter, and the GPU."""

from __future__ import annotations

import os

import torch

# Read when Triton is first imported, and for the whole process: kernels are interpreted only where there is no GPU.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from hfkvq.kernels import use_interpreter


@pytest.fixture(params=["reference", "interpret", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    """Device on which operations run; within the test they dispatch to this backend."""
    if request.param == "reference":
        yield torch.device("cpu")
    elif request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        yield torch.device("cuda")
    elif torch.cuda.is_available():
        pytest.skip("kernels are compiled in this process, so they cannot be interpreted")
    else:
        with use_interpreter():
            yield torch.device("cpu")


@pytest.fixture(params=["interpret", pytest.param("cuda", marks=pytest.mark.gpu)])
def triton_backend(request):
    """As `backend`, kernels only: for tests that hold them against the reference bit for bit."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        yield torch.device("cuda")
    elif torch.cuda.is_available():
        pytest.skip("kernels are compiled in this process, so they cannot be interpreted")
    else:
        with use_interpreter():
            yield torch.device("cpu")
