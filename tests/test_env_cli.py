"""``hfkvq env``: what a bug report needs."""

import torch
import transformers

import hfkvq
from hfkvq.measure import records
from tests.command import invoke


def rows() -> dict[str, str]:
    done = invoke("env", columns=400)
    assert done.exit_code == 0, done.output
    return {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in done.output.splitlines()}


def test_versions_and_devices(monkeypatch):
    monkeypatch.setattr(records, "commit", lambda: None)
    said = rows()
    assert said["hfkvq"] == f"{hfkvq.__version__}, package"
    assert said["torch"] == torch.__version__
    assert said["transformers"] == transformers.__version__
    assert said["liger-kernel"]
    assert [name for name in said if name.startswith("GPU")] == (
        [f"GPU {index}" for index in range(torch.cuda.device_count())] or ["GPU"]
    )


def test_a_checkout_names_its_commit(monkeypatch):
    monkeypatch.setattr(records, "commit", lambda: "abc-dirty")
    assert rows()["hfkvq"].endswith("checkout at abc-dirty")
