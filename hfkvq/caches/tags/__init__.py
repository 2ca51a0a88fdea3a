"""Triaxial tags of the tokens of a conversation, read from their ids alone."""

from .formats import FORMATS as FORMATS
from .formats import MODAL as MODAL
from .formats import PAD as PAD
from .formats import SEMANTIC as SEMANTIC
from .formats import TAGS as TAGS
from .formats import TEMPORAL as TEMPORAL
from .formats import ChatFormat as ChatFormat
from .formats import Opening as Opening
from .formats import Span as Span
from .formats import find_format as find_format
from .formats import parse_tag as parse_tag
from .tagger import Tagger as Tagger
from .tagger import placeholders as placeholders
