"""The schemes, one file each. Importing this package registers them."""

from .arkv import Arkv
from .full import Full
from .kitty import Kitty
from .kivi import Kivi
from .saw import SawInt4

__all__ = ["Arkv", "Full", "Kitty", "Kivi", "SawInt4"]
