"""The demo: the same prompts through every cache, compared with the stock one."""

from .run import Settings, choose_schemes, run_demo

__all__ = ["Settings", "choose_schemes", "run_demo"]
