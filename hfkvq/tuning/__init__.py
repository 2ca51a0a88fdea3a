"""Tables and knobs from data: sensitivities of tags, and bits under a budget."""

from .allocate import allocate, make_table, sweep
from .calibrate import calibrate
from .conversations import Conversation, load_conversations, parse_conversation
from .sensitivity import Sensitivity

__all__ = [
    "Conversation",
    "Sensitivity",
    "allocate",
    "calibrate",
    "load_conversations",
    "make_table",
    "parse_conversation",
    "sweep",
]
