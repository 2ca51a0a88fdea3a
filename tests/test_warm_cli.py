"""`hfkvq warm`: what it is told wrongly it says plainly."""

from functools import partial

import pytest
import torch

from tests.command import assert_refused, invoke

run = partial(invoke, "warm")


SHAPE = ["--heads", "32", "--kv-heads", "8", "--head-dim", "128"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--preset", "kity-pro", *SHAPE, "--gpu", "sm_90"], "did you mean 'kitty-pro'"),
        (["--preset", ",", *SHAPE, "--gpu", "sm_90"], "preset: got none"),
        (["--preset", "kitty-pro", *SHAPE, "--gpu", "sm_12"], "gpu: got 'sm_12', allowed current or sm_80"),
        (["--preset", "kitty-pro", "--gpu", "sm_90"], "model: got none"),
        (["--preset", "kitty-pro", "--gpu", "sm_90", "--model", "x", "--heads", "3"], "give the model or the three"),
        (["--preset", "kitty-pro", "--gpu", "sm_90", *SHAPE[2:], "--heads", "9"], "a multiple of KV heads"),
        (
            ["--preset", "kitty-pro", "--gpu", "sm_90", "--model", "./nowhere"],
            "model: the folder ./nowhere does not exist",
        ),
        # As tests run.
        (["--preset", "kitty-pro", "--gpu", "sm_90", *SHAPE], "TRITON_INTERPRET: got 1"),
    ],
)
def test_errors_name_what_was_given_and_what_is_allowed(given, said):
    assert_refused(run(*given), said)


def test_no_gpu_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(run("--preset", "kitty-pro", *SHAPE), "there is no GPU here; say which one it is for: sm_80")
