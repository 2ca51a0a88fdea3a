"""Decode steps that ask the host nothing: a plan, a buffer that holds what it says, and the operations on it."""

from .buffer import Ahead, Allocation, StepState, buffer_bytes, copied_runs, seen, settle, views_of_buffer
from .ops import advance, attend_and_seal, observe, run_step, seal_due, step
from .plan import MAX_STEP, StepPlan

__all__ = [
    "MAX_STEP",
    "Ahead",
    "Allocation",
    "StepPlan",
    "StepState",
    "advance",
    "attend_and_seal",
    "buffer_bytes",
    "copied_runs",
    "observe",
    "run_step",
    "seal_due",
    "seen",
    "settle",
    "step",
    "views_of_buffer",
]
