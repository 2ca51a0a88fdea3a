"""`watch`: bytes and bits of caches while a model generates, as a live picture in a terminal and as rows for a plot."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.error import HTTPError

from rich.console import Console
from rich.live import Live
from rich.table import Table

from hfkvq.caches import MixedKVCache
from hfkvq.caches.layers.layer import KVLayer
from hfkvq.caches.layers.memory import format_bytes
from hfkvq.caches.using import InUse

if TYPE_CHECKING:
    from torch import Tensor

INTERVAL = 0.5
"""Seconds between looks."""

LINES = 10.0
"""Seconds between lines, where there is no terminal."""

MOST = 7200
"""Moments that are kept: an hour's."""

_HEIGHTS = "▁▂▃▄▅▆▇█"


class Moment(NamedTuple):
    """Contents of caches at a moment.

    Attributes:
        seconds: since the watch began.
        users: rows of the caches, or requests of a server.
        tokens: that these were given, padding and evicted ones included.
        bytes: that are held: `MemoryReport.total` of the caches, and buffers that `use` keeps for the next call.
        mean_bits: an element of keys and values in compressed layers, every byte counted; NaN without tokens.
        bits: the same of each compressed layer; a server tells none.
        forgotten: most of the tokens that caches with ``memory=`` and ``evict=`` have forgotten.
    """

    seconds: float
    users: int
    tokens: int
    bytes: int
    mean_bits: float
    bits: tuple[float, ...] = ()
    forgotten: int = 0


def _sizes(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes of the memory that tensors lie in, each counted once."""
    return {x._cdata: x.nbytes() for x in (each.untyped_storage() for each in tensors if hasattr(each, "data_ptr"))}


def look(caches: Iterable[MixedKVCache], kept: Iterable[Tensor] = (), seconds: float = 0.0) -> Moment:
    """Contents of caches now, as far as the host knows: no device is asked or waited for.

    Args:
        caches: which another thread may be using.
        kept: further tensors that are held.
        seconds: to note.
    """
    others, paged, users, tokens, forgotten = _sizes(kept), {}, 0, 0, 0
    layers: dict[int, tuple[int, int]] = {}
    for cache in caches:
        rows = seen = gone = 0
        parts = [(i, part) for i, layer in enumerate(cache.layers) for part in getattr(layer, "parts", (layer,))]
        for number, part in parts:
            if not isinstance(part, KVLayer):
                # Layers of Transformers, and recurrent states, which are in dictionaries.
                found = [x if type(x) is dict else {"": x} for x in list(vars(part).values())]
                others |= _sizes(y for x in found for y in list(x.values()))
                continue
            store, sync = part.store, None if part.buffer is None else part.buffer.sync
            if store is None:
                continue
            buffers = [] if part.buffer is None else part.buffer.memory()
            own = _sizes([*store.state.tensors(), *part.tensors(), *buffers, *(part.staged or ())])
            paged |= own
            rows, seen = part.batch_size, part.seen + (0 if sync is None or sync.stale else sync.ahead)
            state, gone = store.state, max(gone, part.gone)
            size, count = layers.get(number, (0, 0))
            given = store.batch * state.heads * sum(state.dims.values()) * min(seen, part.window or seen)
            layers[number] = size + sum(own.values()), count + given
        users, tokens, forgotten = users + rows, tokens + rows * seen, forgotten + rows * gone
    bits = tuple(8 * size / count if count else math.nan for _, (size, count) in sorted(layers.items()))
    elements = sum(count for _, count in layers.values())
    mean = 8 * sum(paged.values()) / elements if elements else math.nan
    return Moment(seconds, users, tokens, sum((others | paged).values()), mean, bits, forgotten)


def look_at_server(url: str, seconds: float = 0.0) -> Moment:
    """Contents of the cache of a running `hfkvq serve`, as it tells them.

    Raises:
        OSError: it does not answer.
        ValueError: what answers is another server.
    """
    try:
        with urllib.request.urlopen(f"{url.rstrip('/').removesuffix('/v1')}/metrics", timeout=10) as answer:
            told = dict(line.split(" ", 1) for line in answer.read().decode().splitlines())
        requests, tokens, held, bits = (told[f"hfkvq_{name}"] for name in ("requests", "tokens", "bytes", "bits"))
        return Moment(seconds, int(requests), int(tokens), int(held), float(bits))
    except (KeyError, ValueError, HTTPError, HTTPException) as error:
        raise ValueError(f"what: got {url}, allowed the address of a server by hfkvq serve ({error!r}).") from error
    except OSError as error:
        raise OSError(f"what: {url} does not answer ({error}); start it with hfkvq serve.") from error


def line_of(now: Moment) -> str:
    """A moment in words."""
    bits = f", {now.mean_bits:.2f} bits" if now.tokens else ""
    gone = f" ({now.forgotten:,} forgotten)" if now.forgotten else ""
    return f"{now.seconds:.0f} s: users {now.users}, tokens {now.tokens:,}{gone}, {format_bytes(now.bytes)}{bits}"


def picture_of(moments: Sequence[Moment], title: str) -> Table:
    """The newest moment, with bits by layer, and the bytes before it."""
    now, before, view = moments[-1], moments[max(0, len(moments) - 5)], Table.grid(padding=(0, 2))
    view.title, view.title_justify, view.title_style = title, "left", "bold"
    passed = now.seconds - before.seconds
    speed = (now.tokens - before.tokens) / passed if passed and now.users == before.users else 0
    held, known = [each.bytes for each in moments][-40:], [each for each in now.bits if not math.isnan(each)]
    by_layer = f"{_bars(known, 16)}  layers {min(known):.2f} to {max(known):.2f}" if known else ""
    view.add_row("users", f"{now.users:,}")
    view.add_row("tokens", f"{now.tokens:,}", f"{speed:,.0f} a second" if speed > 0 else "")
    if now.forgotten:
        view.add_row("forgotten", f"{now.forgotten:,}")
    view.add_row("bytes", format_bytes(now.bytes), _bars(held, max(held)))
    view.add_row("bits", f"{now.mean_bits:.2f}" if now.tokens else "", by_layer)
    return view


def _bars(values: Sequence[float], top: float) -> str:
    return "".join(_HEIGHTS[min(7, int(8 * each / top)) if top else 0] for each in values)


@contextlib.contextmanager
def watch(what: MixedKVCache | InUse | str, console: Console | None = None) -> Iterator[deque[Moment]]:
    """Shows users, tokens, bytes and bits by layer while a model generates, as a live picture in a terminal.

    ::

        with hfkvq.use(model) as used, hfkvq.watch(used) as moments:
            model.generate(**inputs)
        plt.plot([now.seconds for now in moments], [now.bytes for now in moments])

    A thread looks twice a second at what the host knows: no step waits for it, and no device is asked. Where there is
    no terminal, as in a notebook, it writes a line every ten seconds.

    Args:
        what: a cache, what `use` has returned, or the address of a running ``hfkvq serve``.
        console: where to draw; None for standard output.

    Yields:
        The moments so far, of the last hour, with ``seconds``, ``users``, ``tokens``, ``bytes``, ``mean_bits``,
        ``bits`` (of each compressed layer) and ``forgotten``: rows for a plot.

    Raises:
        ValueError: something else to watch.
        OSError: a server that does not answer.
    """
    if isinstance(what, str) and what.startswith(("http://", "https://")):
        title, source = what, partial(look_at_server, what)
    elif isinstance(what, InUse):
        title, source = type(what.model).__name__, lambda seconds: look(what.caches, what.kept, seconds)
    elif isinstance(what, MixedKVCache):
        title, source = what.scheme.name, lambda seconds: look([what], (), seconds)
    else:
        raise ValueError(
            f"what: got {what if isinstance(what, str) else type(what).__name__}, allowed a MixedKVCache, what "
            "hfkvq.use returns, or the address of a server, http://localhost:8000."
        )
    to, moments, end = console or Console(), deque[Moment](maxlen=MOST), threading.Event()
    begun, told = time.monotonic(), -math.inf
    live = Live(console=to, auto_refresh=False) if to.is_terminal else None

    def show() -> None:
        nonlocal told
        moments.append(now := source(time.monotonic() - begun))
        if live is not None:
            live.update(picture_of(list(moments), title), refresh=True)
        elif now.users and now.seconds - told >= LINES:
            told = now.seconds
            to.print(line_of(now), highlight=False, markup=False)

    def run() -> None:
        while not end.wait(INTERVAL):
            # Layers may be changing in another thread while they are looked at, and servers start anew.
            with contextlib.suppress(AttributeError, RuntimeError, OSError):
                show()

    with contextlib.nullcontext() if live is None else live:
        show()
        thread = threading.Thread(target=run, name="hfkvq watch", daemon=True)
        thread.start()
        try:
            yield moments
        finally:
            end.set()
            thread.join()
            if live is None and moments[-1].seconds > told and moments[-1].users:
                to.print(line_of(moments[-1]), highlight=False, markup=False)
