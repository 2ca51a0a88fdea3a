"""A step without the host: the kernels equal the reference bit for bit, and both what the host's own path does."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import LENGTH, RUNS, START
from hfkvq.kernels.pages import PageFormat, StoreFormat
from hfkvq.kernels.seal import channel_widths, parse_rule, range_rule
from hfkvq.kernels.step import MAX_STEP, StepPlan, StepState, buffer_bytes, run_step, seen, settle, views_of_buffer
from tests.kernels.stores import spoil

HEADS, SHARE, DIM = 2, 2, 32

PLANS = {
    "token": ("s0;k32;v0;4t32p16/4t32p16", (0, 0), (1, 1), "", ""),
    "sixteen bits": ("s3;k0;v0;16t1p16/16t1p16", (0, 0), (1, 1), "", ""),
    "kitty": ("s4;k0;v0;2c16p16+4x8/2t32p16", (0, 16), (16, 16), "k_abs", ""),
    "trellis": ("s4;k0;v32;2c16p16+4x8/2t32p16t", (0, 16), (16, 16), "k_abs", ""),
    "trellis keys": ("s4;k0;v32;1c16p16t+3x16/1t32p16t", (0, 16), (16, 16), "error", "sum"),
    "values by the token": ("s0;k0;v0;2c8p16/2t8p16", (0, 16), (16, 1), "", ""),
    "mixed": ("s4;k0;v0;2c8p16+4x8+16x8/2t8p16", (0, 0), (16, 16), range_rule(), "sum"),
    "mixed, thresholds": ("s0;k0;v0;2c8p16+4x8+16x8/2t8p16", (0, 0), (16, 16), range_rule(2.0, 1.0, 1.7), "sum"),
    "normed": ("s0;k32;v32;4c16p16n/2t32p16n", (0, 0), (16, 16), "", ""),
    "all queries": ("s0;k0;v0;2c8p16+4x8+16x8/2t8p16", (0, 0), (16, 16), range_rule(), "total"),
    "fitted": ("s0;k32;v0;2c8p16f3+4x8/2t8p16f4", (0, 0), (16, 1), "error", "sum"),
    "two runs": ("s2;k0;v0;2c8p32/2t8p32|4t8p32/4t8p32", (3, 3), (8, 8), "", ""),
    "two runs, fp8": ("s0;k0;v0;8t32p16/8t32p16|16t1p16/16t1p16", (16, 16), (16, 16), "", "keep"),
}


def plan_of(name, capacity=200, dtype=torch.float32, rows=3):
    store, local, unit, rule, query = PLANS[name]
    form = StoreFormat.parse(store)
    blocks = tuple(-(-capacity // keys.page_size) for keys, _ in form.runs)
    tails = tuple(a + b - 1 + MAX_STEP for a, b in zip(local, unit, strict=True))
    heads = HEADS * SHARE if query == "keep" else 0
    return StepPlan(
        store, rows, HEADS, DIM, DIM, str(dtype), blocks, tails, local, unit, capacity, rule, query, query_heads=heads
    )


def make(plan, device, starts=(0, 5, 2)):
    """An empty buffer of whatever was in memory, but for what has to be set."""
    buffer = torch.full((buffer_bytes(plan),), 255, dtype=torch.uint8, device=device)
    state = views_of_buffer(buffer, plan)
    for part in (state.counters, state.new, state.sealed, state.flag, state.sums, state.counts, *state.windows):
        part.zero_()
    for run, blocks in zip(state.runs, plan.blocks, strict=True):
        order = torch.randperm(plan.rows * blocks, generator=torch.Generator().manual_seed(3))
        run.table.copy_(order.int().view(plan.rows, blocks))
    for run, formats in zip(state.runs, plan.format.runs, strict=True):
        for parts, fmt in zip((run.keys, run.values), formats, strict=True):
            for name, part in zip(fmt.names, parts, strict=True):
                spoil(name, part, fmt)
    state.counters[START] = torch.tensor(starts[: plan.rows], dtype=torch.int32)
    return buffer, state


def tokens(at, count, plan, device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(at)
    size = torch.rand(1, HEADS, 1, DIM, generator=torch.Generator().manual_seed(0)) * 4
    q = torch.randn(plan.rows, HEADS * SHARE, count, DIM, generator=generator)
    k = torch.randn(plan.rows, HEADS, count, DIM, generator=generator) * size + size
    v = torch.randn(plan.rows, HEADS, count, DIM, generator=generator)
    return [x.to(device=device, dtype=dtype) for x in (q, k, v)]


def life(plan, device, steps, dtype=torch.float32):
    """State and outputs after steps of one token, and now and then of several."""
    buffer, state = make(plan, device)
    outs = []
    for at, count in enumerate(steps):
        outs.append(run_step(*tokens(at, count, plan, device, dtype), AttentionArguments(DIM**-0.5), state, plan).cpu())
    settle(state, plan)
    return buffer, state, outs


def compare(a: StepState, b: StepState, plan: StepPlan):
    """What both hold, bit for bit; pages as far as they hold tokens."""
    names = ("counters", "flag", "sums", "counts", "query")
    assert all(torch.equal(getattr(a, name).cpu(), getattr(b, name).cpu()) for name in names)
    for x, y in zip(a.windows, b.windows, strict=True):
        assert torch.equal(x.cpu(), y.cpu())
    for i, (x, y, formats) in enumerate(zip(a.runs, b.runs, plan.format.runs, strict=True)):
        page = formats[0].page_size
        for row in range(plan.rows):
            for side, parts, others in ((0, x.keys, y.keys), (1, x.values, y.values)):
                held = int(a.counters[RUNS + 2 * i + side, row])
                if x.pos is not None:
                    assert torch.equal(x.pos[row, :held].cpu(), y.pos[row, :held].cpu())
                ids = x.table[row, : held // page].long()
                for one, other in zip(parts, others, strict=True):
                    one, other = (part.view(torch.uint8) if part.element_size() == 1 else part for part in (one, other))
                    assert torch.equal(one[ids].cpu(), other[ids.to(other.device)].cpu())


# Under the interpreter without those that differ from another in the time when sums begin, or in one side's unit.
@pytest.mark.interpreted(
    *(name for name in PLANS if name not in ("all queries", "values by the token", "two runs, fp8"))
)
@pytest.mark.parametrize("name", PLANS)
def test_kernels_equal_the_reference(name, triton_backend):
    """The reference runs on the CPU, the kernels wherever the backend has them."""
    on_gpu = triton_backend.type == "cuda"
    plan, steps = (plan_of(name), [1] * 20 + [3] + [1] * 18) if on_gpu else (plan_of(name, rows=2), [16, 5, 1])
    _, got, outs = life(plan, triton_backend, steps)
    from hfkvq.kernels.dispatch import _enabled

    with _enabled("cpu", enabled=False):
        _, expected, expected_outs = life(plan, "cpu", steps)
    compare(expected, got, plan)
    for a, b in zip(outs, expected_outs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PLANS)
def test_counts_are_those_of_the_targets(name):
    """However many tokens come at a time: all that have left the windows are sealed, whole units, and no more."""
    plan = plan_of(name)
    sink = plan.format.sink
    # One by one over the first borders of units of 16, and those of values behind a window.
    for steps in ([15, *[1] * 6, 14, *[1] * 4], [7, 1, 16, 2, 16, 3]):
        _, state, _ = life(plan, "cpu", steps)
        total = sum(steps)
        assert state.counters[LENGTH].tolist() == [total] * plan.rows
        assert int(state.flag) == 0
        for side in (0, 1):
            expected = max(max(total - sink, 0) - plan.local[side], 0) // plan.unit[side] * plan.unit[side]
            assert state.counters[RUNS + side :: 2].sum(0).tolist() == [expected] * plan.rows


@pytest.mark.interpreted("values by the token")
@pytest.mark.parametrize("name", ["values by the token", "mixed", "two runs, fp8"])
def test_without_room_a_row_stays_as_it_is(name, backend):
    """The capacity counts padding, so rows fill up together but in what they hold."""
    plan, device = plan_of(name, capacity=20), backend
    _, state = make(plan, device, starts=(0, 5, 2))
    for at in (7, 7):
        run_step(*tokens(at, at, plan, device), AttentionArguments(1.0), state, plan)
    assert int(state.flag) == 0
    before = [x.clone() for x in (state.windows[2], state.windows[3])]
    for at in range(14, 18):
        run_step(*tokens(at, 1, plan, device), AttentionArguments(1.0), state, plan)
    assert int(state.flag) == 1
    assert state.counters[LENGTH].tolist() == [18, 15, 18]
    slot = [(15 - plan.format.sink + i) % plan.tails[0] for i in range(3)]
    assert torch.equal(state.windows[2][1][:, slot], before[0][1][:, slot])


def test_without_pages_a_row_stays_as_it_is(backend):
    """A last run of one page that is full, as under a budget: the row takes no more tokens."""
    plan = dataclasses.replace(plan_of("token"), blocks=(1,))
    _, state = make(plan, backend)
    for count in (15, 1, 1, 1):
        run_step(*tokens(count, count, plan, backend), AttentionArguments(1.0), state, plan)
    assert int(state.flag) == 1
    assert state.counters[LENGTH].tolist() == [16] * plan.rows


def test_plans_and_buffers():
    for name in PLANS:
        plan = plan_of(name)
        assert StepPlan.parse(plan.spec) == plan
        buffer, state = make(plan, "cpu")
        views = [state.counters, *state.windows, *state.flat_runs, state.new, state.sealed, *state.index, state.flag]
        views += [state.sums, state.counts, state.weight, state.query]
        spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in views if x.numel())
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert spans[0][0] == buffer.data_ptr()
        assert spans[-1][1] <= buffer.data_ptr() + buffer.nbytes
        assert views_of_buffer(buffer, plan) is state


@pytest.mark.parametrize("rule", [range_rule(), range_rule(1.5, 0.5), range_rule(0.5, 0.5, 3.0)])
def test_ranges_by_hand(rule):
    """Channel c has range 3 * c / 4, hence score c / 4."""
    fmt = PageFormat(2, "channel", 8, 8, ((4, 8), (16, 8)))
    keys = torch.zeros(1, 1, 1, 8, 32)
    keys[..., 3, :] = torch.arange(32) * 0.75
    keys[..., 4, 7] = float("inf")
    widths = channel_widths(keys, fmt, rule)[0, 0, 0].tolist()
    _, over16, over4, divisor = parse_rule(rule)
    score = [c / 4 / divisor for c in range(32)]
    full = [c for c in range(24, 32) if score[c] > over16]
    some = [c for c in range(32) if score[c] > over4 and c not in full][-8:]
    assert [c for c in range(32) if widths[c] == 16] == full
    assert [c for c in range(32) if widths[c] == 4] == some


@pytest.mark.parametrize("rule", ["ranges", "range:1:2", "range:a:b:c", "k_abs:1:2:3"])
def test_unknown_rules_are_refused(rule):
    with pytest.raises(ValueError, match=r"choose: got '.*', allowed None, 'k_abs', 'range'"):
        parse_rule(rule)


@pytest.mark.parametrize("name", ["token", "two runs"])
def test_seen_is_what_the_first_row_had(name, backend):
    """Padding included; of the other rows, and of what is stored later, nothing."""
    plan = plan_of(name)
    buffer, state = make(plan, backend, starts=(6, 1, 40))
    found = [seen(buffer, plan.rows)]
    for count in (7, 3):
        run_step(*tokens(0, count, plan, backend), AttentionArguments(1.0), state, plan)
        found.append(seen(buffer, plan.rows))
    state.counters[LENGTH] = torch.tensor([21, 500, 0], dtype=torch.int32)
    found.append(seen(buffer, plan.rows))
    buffer.zero_()
    assert [x.tolist() for x in found] == [[6], [13], [16], [27]]
    assert all(x.dtype == torch.long and x.device == buffer.device for x in found)
    torch.library.opcheck(torch.ops.hfkvq.seen.default, (buffer, plan.rows))
