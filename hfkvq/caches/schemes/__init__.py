"""Schemes, one file and one line each; importing this package registers them."""

from .arkv import Arkv as Arkv
from .expected import ExpectedAttention as ExpectedAttention
from .full import Full as Full
from .h2o import H2O as H2O
from .kitty import Kitty as Kitty
from .kivi import Kivi as Kivi
from .kvarn import KVarN as KVarN
from .latent import Latent as Latent
from .mixkvq import MixKVQ as MixKVQ
from .pyramidkv import PyramidKV as PyramidKV
from .saw import SawInt4 as SawInt4
from .sides import Sides as Sides
from .snapkv import SnapKV as SnapKV
from .streaming import StreamingLLM as StreamingLLM
from .tova import TOVA as TOVA
from .triaxial import TriAxial as TriAxial
