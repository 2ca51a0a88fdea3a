"""A small trained language model, and the tasks it was trained for, to measure KV caches without any download."""

from .chat import Example
from .model import load_reference, reference_path, with_outliers
from .tasks import EVALUATION_TASKS, arithmetic, evaluation_set, recall
from .tool_calls import tools

__all__ = [
    "EVALUATION_TASKS",
    "Example",
    "arithmetic",
    "evaluation_set",
    "load_reference",
    "recall",
    "reference_path",
    "tools",
    "with_outliers",
]
