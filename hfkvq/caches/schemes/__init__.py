"""The schemes, one file each. Importing this package registers them."""

from .arkv import Arkv
from .full import Full
from .kitty import Kitty
from .kivi import Kivi
from .kvarn import KVarN
from .mixkvq import MixKVQ
from .saw import SawInt4
from .triaxial import TriAxial

__all__ = ["Arkv", "Full", "KVarN", "Kitty", "Kivi", "MixKVQ", "SawInt4", "TriAxial"]
