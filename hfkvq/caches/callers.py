"""Who is calling: `generate` shows a cache neither its model nor its settings, and this looks for them once a call."""

from __future__ import annotations

import sys
from typing import Any

import torch


def _config_of(module: Any) -> Any:
    config = getattr(module, "config", None)
    text = getattr(config, "get_text_config", None)
    return config if text is None else text(decoder=True)


def calling_model(config: Any = None) -> torch.nn.Module | None:
    """The outermost model of this text config among the callers: the one that `generate`, or a user's loop, calls.

    Without a config, the outermost model that has one.
    """
    found, frame = None, sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self" and code.co_name in _CALLS:
            module = frame.f_locals.get("self")
            if isinstance(module, torch.nn.Module):
                own = _config_of(module)
                if own is not None and (config is None or own is config):
                    found = module
        frame = frame.f_back
    return found


# What calls a model: PyTorch, and Transformers where it asks a cache before it does.
_CALLS = frozenset({"_wrapped_call_impl", "_call_impl", "_valid_auto_compile_criteria"})


def asked_to_compile() -> bool | None:
    """Whether the `generate` that asks ``is_compileable`` was given a ``compile_config``; None if another one asks."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name in ("ask_for_compiling", "is_compileable"):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != "_valid_auto_compile_criteria":
        return None
    settings = frame.f_locals.get("generation_config")
    return settings is not None and settings.compile_config is not None


def refuse_bare(cache: Any) -> None:
    """Raises ValueError if an encoder-decoder that calls was given this cache for its cross-attention as well."""
    bare, frame = False, sys._getframe(1)
    while frame is not None:
        held = frame.f_locals.get("past_key_values")
        if getattr(held, "self_attention_cache", None) is cache:
            return
        bare = bare or held is cache
        frame = frame.f_back
    if bare:
        name = type(cache).__name__
        raise ValueError(
            f"past_key_values: got a bare {name}, but cross-attention needs a cache of its own; pass "
            f"EncoderDecoderCache({name}(model, ...), DynamicCache()), both of them from transformers."
        )


def asked_for_probabilities() -> bool:
    """Whether the model that computes attention was asked for probabilities (``output_attentions``)."""
    frame = sys._getframe(1)
    while frame is not None:
        names = frame.f_code.co_varnames
        # An argument of old, and what Transformers' hooks fill now.
        if "output_attentions" in names and frame.f_locals.get("output_attentions"):
            return True
        if "collected_outputs" in names and "attentions" in frame.f_locals.get("collected_outputs", ()):
            return True
        frame = frame.f_back
    return False


def is_drafting() -> bool:
    """Whether a model is called to draft tokens for another one, in assisted decoding."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "get_candidates":
            return True
        frame = frame.f_back
    return False


def draft_of_caller() -> torch.nn.Module | None:
    """The model that drafts for the assisted decoding that calls, if one does."""
    frame = sys._getframe(2)
    if frame.f_code.co_name != "_assisted_decoding":
        return None
    found = frame.f_locals.get("assistant_model")
    return found if isinstance(found, torch.nn.Module) else None


def inputs_of_positions() -> dict[str, Any]:
    """What the `generate` that works out positions was given, by name; nothing if something else asks."""
    frame = sys._getframe(2)
    if frame.f_code.co_name != "_prepare_position_ids_for_generation":
        return {}
    given = frame.f_locals.get("model_kwargs") or {}
    return {"input_ids": frame.f_locals.get("inputs_tensor"), **given}
