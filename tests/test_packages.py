"""What is built for a release has every file that an installation needs, and none that it does not."""

import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import hfkvq

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 20_000_000
# Beside the package: what starts its lm-eval model.
BESIDE = {"_hfkvq_lm_eval.py", "hfkvq_lm_eval.pth", "hfkvq_lm_eval.start"}


def build(target: str, folder: Path) -> Path:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed here")
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("not a checkout")
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    [built] = folder.iterdir()
    return built


def files(folder: str) -> set[str]:
    """What the checkout has there, by relative path."""
    return {
        path.relative_to(ROOT / folder).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".log"
    }


def test_wheel(tmp_path):
    path = build("wheel", tmp_path)
    assert path.name == f"hfkvq-{hfkvq.__version__}-py3-none-any.whl"
    assert path.stat().st_size < LIMIT
    wheel = zipfile.ZipFile(path)
    names = wheel.namelist()
    assert len(set(names)) == len(names)
    about = f"hfkvq-{hfkvq.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"hfkvq", about} | BESIDE
    inside = {name.removeprefix("hfkvq/") for name in names if name.startswith("hfkvq/")}
    checkpoint = {f"measure/reference/checkpoint/{name}" for name in files("evals/reference/checkpoint")}
    assert "measure/reference/checkpoint/model.safetensors" in checkpoint
    assert {"py.typed", "cli.py", "measure/texts/play.txt.gz"} <= inside
    # What starts the model stands beside the package, and only there.
    assert inside == files("hfkvq") - {f"lm_eval/start/{name}" for name in BESIDE} | checkpoint

    said = Parser().parsestr(wheel.read(f"{about}/METADATA").decode())
    assert said["Version"] == hfkvq.__version__
    assert said["License-Expression"] == "Apache-2.0"
    assert f"{about}/licenses/LICENSE" in names
    entry = wheel.read(f"{about}/entry_points.txt").decode()
    assert "hfkvq = hfkvq.cli:main" in entry


@pytest.mark.slow
def test_sdist_is_the_whole_project(tmp_path):
    """A wheel can be built of it, the tests and the documents too."""
    path = build("sdist", tmp_path)
    assert path.stat().st_size < LIMIT
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("hfkvq", "tests", "docs", "evals/tasks", "evals/reference"):
        assert {f"{folder}/{name}" for name in files(folder)} <= names
    kept = {path.name for path in ROOT.iterdir() if path.is_file() and path.suffix in (".md", ".cff", ".toml", ".txt")}
    assert kept | {"LICENSE", "Makefile"} <= names
    assert not [name for name in names if name.startswith((".github", ".ci", "build", "dist"))]
