"""vLLM with compressed pages: a plug-in of vLLM 0.25, which loads it where ``HFKVQ_SCHEME`` names a scheme.

HFKVQ_SCHEME=saw-int4 vllm serve MODEL --attention-backend CUSTOM --kv-cache-dtype int4_per_token_head
"""

from __future__ import annotations

import logging
import os

BACKEND = "hfkvq.vllm.backend.Backend"

DTYPE = "int4_per_token_head"
"""The name of the cache dtype that stands for pages of any width, one that vLLM keeps as bytes."""

SUPPORTED = "0.25."

logger = logging.getLogger("hfkvq")


def register() -> None:
    """Registers the backend as vLLM's CUSTOM one; does nothing where ``HFKVQ_SCHEME`` is not set.

    Raises:
        ValueError: the scheme is unknown, or vLLM is of another version.
    """
    name = os.environ.get("HFKVQ_SCHEME")
    if not name:
        return
    from vllm import __version__ as version  # type: ignore
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend  # type: ignore

    from hfkvq.caches import get_scheme

    if not version.startswith(SUPPORTED):
        raise ValueError(f"vLLM: got version {version}, allowed {SUPPORTED}x; install that, or unset HFKVQ_SCHEME.")
    try:
        get_scheme(name)
    except ValueError as error:
        raise ValueError(f"HFKVQ_SCHEME: {error}") from None
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    logger.info("%s: takes effect with --attention-backend CUSTOM --kv-cache-dtype %s", name, DTYPE)
