"""The demo: the same prompts through every cache, compared with the stock one."""

from .run import Result, Row, Settings, TaskScore, choose_schemes, run_demo

__all__ = ["Result", "Row", "Settings", "TaskScore", "choose_schemes", "run_demo"]
