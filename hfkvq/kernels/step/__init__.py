"""Decode steps that ask the host nothing: a plan, a buffer that holds what it says, and the operations on it."""

from .buffer import StepState, buffer_bytes, seen, settle, views_of_buffer
from .ops import advance, observe, run_step, seal_due, step
from .plan import MAX_STEP, StepPlan

__all__ = [
    "MAX_STEP",
    "StepPlan",
    "StepState",
    "advance",
    "buffer_bytes",
    "observe",
    "run_step",
    "seal_due",
    "seen",
    "settle",
    "step",
    "views_of_buffer",
]
