"""Decode steps that ask the host nothing: a plan, a buffer that holds what it says, and the operations on it."""

from .buffer import Ahead as Ahead
from .buffer import Allocation as Allocation
from .buffer import StepState as StepState
from .buffer import buffer_bytes as buffer_bytes
from .buffer import copied_runs as copied_runs
from .buffer import seen as seen
from .buffer import settle as settle
from .buffer import views_of_buffer as views_of_buffer
from .ops import advance as advance
from .ops import attend_and_seal as attend_and_seal
from .ops import observe as observe
from .ops import run_step as run_step
from .ops import seal_due as seal_due
from .ops import step as step
from .plan import MAX_STEP as MAX_STEP
from .plan import StepPlan as StepPlan
