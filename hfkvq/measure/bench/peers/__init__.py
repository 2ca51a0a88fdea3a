"""Decode kernels of other packages, each in its own layout and with its own best settings, beside this library's."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hfkvq.caches.registry import nearest
from hfkvq.terminal import split

from .bitdecoding import BitDecoding2, BitDecoding4
from .flash import FlashAttention2, FlashAttention3, FlashAttention3FP8
from .flashinfer import FlashInfer, FlashInferFP8
from .kitty import Kitty, KittyPro
from .kivi import Kivi2, Kivi4
from .peer import Peer
from .turboquant import TurboQuant3, TurboQuant4, TurboQuantK8V4

PEERS: dict[str, type[Peer]] = {
    kind.name: kind
    for kind in (
        FlashAttention3,
        FlashAttention2,
        FlashInfer,
        FlashAttention3FP8,
        FlashInferFP8,
        TurboQuantK8V4,
        TurboQuant4,
        TurboQuant3,
        BitDecoding4,
        BitDecoding2,
        Kivi4,
        Kivi2,
        KittyPro,
        Kitty,
    )
}
"""By name; unquantized ones first."""


def choose(text: str) -> tuple[str, ...]:
    """Names of peers: ``all``, ``none`` or names, comma-separated.

    Raises:
        ValueError: one is unknown.
    """
    names = split(text)
    if not names:
        raise ValueError(f"peers: got none; allowed all, none or some of {', '.join(PEERS)}.")
    if names == ("all",):
        return tuple(PEERS)
    if names == ("none",):
        return ()
    for name in names:
        if name not in PEERS:
            raise ValueError(f"peers: got {name!r}, which is unknown; {nearest(name, [*PEERS, 'all', 'none'])}")
    return tuple(dict.fromkeys(names))


def present(names: Iterable[str], tell: Callable[[str], None]) -> list[Peer]:
    """Those that can be loaded; ``tell`` gets a line for each reason why others cannot, with their names."""
    found, missing = [], {}
    for name in names:
        peer = PEERS[name]()
        reason = peer.missing()
        if reason:
            missing.setdefault(reason, []).append(name)
        else:
            found.append(peer)
    for reason, others in missing.items():
        tell(f"{', '.join(others)}: {reason}")
    return found
