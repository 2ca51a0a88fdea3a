"""How far a command is, without a terminal, and what Ctrl-C says."""

import pytest
import typer

from hfkvq.progress import PlainLines, duration, progress_bar, status_line, stop, stoppable


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.4, "59 s"), (125, "2 min 05 s"), (3599.9, "1 h 00 min"), (7325, "2 h 02 min")],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


def lines_of(calls, known=True):
    """Lines of (time, words, share) each."""
    now, lines = [0.0], []
    show = PlainLines(lines.append, lambda: now[0], known)
    for time, *call in calls:
        now[0] = time
        show(*call)
    return lines


def test_plain_lines():
    calls = [(0, "first    ", 0.0), (5, "second", 0.1), (10, "third", 0.25), (40, "last", 0.5)]
    assert lines_of(calls) == [
        "first, 0 %",
        # The second came too soon.
        "third, 25 %, 10 s, about 30 s left",
        "last, 50 %, 40 s, about 40 s left",
    ]


def test_what_an_earlier_run_has_done_took_no_time():
    assert lines_of([(0, "3 of 4", 0.75), (60, "4 of 5", 0.8)])[-1] == "4 of 5, 80 %, 1 min 00 s, about 4 min 00 s left"


def test_long_runs_say_less_often():
    assert len(lines_of([(t, "x", t / 4000) for t in range(4000)])) < 100
    assert lines_of([(0, "making weights"), (20, "decode")], known=False) == ["making weights", "decode, 20 s"]


def test_lines_go_to_standard_error(capsys):
    with progress_bar() as show:
        show("kitty", 0.0)
    with status_line("making weights") as tell:
        tell("too soon for another line")
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", "kitty, 0 %\nmaking weights\n")


def test_stops(capsys):
    with pytest.raises(typer.Exit) as left, stoppable(lambda: "go on with --resume."):
        raise KeyboardInterrupt
    assert left.value.exit_code == 130
    assert capsys.readouterr().err == "Stopped: go on with --resume.\n"
    with pytest.raises(typer.Exit):
        stop("nothing.")
    with stoppable("unused"):
        pass
