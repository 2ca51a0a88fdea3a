"""A small trained language model, the tasks it was trained for, and some that small pretrained ones can do."""

from .chat import Example
from .model import load_reference, reference_path
from .tasks import EVALUATION_TASKS, PLAIN_TASKS, arithmetic, evaluation_set, is_plain, recall
from .tool_calls import tools

__all__ = [
    "EVALUATION_TASKS",
    "PLAIN_TASKS",
    "Example",
    "arithmetic",
    "evaluation_set",
    "is_plain",
    "load_reference",
    "recall",
    "reference_path",
    "tools",
]
