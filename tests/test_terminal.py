"""How far a command is, without a terminal, and what Ctrl-C says."""

import time

import pytest
import typer

from hfkvq.terminal import duration, progress_bar, stop, stoppable


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.4, "59 s"), (125, "2 min 05 s"), (3599.9, "1 h 00 min"), (7325, "2 h 02 min")],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_plain_lines_go_to_standard_error(capsys, monkeypatch):
    """Where no terminal is: at most one every ten seconds, with the time left."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with progress_bar() as show:
        for seconds, name, share in ((0, "first    ", 0.0), (5, "second", 0.1), (10, "third", 0.25), (40, "last", 0.5)):
            now[0] = 100.0 + seconds
            show(name, share)
    found = capsys.readouterr()
    assert found.out == ""
    lines = found.err.splitlines()
    assert [line.partition(", about")[0] for line in lines] == ["first, 0 %", "third, 25 %", "last, 50 %"]
    assert lines[-1].endswith(" left")


def test_stops(capsys):
    with pytest.raises(typer.Exit) as left, stoppable(lambda: "go on with --resume."):
        raise KeyboardInterrupt
    assert left.value.exit_code == 130
    assert capsys.readouterr().err == "Stopped: go on with --resume.\n"
    with pytest.raises(typer.Exit):
        stop("nothing.")
    with stoppable("unused"):
        pass
