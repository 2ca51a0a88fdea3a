"""Kernels compile, as far as that can be seen without a GPU: the interpreter runs Python, which knows no types."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def failures_of(log, printed):
    """Where, in which case and how a GPU's kernels failed."""
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    failures = [event[1:] for event in events if event[0] == "failed"]
    if events[-1][0] != "done":
        failures.append([*events[-1][1:3], f"The process ended here. All processes printed:\n{printed[-4000:]}"])
    return failures


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("most", "gpus"), [(2, ["9.0"]), pytest.param(0, ["8.0", "9.0", "10.0"], marks=pytest.mark.slow)]
)
def test_kernels_pass_the_front_end(tmp_path, most, gpus):
    """For these compute capabilities, all variants or a few of each kernel; `compile_kernels` says what runs."""
    logs = {capability: tmp_path / capability for capability in gpus}
    # A process of its own, since Triton decides when it is imported whether it compiles. What was tuned on this machine
    # shall not matter.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"HFKVQ_TUNING": str(tmp_path / "none.json"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.kernels.compile_kernels"]
    command += [str(tmp_path), str(most), *gpus]
    run = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert all(log.exists() for log in logs.values()), run.stdout

    # What is wrong with a kernel is wrong in many cases and mostly for all GPUs: one error of a kind is enough.
    found = {}
    for capability, log in logs.items():
        for where, case, error in failures_of(log, run.stdout):
            _, gpus, cases = found.setdefault((where, error.splitlines()[0]), (error, {}, {}))
            gpus[capability] = cases[case] = True
    said = [
        f"{where} fails for compute capability {', '.join(gpus)}; {len(cases)} cases, the first: {next(iter(cases))}\n"
        f"{error}"
        for (where, _), (error, gpus, cases) in found.items()
    ]
    if said:
        pytest.fail("\n\n".join(said), pytrace=False)
