"""Schemes, a file each but for those that evict over any pages; importing this package registers them."""

from .arkv import Arkv as Arkv
from .eviction import H2O as H2O
from .eviction import TOVA as TOVA
from .eviction import ExpectedAttention as ExpectedAttention
from .eviction import PyramidKV as PyramidKV
from .eviction import SnapKV as SnapKV
from .eviction import StreamingLLM as StreamingLLM
from .full import Full as Full
from .kitty import Kitty as Kitty
from .kivi import Kivi as Kivi
from .kvarn import KVarN as KVarN
from .latent import Latent as Latent
from .mixkvq import MixKVQ as MixKVQ
from .saw import SawInt4 as SawInt4
from .sides import Sides as Sides
from .triaxial import TriAxial as TriAxial
