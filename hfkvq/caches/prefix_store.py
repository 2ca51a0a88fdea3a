"""`PrefixStore`: prompts on disk, found by how a new one begins.

A packed cache is cut into full pages, which other prompts may have as well, and the rest, which is its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfkvq.bounded import DAMAGE, parse_json
from hfkvq.kernels.decode import RUNS, START
from hfkvq.kernels.step import MAX_STEP

from . import cache_file as files
from .base import outside_inference_mode
from .cache import MixedKVCache, device_of
from .cache_file import THREADS, Missing, checksum, digest_of, path_of
from .layer_state.smoothing import digest_of_model, is_smoothed_by
from .layers.layer import KVLayer
from .named import TriAxialCache
from .schemes.base import Scheme
from .schemes.preset import Preset, get_preset
from .store import SIDES, KVStore
from .store.packing import Packed
from .tags import placeholders
from .tags.bit_table import config_fields, differing

Tensors = dict[str, Tensor]

_GROUP_BYTES = 2**27
"""Bytes of pieces that are moved at a time: they bound the memory for them, and a copy a layer is worth its call."""


class Kind(NamedTuple):
    """Tensors of a piece that are alike, in a file one tensor: ``own`` of each of the layers, ``step`` of a piece."""

    own: str
    step: int
    layers: Sequence[str]


class Pieces:
    """Full pages of a run: a piece is as many of every layer as take the same number of tokens.

    Attributes:
        kinds: how many there are of tensors.
        layout: what a piece is made of, as JSON.
        nbytes: of a piece.

    Args:
        tensors: of each layer, by name; pages of all pieces, and maybe others behind.
    """

    def __init__(self, count: int, kinds: Sequence[Kind], tensors: Mapping[str, Tensor]) -> None:
        self.count, self.kinds, self.layout = count, len(kinds), json.dumps(kinds)
        self._views: dict[str, list[Tensor]] = {}
        for i, (own, step, layers) in enumerate(kinds):
            dim, held = _dim(own), [tensors[f"{layer}.{own}"] for layer in layers]
            views = [x.narrow(dim, 0, count * step).unflatten(dim, (count, step)).movedim(dim, 0) for x in held]
            self._views[str(i)] = views
        self.nbytes = sum(x[0].nbytes for views in self._views.values() for x in views)

    def groups(self) -> list[range]:
        """Numbers of pieces that are moved together."""
        most = max(_GROUP_BYTES // max(self.nbytes, 1), 1)
        return [range(i, min(i + most, self.count)) for i in range(0, self.count, most)]

    def gather(self, group: range) -> list[Tensors]:
        """Pieces for files, on the CPU: tensors (layers, ...) by number of their kind."""
        own = {
            name: torch.stack([x[group.start : group.stop] for x in views], 1).cpu()
            for name, views in self._views.items()
        }
        return [{name: x[i] for name, x in own.items()} for i in range(len(group))]

    def scatter(self, group: range, pieces: Sequence[Tensors]) -> None:
        """Takes in what `gather` gave."""
        for name, views in self._views.items():
            rows = torch.stack([piece[name] for piece in pieces]).to(views[0].device)
            for own, x in zip(views, rows.unbind(1), strict=True):
                own[group.start : group.stop].copy_(x)


def cut_pages(cache: MixedKVCache, tensors: Mapping[str, Tensor]) -> tuple[list[Pieces], Tensors]:
    """Full pages of each run, and everything else: views. `join_pages` is the inverse."""
    runs, rest = [], dict(tensors)
    own = {i: layer.held() for i, layer in enumerate(cache.layers) if isinstance(layer, KVLayer)}
    # A window's pages are filled again and again, so none stays that of a prompt.
    held = {i: store for i, store in own.items() if not store.format.window}
    for run in range(max((len(store.format.runs) for store in held.values()), default=0)):
        stores = {i: store for i, store in held.items() if run < len(store.format.runs)}
        unit = math.lcm(*(_unit(store, run) for store in stores.values()))
        # Blocks count on the side, keys or values, that has fewer.
        full = [int(tensors[f"layer{i}.store.counters"][RUNS + 2 * run :][:2].min()) for i in stores]
        count, alike = min(full) // unit, {}
        for i, store in stores.items():
            prefix, page = f"layer{i}.store.run{run}.", store.format.runs[run][0].page_size
            for name in [name for name in tensors if name.startswith(prefix)]:
                x, dim = tensors[name], _dim(name)
                # Positions are counted by token.
                step = unit if dim else unit // page
                rest[name] = x.narrow(dim, count * step, x.shape[dim] - count * step)
                kind = name.removeprefix(f"layer{i}."), step, x.dtype, x.shape[:dim], x.shape[dim + 1 :]
                alike.setdefault(kind, []).append(f"layer{i}")
        runs.append(
            Pieces(count, [Kind(own, step, layers) for (own, step, *_), layers in alike.items() if count], tensors)
        )
    return runs, rest


Read = Callable[[int], tuple[str, Tensors]]


def join_pages(counts: Sequence[int], read: Read, rest: Mapping[str, Tensor], device: torch.device) -> Tensors:
    """The tensors of a packed cache from what `cut_pages` returned; of other pieces a ValueError.

    ``read`` gives layout and tensors of a piece, on the CPU, by its number among those of all runs, to several threads.
    """
    joined, start = dict(rest), 0
    for count in filter(None, counts):
        layout, tensors = read(start)
        kinds = [Kind(*kind) for kind in parse_json(layout)]
        first = [tensors.pop(str(i)) for i in range(len(kinds))]
        for kind, x in zip(kinds, first, strict=True):
            for key in (f"{layer}.{kind.own}" for layer in kind.layers):
                joined[key] = _with_room(kind, x[0], count, rest.get(key), device)

        def one(at: int, known: str = layout, like: Sequence[Tensor] = first) -> Tensors:
            found, piece = read(at)
            own = [piece[str(i)] for i in range(len(like))]
            if found != known or any(x.shape != y.shape or x.dtype != y.dtype for x, y in zip(own, like, strict=True)):
                raise ValueError("pages of one run are unlike each other")
            return piece

        pieces = Pieces(count, kinds, joined)
        with ThreadPoolExecutor(THREADS) as pool:
            for group in pieces.groups():
                pieces.scatter(group, [*pool.map(one, range(start + group.start, start + group.stop))])
        joined |= {name: x.to(device) for name, x in tensors.items()}
        start += count
    return joined


def _with_room(kind: Kind, piece: Tensor, count: int, behind: Tensor | None, device: torch.device) -> Tensor:
    """A layer's tensor for so many pieces, and with what is behind them."""
    dim = _dim(kind.own)
    shape, behind = list(piece.shape), piece.narrow(dim, 0, 0) if behind is None else behind
    shape[dim] = count * kind.step + behind.shape[dim]
    found = torch.empty(shape, dtype=piece.dtype, device=device)
    room = found.narrow(dim, count * kind.step, behind.shape[dim])
    if piece.shape[dim] != kind.step or room.shape != behind.shape or room.dtype != behind.dtype:
        raise ValueError(f"{behind.dtype} of {tuple(behind.shape)} behind pages of {piece.dtype} and {kind}")
    room.copy_(behind)
    return found


def _unit(store: KVStore, run: int) -> int:
    """Tokens that whole pages and whole units of sealing have in common."""
    return math.lcm(store.format.runs[run][0].page_size, store.layout.keys.unit, store.layout.values.unit)


def _dim(name: str) -> int:
    # Positions lie beside each other, of pages that hold them.
    return 1 if name.endswith(".pos") else 0


# Borders of pages, at which some caches could have stopped just as well.


def first_border(cache: MixedKVCache) -> tuple[int, int] | None:
    """Tokens before the first page, and tokens of a piece, where any number of full pages is a cache of its own.

    So it is where no token is kept whole for being new, and nothing but its own tokens decides what a page holds.
    """
    layers = cache.compressed_layers
    layouts = [layer.held().layout for layer in layers]
    sinks, plain = {layout.sink for layout in layouts}, not any(x.scheme.evicts or x.scheme.needs for x in layers)
    kept = any(x.keys.local or x.values.local or x.window or not x.store.ordered for x in layouts)
    if not _in_pages_alone(cache) or len(sinks) != 1 or kept or not plain:
        return None
    rope = json.dumps(getattr(cache.config, "rope_parameters", None), default=str)
    if "dynamic" in rope or "longrope" in rope:
        # Keys are rotated by the length of the prompt that they came in.
        return None
    return sinks.pop(), math.lcm(*(_unit(layer.held(), 0) for layer in layers))


def _in_pages_alone(cache: MixedKVCache) -> bool:
    """True if nothing is held but pages: recurrent states are of the last token alone, and cannot be taken back."""
    return len(cache.compressed_layers) == len(cache.layers) and not cache.states.layers


def packed_at(border: int, tensors: Mapping[str, Tensor]) -> Packed:
    """Packed form of a cache of `first_border` that was given ``border`` tokens: its pages, joined, and its sinks."""
    found, numbers = dict(tensors), []
    for i in range(sum(name.endswith(".window0") for name in tensors)):
        name = f"layer{i}.store"
        keys, values = sinks = [tensors[f"{name}.window{side}"] for side in (0, 1)]
        sealed = border - keys.shape[2]
        found[f"{name}.counters"] = torch.tensor([[0], [border], [sealed], [sealed]], dtype=torch.int32, device="cpu")
        found[f"{name}.dropped"] = torch.zeros(1, dtype=torch.int32, device="cpu")
        empty = (sink.new_zeros(*sink.shape[:2], MAX_STEP, sink.shape[3]) for sink in sinks)
        found |= {f"{name}.window{2 + side}": tail for side, tail in enumerate(empty)}
        numbers.append(
            {
                "seen": border,
                "shape": [*keys.shape[:2], keys.shape[3], values.shape[3]],
                "dtype": str(keys.dtype).removeprefix("torch."),
                "evicted": False,
                "record_past": False,
                "store": {"rows": [[border, sealed, sealed]], "wide_bound": [0, 0], "settled": 0},
            }
            | ({"smoothing": True} if f"layer{i}.smoothing" in tensors else {})
        )
    return {"tokens": border, "holes": False, "layers": numbers, "beside": {}}, found


def gives_back(cache: MixedKVCache) -> bool:
    """True if the newest token can be taken back without loss: it was not quantized together with others.

    Its query stays among those that weigh channels; evictions and tags that it had a say in cannot be undone.
    """
    for layer in cache.compressed_layers:
        store = layer.held()
        if layer.eviction is not None or layer.reads_tags or not store.format.ordered:
            return False
        for row in store.states:
            left = row.length - 1 - store.layout.sink
            for side, own in zip(SIDES, (store.layout.keys, store.layout.values), strict=True):
                if row.sealed(side) and min(row.sealed(side), left) > left // own.unit * own.unit:
                    return False
    return _in_pages_alone(cache)


_SAMPLES = 64


def weights_hash(model: torch.nn.Module) -> str:
    """64 hex digits of all weights, the same on every device, and of the adapters of PEFT that are active.

    Every weight is read once. Those that are offloaded count by their names and shapes.
    """
    whole = hashlib.sha256()
    for name, x in model.state_dict().items():
        if isinstance(x, Tensor):
            # A process of a model that is split over GPUs has a part of it, and a cache of its own.
            local: Tensor = getattr(x, "to_local", lambda x=x: x)()
            whole.update(f"{name} {local.dtype} {tuple(local.shape)} {_sums(local)}".encode())
    for name, module in model.named_modules():
        active = getattr(module, "active_adapters", None)
        if isinstance(active, (list, tuple, str)) and hasattr(module, "scaling"):
            state = [name, active, getattr(module, "disable_adapters", False), module.scaling]
            whole.update(json.dumps(state, default=str).encode())
    return whole.hexdigest()


def _sums(x: Tensor) -> list[int]:
    """Sum of a tensor's bits, which any change of it changes, and a few of them, which tell their order."""
    if x.device.type == "meta" or x.is_sparse or not x.numel():
        return []
    flat = x.detach().contiguous().flatten()
    if flat.data_ptr() % 8:
        flat = flat.clone()
    bits = flat.view(torch.uint8)
    words = bits.numel() // 8
    # Integers, so that the order of adding changes nothing; eight bytes at a time, which is as fast as memory.
    total = bits[: 8 * words].view(torch.int64).sum() + bits[8 * words :].sum()
    some = bits[:: max(1, bits.numel() // _SAMPLES)][:_SAMPLES].long()
    return torch.cat([total[None], some]).tolist()


FORMAT = 4
"""Format of the store's files and of files of caches: those of another format are in another folder."""

DEFAULT_BYTES = 2**35
_HEADER, _LINE = 1000, 160
"""Bytes of a file's header, and of a tensor's line in it, at the most."""

_END = re.compile(r"(?P<tokens>\d+)-(?P<digest>[0-9a-f]{64})")
_BORDER = re.compile(r"(?P<after>\d+)-(?P<tokens>\d+)-(?P<digest>[0-9a-f]{64})")
"""Names of ends, and of pages that are told by their tokens; other pages have a checksum alone."""


class PrefixMatch(NamedTuple):
    """Match that a store has found.

    Attributes:
        cache: holds the first tokens of the prompt; the caller's own.
        tokens: how many it holds.
    """

    cache: MixedKVCache
    tokens: int


class _Found(NamedTuple):
    """A prefix that the names of files promise: ``tokens``, and the file of its end or those of its pages."""

    tokens: int
    end: Path | None
    pages: tuple[Path, ...]


class PrefixStore:
    """A folder of computed prompts, from which caches of one model and scheme can start.

    ::

        store = PrefixStore("prompts", model, "kitty-pro")
        cache, known = store.match(ids)
        answer = model.generate(ids, past_key_values=cache)
        store.put(cache, answer)

    A stored prompt consists of full pages, a file each, which prompts share, and of an end: windows, open pages,
    counters, statistics, recurrent states. `match` finds whole stored prompts and restores them bit for bit. It also
    matches any number of full pages of a prompt, if the model has no recurrent states and the scheme's pages do not
    depend on other tokens (int4, saw-int4, kvarn, full). Such pages are identified by their tokens, so the first one
    stored serves all prompts. Other pages are identified by their bytes.

    Any number of processes may read and write a folder. Damaged files are removed and no longer match. Files of other
    models, weights, adapters, schemes or formats never match.

    Args:
        path: the folder; created at the first `put`.
        model: the caches' model. Its weights and adapters are fingerprinted now: make a new store when they change.
        scheme: preset name, ``.json`` file, `Scheme` or `Preset`, as in `MixedKVCache`.
        max_bytes: limit on the folder's size, over all models and schemes. After each `put` the least recently used
            files are removed until it is met.
        layers: schemes of single layers, see `MixedKVCache`.
        **options: passed to the caches that `match` makes: ``max_cache_len``, ``graphs``, ``headroom``, ``attach``,
            ``debug``; for ``triaxial`` also ``tokenizer`` or ``tagger``.

    Raises:
        ValueError: a config in place of a model, an encoder-decoder, an unknown scheme, layers or schemes that cannot
            be saved (see `MixedKVCache.save`), a bound that is no positive number, or a path that is a file.
    """

    def __init__(
        self,
        path: str | Path,
        model: torch.nn.Module,
        scheme: Preset | Scheme | str | Path,
        *,
        max_bytes: int = DEFAULT_BYTES,
        layers: Mapping[str | int, Any] | None = None,
        **options: Any,
    ) -> None:
        config: Any = getattr(model, "config", None)
        if not isinstance(model, torch.nn.Module) or config is None:
            raise ValueError(
                f"model: got {type(model).__name__}, allowed a Transformers model; stored prompts are found by its "
                "weights."
            )
        if config.is_encoder_decoder:
            raise ValueError(
                f"model: got a {config.model_type}, an encoder-decoder, allowed a decoder: the cache depends on "
                "the encoder's input, which token_ids do not contain. Keep such caches with cache.save(path)."
            )
        # type(), because True is an int.
        if type(max_bytes) is not int or max_bytes < 1:
            raise ValueError(f"max_bytes: got {max_bytes!r}, allowed a positive number, e.g. 20 * 2**30.")
        self.path, self.model, self.max_bytes = Path(path), model, max_bytes
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"path: {self.path} is a file, allowed a folder or a new name.")
        self.preset = get_preset(scheme, layers)
        self._options = options
        fresh = self._fresh()
        # Says now what cannot be saved, not when a prompt has been computed.
        fresh.packed()
        if not fresh.compressed_layers:
            raise ValueError(
                f"model: no layer of a {config.model_type} is held in pages, so there is nothing to share; keep its "
                "caches with cache.save(path)."
            )
        self._architecture, self._fields = fresh.architecture(), config_fields(fresh.config)
        self._other_than_text = placeholders(config, ("image", "video", "audio"))
        known = [FORMAT, self._architecture, weights_hash(model), self.preset.to_dict()]
        if any(layer.smooths for layer in fresh.compressed_layers):
            # Keys smoothed by other vectors, as another kind of GPU may measure them, do not go together.
            known.append(digest_of_model(model))
        folder = self.path / hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]
        self._ends, self._pages = folder / "ends", folder / "pages"

    def put(self, cache: MixedKVCache, token_ids: Tensor | Sequence[int]) -> int:
        """Stores what a cache holds.

        Args:
            cache: of one row, of this store's model and scheme. It is not changed.
            token_ids: (1, n) or (n,), what the cache was given. More may follow, such as the last token of an answer,
                which no model was shown.

        Returns:
            Bytes that were written: pages that are there already take none.

        Raises:
            ValueError: another model or scheme, an empty cache, several rows, padding, too few ids, placeholders of
                images or sound, or more than ``max_bytes``.
            OSError: the files cannot be written; what was stored before stays.
        """
        ids = _ids(token_ids)
        self._check(cache)
        description, tensors = cache.packed()
        ids = self._check_tokens(cache, ids, description["tokens"])
        starts = {name: x[START] for name, x in tensors.items() if name.endswith(".store.counters")}
        dropped = {name: tensors[f"{name.removesuffix('counters')}dropped"] for name in starts}
        if description["holes"] or any((x > dropped[name]).any() for name, x in starts.items()):
            raise ValueError(
                "cache: it was given padding, which would count as tokens of later prompts; compute the prompt without "
                "an attention mask."
            )
        runs, rest = cut_pages(cache, tensors)
        border, sinks, names = first_border(cache) if is_smoothed_by(cache, self.model) else None, {}, []
        if border is not None:
            borders = [border[0] + border[1] * (i + 1) for i in range(runs[0].count)]
            found = _digests(ids, borders)
            names = [f"{a}-{b}-{found[b]}" for a, b in zip([0, *borders], borders, strict=False)]
            # Contents beside pages, wherever such a cache stops.
            own = {name: x for name, x in rest.items() if name.endswith((".window0", ".window1", ".smoothing"))}
            sinks = {name: x.detach().contiguous().cpu() for name, x in own.items()}
        size = sum(run.count * (run.nbytes + _HEADER + run.kinds * _LINE + 2 * len(run.layout)) for run in runs)
        size += _HEADER + sum(x.nbytes + _LINE for x in [*rest.values(), *sinks.values()])
        if size > self.max_bytes:
            raise ValueError(
                f"max_bytes: the prompt takes {size} bytes, allowed {self.max_bytes}; make the store with more, or use "
                "a scheme of fewer bits."
            )

        def store(run: Pieces, at: int, piece: Tensors | None) -> tuple[str, int]:
            """Writes a piece, if it is not there; its name, and bytes written."""
            if piece is None:
                return names[at], 0
            held = piece if at else sinks | piece
            digests = {name: digest_of(name, x) for name, x in held.items()}
            name = names[at] if names else checksum(run.layout, digests)
            path = path_of(self._pages, name)
            return name, 0 if path.exists() else files.write(path, {"layout": run.layout}, held, digests)

        stored: list[tuple[str, int]] = []
        with ThreadPoolExecutor(THREADS) as pool:
            for run in runs:
                for group in run.groups():
                    there = names and all(path_of(self._pages, names[at]).exists() for at in group)
                    rows = [None] * len(group) if there else run.gather(group)
                    stored += pool.map(store, [run] * len(group), group, rows)
        pages = [path_of(self._pages, name) for name, _ in stored]
        end = path_of(self._ends, f"{len(ids)}-{_digests(ids, [len(ids)])[len(ids)]}")
        about = {
            "cache": description,
            "pages": [name for name, _ in stored],
            "runs": [run.count for run in runs],
            "gives_back": gives_back(cache),
        }
        written = sum(count for _, count in stored) + files.write(end, about, rest)
        files.touch([*pages, end])
        files.shrink(self.path, self.max_bytes)
        return written

    def match(self, token_ids: Tensor | Sequence[int]) -> PrefixMatch:
        """A cache that holds as many of a prompt's first tokens as the store knows, fewer than all.

        ``model.generate(token_ids, past_key_values=cache)`` feeds the others. The same prompt as a stored one is
        matched without its last token, unless that was quantized together with others, or the scheme evicts or tags.

        Args:
            token_ids: (1, n) or (n,), the prompt.

        Returns:
            The cache, empty if nothing is known, and how many tokens it holds.

        Raises:
            ValueError: several rows, or no whole numbers.
        """
        ids = _ids(token_ids)
        bad: set[Path] = set()
        while True:
            found = self._longest(ids, bad)
            if found is None:
                return PrefixMatch(self._fresh(), 0)
            try:
                return self._restored(found, bad)
            except Missing:
                continue

    @property
    def nbytes(self) -> int:
        """Bytes of the folder's files, of all models and schemes."""
        return sum(size for _, size, _ in files.files_in(self.path))

    def __repr__(self) -> str:
        return f"PrefixStore({str(self.path)!r}, {self.preset.scheme.name}, {self.nbytes} of {self.max_bytes} bytes)"

    def _fresh(self) -> MixedKVCache:
        cls = TriAxialCache if "tags" in self.preset.needs else MixedKVCache
        return cls.of_preset(self.model, self.preset, **self._options)

    def _longest(self, ids: Tensor, bad: set[Path]) -> _Found | None:
        """The most tokens that files promise, by their names."""
        most, room = len(ids) - 1, self._options.get("max_cache_len") or len(ids)
        ends = list(filter(None, map(_END.fullmatch, files.names_in(self._ends))))
        borders = list(filter(None, map(_BORDER.fullmatch, files.names_in(self._pages))))
        digests = _digests(ids, [int(name["tokens"]) for name in (*ends, *borders)])

        def known(folder: Path, names: list[re.Match[str]]) -> Iterator[tuple[re.Match[str], int, Path]]:
            for name in names:
                tokens, path = int(name["tokens"]), path_of(folder, name[0])
                if digests.get(tokens) == name["digest"] and tokens <= room and path not in bad:
                    yield name, tokens, path

        found = [_Found(min(tokens, most), path, ()) for _, tokens, path in known(self._ends, ends)]
        behind = {int(name["after"]): (tokens, path) for name, tokens, path in known(self._pages, borders)}
        at, chain = 0, []
        while at in behind and behind[at][0] <= most:
            at, path = behind[at]
            chain.append(path)
        if chain:
            found.append(_Found(at, None, tuple(chain)))
        # Ends first: those hold what was put, also of pages that are not full.
        return max((x for x in found if x.tokens), key=lambda x: (x.tokens, x.end is not None), default=None)

    @outside_inference_mode
    def _restored(self, found: _Found, bad: set[Path]) -> PrefixMatch:
        """The cache of what was found; files that prove to be no good are added to ``bad``."""
        cache = self._fresh()
        try:
            description, tensors, used = self._read(found, bad)
            cache.unpack(description, tensors, device_of(self.model))
            if description["tokens"] > found.tokens:
                cache.crop(found.tokens - description["tokens"])
        except DAMAGE as error:
            for path in (found.end,) if found.end else found.pages:
                bad.add(path)
                files.discard(path, error)
            raise Missing from error
        files.touch(used)
        return PrefixMatch(cache, found.tokens)

    def _read(self, found: _Found, bad: set[Path]) -> tuple[Any, dict[str, Tensor], list[Path]]:
        """Packed form of a cache, and its files."""
        device = device_of(self.model)

        def joined(paths: Sequence[Path], counts: Sequence[int], rest: Mapping[str, Tensor]) -> dict[str, Tensor]:
            def read(at: int) -> tuple[Any, dict[str, Tensor]]:
                try:
                    about, tensors = files.read(paths[at])
                except Missing:
                    bad.add(paths[at])
                    raise
                return about["layout"], tensors

            if sum(counts) != len(paths) or min(counts, default=0) < 0:
                raise ValueError(f"{len(paths)} pages for runs of {counts}")
            return join_pages(counts, read, rest, device)

        if found.end is None:
            return *packed_at(found.tokens, joined(found.pages, [len(found.pages)], {})), [*found.pages]
        # Whatever is missing, this is not tried again.
        bad.add(found.end)
        about, rest = files.read(found.end, device)
        description, pages = about["cache"], [path_of(self._pages, str(name)) for name in about["pages"]]
        if description["tokens"] > found.tokens and not about["gives_back"]:
            raise Missing
        try:
            return description, joined(pages, about["runs"], rest), [*pages, found.end]
        except Missing:
            files.discard(found.end, f"{found.end} has lost pages.")
            raise

    def _check(self, cache: MixedKVCache) -> None:
        if not isinstance(cache, MixedKVCache):
            raise ValueError(f"cache: got {type(cache).__name__}, allowed a cache of {self.preset.scheme.name}.")
        if cache.preset != self.preset:
            raise ValueError(
                f"cache: got one of {cache.preset.to_dict()}, allowed {self.preset.to_dict()}; make it by "
                "store.match(token_ids), or a store of its scheme."
            )
        if cache.architecture()["config"] != self._architecture["config"]:
            fields = differing(self._fields, config_fields(cache.config))
            said = f", and differs in {fields}" if fields else ""
            raise ValueError(
                f"cache: its config is that of another model than the store's{said}; make another store for it."
            )
        if not cache.get_seq_length():
            raise ValueError("cache: got an empty one, allowed one that holds a prompt.")

    def _check_tokens(self, cache: MixedKVCache, ids: Tensor, held: int) -> Tensor:
        """The ids of what the cache holds."""
        rows = {layer.batch_size for layer in cache.compressed_layers}
        if rows != {1}:
            raise ValueError(
                f"cache: got {max(rows)} rows, allowed one; take each out of a copy, "
                "copy.deepcopy(cache).batch_select_indices(torch.tensor([row]))."
            )
        if len(ids) < held:
            raise ValueError(f"token_ids: got {len(ids)}, allowed {held} or more, an id for each cached token.")
        ids = ids[:held]
        if torch.isin(ids, torch.tensor(self._other_than_text, dtype=torch.int64, device="cpu")).any():
            raise ValueError(
                "token_ids: got placeholders of images, video or sound, which do not say what was shown; keep such "
                "caches with cache.save(path)."
            )
        return ids


def _ids(token_ids: Tensor | Sequence[int]) -> Tensor:
    """Token ids on the CPU: i64 (n,)."""
    ids = torch.as_tensor(token_ids, device="cpu")
    one_row = ids.dim() == 1 or (ids.dim() == 2 and len(ids) == 1)
    if ids.is_floating_point() or ids.dtype == torch.bool or not one_row:
        raise ValueError(f"token_ids: got {ids.dtype} of {tuple(ids.shape)}, allowed whole numbers, (1, n) or (n,).")
    return ids.detach().reshape(-1).to("cpu", torch.int64)


def _digests(ids: Tensor, lengths: Iterable[int]) -> dict[int, str]:
    """A hash of the first tokens, of each of these lengths: one goes on from another."""
    whole, at, found = hashlib.sha256(), 0, {}
    for length in sorted(set(lengths)):
        if length > len(ids):
            break
        whole.update(ids[at:length].numpy().tobytes())
        found[length], at = whole.hexdigest(), length
    return found
