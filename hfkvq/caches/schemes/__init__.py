"""The schemes, one file each. Importing this package registers them."""

from .full import Full
from .kitty import Kitty
from .kivi import Kivi
from .saw import SawInt4
from .triaxial import TriAxial

__all__ = ["Full", "Kitty", "Kivi", "SawInt4", "TriAxial"]
