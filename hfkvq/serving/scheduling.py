"""How the engine's scheduler takes requests of several sequences, where there is nothing that these could share."""

from __future__ import annotations

from typing import Any


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
