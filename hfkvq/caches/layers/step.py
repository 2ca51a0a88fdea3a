"""A step of a layer in one go, where the kernels can do it whole: begin, attend and finish in one call."""

from __future__ import annotations

from torch import Tensor

from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.masks import has_room

from .layer import KVLayer


def take_step(layer: KVLayer, query: Tensor, arguments: AttentionArguments) -> Tensor | None:
    """What `forward.attend` does, for the staged tokens of a step: (B, Q, Hq, Dv), as models take it.

    None where it has to go step by step: nothing is done then.
    """
    steps = layer.steps
    if steps is not None and not steps.run_eagerly:
        if not steps.take_step(query.shape[2], arguments):
            return None
        return steps.run(query, arguments).transpose(1, 2).contiguous()
    # Other masks differ from step to step.
    if arguments.mask is not None and not has_room(arguments.mask):
        return None
    return None if arguments.bias is not None or arguments.sinks is not None else fused_step(layer, query, arguments)


def fused_step(layer: KVLayer, query: Tensor, arguments: AttentionArguments) -> Tensor | None:
    """`take_step` of one new token a row over pages that grow, without sinks and bias."""
    store = layer.store
    if not layer.fuses_steps or store is None or layer.staged is None or query.shape[2] != 1:
        return None
    keys, values = layer.staged
    if keys.shape[2] != 1 or layer.padding is not None or layer.record_past:
        return None
    if layer.eviction is not None and not layer.eviction.lets_step_pass():
        return None
    queries, observing = layer.queries, None
    if queries is not None and layer.new_columns:
        observing = queries.observing()
        if observing is None:
            return None
    # What is observed, or a tag, may have a say in what is sealed.
    seals = not layer.defer and queries is None and layer.tags is None
    before = store.state
    query = layer.smoothed_query(query)
    try:
        done = store.step(query, keys, values, arguments, seals, observing)
    except BaseException:
        if store.longest > before.longest:
            layer.staged, layer.new_columns, layer.uncommitted = None, 0, True
        raise
    if done is None:
        return None
    layer.staged, layer.new_columns = None, 0
    out, due = done
    layer.uncommitted = due or layer.defer
    if due and not layer.defer:
        layer.settle()
    return out
