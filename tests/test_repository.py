"""Promises about the repository as a whole: small files, no traces of a machine, and a README that tells the truth."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

import hfkvq
from hfkvq.cli import app

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 16_000_000

# Written in pieces so that this file does not match itself.
SLASH = "/"
MACHINE_PATHS = re.compile(
    "|".join(
        SLASH + pattern
        for pattern in (
            r"(home|Users)" + SLASH + r"[A-Za-z0-9_.-]+" + SLASH,
            r"(root|work)" + SLASH + r"[A-Za-z0-9_.-]+",
            r"opt" + SLASH + r"(pypi|wheels)",
            r"tmp" + SLASH + r"[A-Za-z0-9_.-]+",
        )
    )
)


def tracked_files() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def makefile_verbs() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def test_no_tracked_file_is_large():
    assert {
        str(path.relative_to(ROOT)): size for path in tracked_files() if (size := path.stat().st_size) > LIMIT
    } == {}


def test_no_line_names_a_path_of_one_machine():
    found = []
    for path in tracked_files():
        data = path.read_bytes()
        if b"\0" in data[:8192]:
            continue
        for number, line in enumerate(data.decode("utf-8", errors="replace").splitlines(), start=1):
            # A path begins where no word or host stands before it, so the end of a longer address is no match.
            if any(
                match.start() == 0 or line[match.start() - 1] in " \t\"'`=:(,[<>"
                for match in MACHINE_PATHS.finditer(line)
            ):
                found.append(f"{path.relative_to(ROOT)}:{number}")
    assert found == []


def test_no_file_has_marks_of_a_conflict():
    marks = re.compile(rb"^(<{7} |>{7} |\|{7} )", re.MULTILINE)
    assert [str(path.relative_to(ROOT)) for path in tracked_files() if marks.search(path.read_bytes())] == []


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_commands_in_the_documents_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", text, re.MULTILINE))
    assert named, "expected at least one `make` command"
    assert named <= makefile_verbs()


def test_the_two_first_commands_are_in_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in text
    assert "make test" in text


def test_constraints_pin_and_cover_every_requirement():
    """Each requirement that pyproject.toml names has a tested version, and constraints.txt holds pins only."""

    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    entries = [line for line in lines if line and not line.startswith("#")]
    pins = [re.fullmatch(r"([A-Za-z0-9_.-]+)==[0-9][0-9.]*(; python_version .+)?", line) for line in entries]
    assert [line for line, pin in zip(entries, pins, strict=True) if pin is None] == []

    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = "real|eval|tune|postgres|serve|docs|dev"
    blocks = re.findall(rf"^(?:dependencies|{extras}) = \[(.*?)\]$", project, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2 + extras.count("|")
    named = {normal(name) for block in blocks for name in re.findall(r'"([A-Za-z0-9_.-]+)', block)}
    assert named - {normal(pin[1]) for pin in pins if pin} == {"hfkvq"}


def test_the_release_has_one_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == hfkvq.__version__
    assert cited["authors"] == [{"name": "The hfkvq authors"}]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r"^version = ", project, re.MULTILINE) is None
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    versions = [re.fullmatch(r"([0-9.]+) \((unreleased|[0-9]{4}-[0-9]{2}-[0-9]{2})\)", heading) for heading in headings]
    assert [heading for heading, found in zip(headings, versions, strict=True) if found is None] == []
    assert versions[0][1] == hfkvq.__version__
    assert all(found[2] != "unreleased" for found in versions[1:])


def test_each_supported_python_is_named_and_tried():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r"Programming Language :: Python :: (3\.[0-9]+)", project)
    assert named[0] == re.search(r'requires-python = ">=(3\.[0-9]+)"', project)[1]
    tried = yaml.safe_load((ROOT / ".github/workflows/packages.yml").read_text(encoding="utf-8"))
    assert tried["jobs"]["install"]["strategy"]["matrix"]["python"] == named
    said = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"| Python | {named[0]} to {named[-1]} |" in said


@pytest.mark.parametrize("name", ["bug", "idea"])
def test_templates_of_issues_are_forms(name):
    path = ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml"
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    for part in form["body"]:
        assert part["type"] in ("textarea", "input")
        assert part["attributes"]["label"]
    commands = re.findall(r"`hfkvq ([a-z]+)`", path.read_text(encoding="utf-8"))
    assert set(commands) <= set(typer.main.get_command(app).commands)
