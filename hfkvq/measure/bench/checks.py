"""No speed-up counts behind a red gate: kernel tests, and a self-check against the torch reference."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hfkvq.kernels import use_reference
from hfkvq.kernels.arguments import AttentionArguments

from .baselines import PLAIN
from .cases import Shape, fill
from .split_kv import split_kv

CONTEXT = 1111
"""Sink, full pages, a page that is not full and windows, in every format."""

LIMIT = 0.02
"""Allowed error, root mean square, relative to the output. Rounding to bf16 makes 0.002; a wrong scale, index, token
or page makes a tenth or more."""


class GateError(RuntimeError):
    """What was to be measured is not right."""


def checkout() -> Path | None:
    """Root of the source checkout that this package runs from, or None if it is installed."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "tests" / "kernels").is_dir() and (root / "pyproject.toml").is_file() else None


def run_tests(root: Path) -> None:
    """Runs the GPU tests of the kernels. Raises GateError unless they pass."""
    if importlib.util.find_spec("pytest") is None:
        raise GateError("the kernel tests need pytest; install it, or leave them out with --skip-tests.")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "tests/kernels"]
    done = subprocess.run(command, cwd=root, check=False)
    if done.returncode == 5:
        raise GateError("the kernel tests were all left out (pytest found none marked gpu); nothing was measured.")
    if done.returncode:
        raise GateError("the kernel tests fail; nothing was measured. --skip-tests leaves them out.")


def error_of(got: Tensor, exact: Tensor) -> float:
    """Root mean square error relative to the output; infinite if anything is not finite."""
    got, exact = got.float(), exact.float()
    if not torch.isfinite(got).all():
        return float("inf")
    return float((got - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def self_check(
    formats: Iterable[str],
    shapes: Iterable[Shape],
    device: torch.device,
    reference: Callable[[], contextlib.AbstractContextManager[None]] = use_reference,
) -> dict[str, float]:
    """Error of each format (sealed and attended by the kernels) and of the plain kernel, on small shapes.

    Args:
        formats: names.
        shapes: their heads and dtypes are taken, not their lengths.
        device: where to run.
        reference: context within which operations take the torch reference.

    Returns:
        Largest error by name.

    Raises:
        GateError: an error is too large.
    """
    small = {dataclasses.replace(shape, batch=2, context=CONTEXT, queries=1): None for shape in shapes}
    errors: dict[str, float] = {}
    for shape in small:
        query, keys, values = shape.data(device)
        found = {}
        if not shape.rope_dim:
            exact = F.scaled_dot_product_attention(query.float(), keys.float(), values.float(), enable_gqa=True)
            found[PLAIN] = error_of(split_kv(query, keys, values, shape.scaling), exact)
        for name in formats:
            got = fill(name, keys, values).attend(query, AttentionArguments(shape.scaling))
            with reference():
                exact = fill(name, keys, values).attend(query, AttentionArguments(shape.scaling))
            found[name] = error_of(got, exact)
        for name, error in found.items():
            errors[name] = max(error, errors.get(name, 0.0))
    wrong = {name: error for name, error in errors.items() if not error <= LIMIT}
    if wrong:
        listed = ", ".join(f"{name} by {error:.3g}" for name, error in wrong.items())
        raise GateError(
            f"kernels differ from the torch reference: {listed} (relative, allowed {LIMIT}); nothing was measured."
        )
    return errors
