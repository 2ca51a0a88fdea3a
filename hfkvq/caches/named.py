"""Caches named after papers: `MixedKVCache` with the preset fixed; and `make_cache`, the cache of any preset.

Knobs are keyword arguments, as of `MixedKVCache`: ``hfkvq schemes kitty`` lists them, and the dataclass of the scheme
types them: ``MixedKVCache(model, schemes.Kitty(boost_ratio=0.2))`` is ``KittyCache(model, boost_ratio=0.2)``.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from .base.model_calls import CACHE_NAMES
from .base.recorded import is_recorded
from .cache import MixedKVCache
from .layer_state.tags import TokenRecord
from .layers.transactions import Beside
from .schemes.base import Scheme, get_scheme
from .schemes.preset import Preset, get_preset
from .store.packing import Packed
from .tags import Tagger
from .tags.bit_table import BitTable

if TYPE_CHECKING:
    from typing_extensions import Self


class NamedCache(MixedKVCache):
    """`MixedKVCache` of the preset that its class names, with its arguments, and knobs of the scheme."""

    preset_name: ClassVar[str]

    def __init_subclass__(cls, preset: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.preset_name = preset or cls.preset_name

    def __init__(self, model_or_config: Any, **given: Any) -> None:
        super().__init__(model_or_config, self.preset_name, **given)

    @classmethod
    def of_preset(cls, model_or_config: Any, preset: Preset, **options: Any) -> Self:
        own, knobs = get_scheme(cls.preset_name), preset.scheme.to_dict()
        if knobs.pop("scheme") != own.name:
            raise ValueError(f"it is of the scheme {preset.scheme.name}, and {cls.__name__} of {own.name}")
        return cls(model_or_config, layers=dict(preset.layers), **knobs, **options)


class KittyCache(NamedCache, preset="kitty"):
    """Kitty: 2-bit pages whose strongest key channels get 4 bits; ``boost_ratio=0.25`` makes it Kitty-Pro."""


class KIVICache(NamedCache, preset="kivi"):
    """KIVI: keys per channel, values per token, in 2 bits, or with ``bits=4`` in 4."""


class MixKVQCache(NamedCache, preset="mixkvq"):
    """MixKVQ: key channels in 2, 4 or 16 bits, by their error as queries see it.

    The most salient channels fill the room of each page; ``select="thresholds"`` raises by the paper's thresholds.
    """


class SawInt4Cache(NamedCache, preset="saw-int4"):
    """SAW-INT4: token-wise INT4 after a Hadamard rotation of keys, with ``rotate="both"`` of values too."""


class KVarNCache(NamedCache, preset="kvarn"):
    """KVarN: keys and values rotated, tokens and channels balanced; keys in 4 bits, values in 2 or ``value_bits=4``."""


class LatentCache(NamedCache, preset="latent-4"):
    """Latent attention (DeepSeek, Kimi, GLM, LongCat): latents in 4 bits, or 8 (``bits=8, rope_bits=16``)."""


class FullCache(NamedCache, preset="full"):
    """Pages of the model's own dtype: the control, which differs from bf16 only by rounding."""


class ARKVCache(NamedCache, preset="arkv"):
    """ARKV: the best tokens in 16 bits, the next in fp8, the others evicted.

    ``budget_tokens=512`` keeps at most 512 tokens in each KV head of each layer, ``budget_bytes`` counts bytes instead.
    `get_seq_length` counts tokens seen; `memory` shows what is stored.
    """


class SnapKVCache(NamedCache, preset="snapkv"):
    """SnapKV: keeps the tokens of a prompt that its last queries attend to, in pages of ``pages="kitty-pro"``, say."""


class PyramidKVCache(NamedCache, preset="pyramidkv"):
    """PyramidKV: SnapKV's tokens, more of them in lower layers."""


class H2OCache(NamedCache, preset="h2o"):
    """H2O: keeps the newest tokens, and those attended to most so far."""


class StreamingLLMCache(NamedCache, preset="streaming-llm"):
    """StreamingLLM: keeps the first tokens and the newest."""


class TOVACache(NamedCache, preset="tova"):
    """TOVA: keeps the tokens that the newest query attends to."""


class ExpectedAttentionCache(NamedCache, preset="expected-attention"):
    """Expected attention: keeps what future queries are expected to attend to."""


logger = logging.getLogger(__name__)

Table = Mapping[str, int] | Iterable[tuple[str, int]] | BitTable | str | Path


class _Hook:
    """Shows a model's token ids to a cache, and holds neither. A copy of the model shows nothing to this cache."""

    def __init__(self, cache: TriAxialCache | None = None) -> None:
        self.cache = None if cache is None else weakref.ref(cache)

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_recorded():
            # A graph cannot take notes: see `TriAxialCache.note_step`.
            return
        cache = None if self.cache is None else self.cache()
        if cache is None or not any(x is cache for x in (*map(kwargs.get, CACHE_NAMES), *args)):
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        mask = kwargs.get("attention_mask")
        if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point():
            cache.arrive(ids, mask if isinstance(mask, Tensor) else None)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


class TriAxialCache(NamedCache, preset="triaxial"):
    """TriAxialKV: 2 or 4 bits per token, by turn, modality and role.

    ``TriAxialCache(model, tokenizer)`` needs nothing else: the cache sees the token ids of every forward that it is
    passed to, and the tokenizer's chat template says what they are. If it is made from the config
    (``TriAxialCache(model.config, tokenizer)``), show it the conversation before each turn: ``cache.see(input_ids)``.
    Until it has seen ids, everything gets 4 bits, and a warning says so once.

    A token's bit width is fixed when the token is first sealed; generated tokens get 4 bits.

    A prompt that is passed to the model in several chunks is tagged chunk by chunk, as if each chunk ended the
    conversation. ``see`` the whole prompt first, so that its turns are recognized.

    Args:
        model_or_config: the model, or its config.
        tokenizer: the model's, with its chat template; for models that see images, the processor. Placeholders of
            images and videos are recognized by the config and the processor.
        tagger: a `hfkvq.caches.tags.Tagger`, instead of the tokenizer's.
        table: bits of each tag: a mapping ``{"older|text|obs": 2}``, a `BitTable`, or the file of one, as ``hfkvq
            allocate`` writes it. None takes the scheme's default.
        **given: other knobs of the scheme (``hfkvq schemes triaxial`` lists them), and further arguments of
            `MixedKVCache`.

    Raises:
        ValueError: neither tokenizer nor tagger, an unknown tag, or a table of another model or chat template.
    """

    def __init__(
        self,
        model_or_config: Any,
        tokenizer: Any = None,
        *,
        tagger: Tagger | None = None,
        table: Table | None = None,
        **given: Any,
    ) -> None:
        if tokenizer is None and tagger is None:
            raise ValueError(
                "tokenizer: got None, but roles and turns are read from token ids; pass the model's tokenizer, or "
                "tagger=Tagger.from_tokenizer(tokenizer)."
            )
        config = getattr(model_or_config, "config", model_or_config)
        if isinstance(table, (str, Path)):
            table = BitTable.load(table)
        if isinstance(table, BitTable):
            table.check(config, tokenizer)
            table = table.bits
        if table is not None:
            given["table"] = table
        if tagger is None:
            tagger = Tagger.from_tokenizer(tokenizer, config=config)
        super().__init__(model_or_config, **given)
        self.tokens = TokenRecord(tagger, sum("tags" in layer.scheme.needs for layer in self.compressed_layers))
        for layer in self.compressed_layers:
            if layer.reads_tags:
                layer.record = self.tokens
        self._warned = False

    def _meet(self, model: torch.nn.Module) -> None:
        """Reads the token ids of the model's forwards from now on, those that are given this cache.

        Neither keeps the other alive.
        """
        if self._model() is not model:
            self._watch(model)
        super()._meet(model)

    def _watch(self, model: torch.nn.Module) -> None:
        handle = model.register_forward_pre_hook(_Hook(self), with_kwargs=True)
        weakref.finalize(self, handle.remove)

    def note_step(self, input_ids: Tensor | None) -> None:
        """See `MixedKVCache.note_step`: the ids of generated tokens, which the next prompt's tags depend on."""
        if input_ids is not None and input_ids.dim() == 2:
            self.tokens.note_step(input_ids, self.compressed_layers[0].get_seq_length())

    @property
    def _seen(self) -> int:
        self._catch_up()
        return (self.compressed_layers or self.layers)[0].get_seq_length()  # type: ignore[union-attr]

    def see(self, input_ids: Tensor, attention_mask: Tensor | None = None, **inputs: Any) -> None:
        """Shows the cache the conversation before the model gets its newest part.

        This is needed if the cache was made from a config, or if the model gets embeddings or chunks of a prompt.
        Cached tokens whose ids were not shown before become known. A processor's output can be passed as it is:
        ``cache.see(**processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt"))``.

        Args:
            input_ids: (B, n), all tokens of the conversation, including the cached ones.
            attention_mask: (B, n), 0 at padding, or None.
            **inputs: the rest of the processor's output, which is ignored.

        Raises:
            ValueError: another shape, no more tokens than are cached, or tokens that differ from the cached ones.
                Nothing is changed then.
        """
        seen, layers = self._seen, self.compressed_layers
        held = layers[0].batch_size if seen and layers else input_ids.shape[0]
        if input_ids.dim() != 2 or input_ids.is_floating_point():
            raise ValueError(
                f"input_ids: got {input_ids.dtype} of {tuple(input_ids.shape)}, allowed token ids (batch, tokens)."
            )
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask: got {tuple(attention_mask.shape)}, allowed the shape of input_ids, "
                f"{tuple(input_ids.shape)}."
            )
        if input_ids.shape[0] != held:
            raise ValueError(f"input_ids: got {input_ids.shape[0]} rows, but the cache holds {held}.")
        if input_ids.shape[1] <= seen:
            raise ValueError(
                f"input_ids: got {input_ids.shape[1]} tokens, but {seen} are cached; pass all tokens of the "
                "conversation, both the cached ones and the new ones."
            )
        self.tokens.expect(input_ids, attention_mask, seen)

    def arrive(self, ids: Tensor, mask: Tensor | None = None) -> None:
        """Takes note of what the model is about to be given, new tokens (B, t) first; the model's hook calls this.

        Raises:
            ValueError: other tokens than `see` was shown. Nothing is changed then.
        """
        seen, layers = self._seen, self.compressed_layers
        if not layers or (seen and ids.shape[0] != layers[0].batch_size):
            # Layers refuse a wrong number of rows themselves, and without layers nothing has widths.
            return
        recording = any(layer.record_past for layer in layers)
        if seen and (ids.shape[1] == 1 or recording):
            # One token, or a few that are guessed (assisted decoding): generated.
            self.tokens.note_step(ids, seen)
        else:
            self.tokens.tag_prompt(ids, mask, seen)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if is_recorded():
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if not self._warned and not self.tokens.length and key_states.shape[2] > 1:
            self._warned = True
            logger.warning(
                "TriAxialCache was not shown any token ids, so everything is held in 4 bits: make it with the model "
                "itself, TriAxialCache(model, tokenizer), or call cache.see(input_ids) before the model."
            )
        if self.tokens.expected and not self._seen:
            # Beams come as several rows of the ids that were shown, if no hook shows the forward.
            self.tokens.begin(key_states.shape[0])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _beside(self, verb: str, given: Any = None) -> Beside:
        """The record of tokens changes with the layers."""
        record = self.tokens
        acts: dict[str, Callable[[], None]] = {
            # Layers must know first how many tokens are left.
            "crop": lambda: record.crop(self._seen),
            "rows": lambda: record.take_rows(given),
            "reset": record.clear,
        }
        return [(record, acts[verb])]

    def _packed_beside(self) -> dict[str, Packed]:
        return {"tokens": self.tokens.pack()}

    def _unpack_beside(self, found: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        held = {key: tensors[f"tokens.{key}"] for key in ("ids", "tags") if f"tokens.{key}" in tensors}
        self.tokens.unpack(found["tokens"], held)

    def __deepcopy__(self, memo: dict[int, Any]) -> TriAxialCache:
        """Independent layers and tokens, which the same model shows its ids; config and scheme are shared."""
        new = super().__deepcopy__(memo)
        assert isinstance(new, TriAxialCache)
        new.tokens = copy.deepcopy(self.tokens, memo)
        model = self._model()
        if model is not None:
            new._watch(model)
        return new


def make_cache(
    model: Any,
    what: Preset | Scheme | str | Path | Mapping[str, Any] | None,
    tokenizer: Any = None,
    tagger: Tagger | None = None,
) -> Cache:
    """An empty cache of a preset (see `get_preset`); None is Transformers' own cache.

    Args:
        model: that is to use it; below an adapter, if it has one.
        tokenizer: the model's, for schemes that read roles from token ids.
        tagger: in its place; make one and use it for many caches.
    """
    if what is None:
        return DynamicCache(config=model.config.get_text_config(decoder=True))
    preset = get_preset(what)
    if "tags" in preset.needs:
        return TriAxialCache.of_preset(model, preset, tokenizer=tokenizer, tagger=tagger)
    return MixedKVCache(model, preset)
