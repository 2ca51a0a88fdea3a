"""Loads what every test gets, `tests.everywhere`, where tests run."""

import gc

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # A process that only hands tests out, as with `-n 2`, begins with that sooner if it does not import PyTorch first.
    hands_out = config.getoption("dist", "no") != "no" and not config.getoption("collectonly")
    if not hands_out or hasattr(config, "workerinput"):
        # Until all tests are collected objects come to stay; searches for cycles were a quarter of that time.
        gc.disable()
        config.pluginmanager.import_plugin("tests.everywhere")
