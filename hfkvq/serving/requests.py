"""Requests that would end the engine: they are refused, or taken in another way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def refusal_of_request(input_ids: Sequence[int], new: int | None, room: int) -> ValueError | None:
    """Why no engine with blocks for ``room`` tokens could ever answer a request, if it could not."""
    if not len(input_ids):
        # A batch without a token would end the engine for everybody.
        return ValueError("request: got a prompt without tokens, allowed one token or more.")
    if len(input_ids) + (new or 1) > room:
        return ValueError(
            f"request: got {len(input_ids)} tokens and {new} new ones, allowed {room} together, since all blocks hold "
            "no more; shorten it, or give the engine more num_blocks."
        )
    return None


def spread_short_requests(scheduler: Any) -> None:
    """From now on, sequences of a request with one token to compute are requests of their own.

    The engine computes all of a prompt but its last token, copies the request, and gives each sequence that token. If
    there is no other one to compute, since the prompt has no more or shares what stands before, the batch is without a
    token; and one that is empty ends the engine, for everybody.
    """
    schedule = scheduler._schedule_request

    def schedule_or_spread(state: Any, tokens: list[int], *args: Any, **kwargs: Any) -> None:
        if len(tokens) == 1 and state.num_children:
            count, state.num_children = state.num_children, 0
            for i in range(count):
                child = state.create_equivalent_initial_request()
                child.request_id = f"{state.request_id}__child#{i}"
                scheduler.add_waiting_request(child)
        schedule(state, tokens, *args, **kwargs)

    scheduler._schedule_request = schedule_or_spread
