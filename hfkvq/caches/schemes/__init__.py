"""The schemes, one file and one line each. Importing this package registers them."""

from .arkv import Arkv as Arkv
from .full import Full as Full
from .kitty import Kitty as Kitty
from .kivi import Kivi as Kivi
from .kvarn import KVarN as KVarN
from .mixkvq import MixKVQ as MixKVQ
from .saw import SawInt4 as SawInt4
from .triaxial import TriAxial as TriAxial
