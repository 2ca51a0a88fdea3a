"""`hfkvq warm`: what it is told wrongly it says plainly."""

import pytest
import torch
from typer.testing import CliRunner

from hfkvq.cli import app

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
        (["--preset", "kitty-pro", "--gpu", "sm_90", "--model", "./nowhere"], "model: './nowhere' cannot be loaded"),
        # As tests run.
        (["--preset", "kitty-pro", "--gpu", "sm_90", *SHAPE], "TRITON_INTERPRET: got 1"),
    ],
)
def test_errors_name_what_was_given_and_what_is_allowed(given, said):
    done = CliRunner().invoke(app, ["warm", *given])
    assert done.exit_code == 2
    assert said in done.stderr


def test_no_gpu_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["warm", "--preset", "kitty-pro", *SHAPE])
    assert done.exit_code == 2
    assert "there is no GPU here; say which one it is for: sm_80" in done.stderr
