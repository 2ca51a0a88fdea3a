"""Numbers of the command line: what is none, or endless, is refused by every option that takes one."""

from __future__ import annotations

import inspect
import math
import typing

import pytest
import typer

from hfkvq.cli import app
from tests.command import assert_refused, invoke


def options(group):
    """Every option and argument that takes a float: its command, name and description."""
    for command in group.registered_commands:
        hints = typing.get_type_hints(command.callback, include_extras=True)
        for name in inspect.signature(command.callback).parameters:
            kind, *about = typing.get_args(hints[name]) or (hints[name],)
            if float in (kind, *typing.get_args(kind)):
                yield command.callback.__name__, name, about
    for each in group.registered_groups:
        yield from options(each.typer_instance)


def test_all_options_of_numbers_refuse_what_is_none():
    found = list(options(app))
    assert len(found) > 8
    for _, name, (about,) in found:
        for value in (math.nan, math.inf, -math.inf):
            with pytest.raises(typer.BadParameter, match="allowed a finite number"):
                print(name, about.callback(value))


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["bench", "tune", "--minutes", "nan"], "--minutes"),
        (["bench", "tune", "--minutes", "0"], "--minutes"),
        (["serve", "--max-memory-percent", "1.5"], "--max-memory-percent"),
        (["recommend", "--max-loss", "inf"], "--max-loss"),
        (["allocate", "x.json", "--budget", "much"], "--budget"),
    ],
)
def test_commands_refuse_what_is_not_allowed(arguments, option):
    assert_refused(invoke(*arguments), f"{option}: got ")
