"""Prompts behind a context, without a mask: what PyTorch's kernels are asked, and what is made of their answers."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from hfkvq.caches import attention as attending
from hfkvq.caches import behind, dense
from hfkvq.caches.attention import hfkvq_attention
from hfkvq.caches.layers import KVLayer, PaddingReader
from hfkvq.caches.once import say_once
from hfkvq.kernels.arguments import AttentionArguments
from tests.caches.driver import DIM, HEADS, SHARE, attention, small, with_sums

SCALING = 0.2


def given(device="cpu", dtype=torch.float32, queries=40, columns=140, batch=2, dim=64):
    """Queries, keys and values."""
    sizes = ((8, queries), (2, columns), (2, columns))
    return (torch.randn(batch, heads, tokens, dim, device=device, dtype=dtype) for heads, tokens in sizes)


class Module(torch.nn.Module):
    is_causal, num_key_value_groups = True, SHARE


@pytest.fixture
def plain(monkeypatch):
    """PyTorch's kernels, which are a GPU's, in f32; gives what each was asked for, and whether causal."""
    asked = []

    def stand_in(name):
        def ask(query, keys, values, scaling, causal):
            asked.append((name, keys.shape[2], causal))
            return with_sums(query, keys, values, scaling, causal)

        return ask

    monkeypatch.setattr(behind, "_cudnn", stand_in("cudnn"))
    monkeypatch.setattr(behind, "flash", stand_in("flash"))
    monkeypatch.setattr(behind, "can_use_cudnn_attention", lambda params: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(behind, "takes", lambda *rest: True)
    monkeypatch.setattr(dense, "takes", lambda *rest: True)
    return asked


@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_it_is_causal_attention(plain, monkeypatch, name):
    """cuDNN for much, in two parts; flash attention for little, in one."""
    query, keys, values = given()
    whole = query.shape[:3].numel() * 100
    monkeypatch.setattr(behind, "PAYS", whole + (name == "flash"))
    arguments = AttentionArguments(SCALING)
    got, _ = dense.dense_attention(None, query, keys, values, arguments)
    assert torch.allclose(got.transpose(1, 2), attention(query, keys, values, None, SCALING), atol=1e-5)
    assert plain == [("flash", 140, True)] if name == "flash" else [("flash", 40, True), ("cudnn", 100, False)]


def test_queries_go_in_parts(plain, monkeypatch):
    """Parts of one length share a plan, which is worth its time to all of them; the rest has to be worth its own."""
    query, keys, values = given()
    monkeypatch.setattr(behind, "PART", 12)
    monkeypatch.setattr(behind, "PAYS", 3 * query[:, :, :12, 0].numel() * 100)
    monkeypatch.setattr(behind, "_done", {})
    got, _ = dense.dense_attention(None, query, keys, values, AttentionArguments(SCALING))
    assert torch.allclose(got.transpose(1, 2), attention(query, keys, values, None, SCALING), atol=1e-5)
    assert plain == [("flash", 40, True), *3 * [("cudnn", 100, False)], ("flash", 100, False)]


def test_cudnn_may_refuse_what_it_was_said_to_take(plain, monkeypatch, caplog):
    """Flash attention takes it, and a warning says so once; a lack of memory is nothing that it would mend."""
    raised = [RuntimeError("No valid execution plans built."), torch.OutOfMemoryError("out of memory")]

    def refuse(*rest):
        raise raised[0]

    monkeypatch.setattr(behind, "PAYS", 0)
    monkeypatch.setattr(behind, "_cudnn", refuse)
    say_once.cache_clear()
    query, keys, values = given()
    for _ in range(2):
        got, _ = dense.dense_attention(None, query, keys, values, AttentionArguments(SCALING))
        assert torch.allclose(got.transpose(1, 2), attention(query, keys, values, None, SCALING), atol=1e-5)
    assert plain == 2 * [("flash", 40, True), ("flash", 100, False)]
    assert [record.message.split(";")[0] for record in caplog.records] == ["cuDNN has no plan for long prompts here"]
    del raised[0]
    with pytest.raises(torch.OutOfMemoryError):
        dense.dense_attention(None, query, keys, values, AttentionArguments(SCALING))


def test_no_plan_is_made_in_a_graph(plain, monkeypatch):
    """The call that loses more than a plan's time has flash attention still, so that there is no plan behind it."""
    query, keys, values = given()
    work, capturing = query.shape[:3].numel() * 100, []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    monkeypatch.setattr(behind, "_done", {})
    monkeypatch.setattr(behind, "LOST", work * 3 // 2)
    found = []
    for capture in (False, False, True, False, True):
        plain.clear()
        capturing[:] = [True] * capture
        dense.dense_attention(None, query, keys[:, :, :140], values[:, :, :140], AttentionArguments(SCALING))
        found.append(plain[-1][0])
    assert found == ["flash", "flash", "flash", "cudnn", "cudnn"]


def test_each_device_gets_a_plan(monkeypatch):
    monkeypatch.setattr(behind, "_done", {})
    monkeypatch.setattr(behind, "LOST", 1)
    asked = [torch.empty(1, 1, 4, 8, device=device) for device in ("cpu", "meta", "cpu", "meta")]
    assert [behind.pays(x, x, 10) for x in asked] == [False, False, True, True]


def test_threads_ask_for_plans(monkeypatch):
    """Lengths are forgotten in one thread while another one looks for the oldest."""
    monkeypatch.setattr(behind, "_done", {})
    monkeypatch.setattr(behind, "MOST_LENGTHS", 1)
    x, failed, interval = torch.empty(1, 1, 4, 8), [], sys.getswitchinterval()

    def ask(first):
        try:
            for columns in range(first, first + 3000):
                behind.pays(x, x, columns)
        except (KeyError, RuntimeError, StopIteration) as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(3000 * i + 1,)) for i in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed
    assert len(behind._done) == 1


def test_a_length_that_comes_again_gets_a_plan(plain, monkeypatch):
    """Once flash attention has lost the time of one; other lengths start anew, and nothing is planned in a graph."""
    query, keys, values = given()
    work = query.shape[:3].numel() * 100
    capturing = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    monkeypatch.setattr(behind, "_done", {})
    monkeypatch.setattr(behind, "LOST", 2 * work)
    monkeypatch.setattr(behind, "MOST_LENGTHS", 2)

    def asked(columns=140, capture=False):
        plain.clear()
        capturing[:] = [True] * capture
        dense.dense_attention(None, query, keys[:, :, :columns], values[:, :, :columns], AttentionArguments(SCALING))
        return plain[-1][0]

    assert [asked(), asked(capture=True), asked(), asked(capture=True)] == 4 * ["flash"]
    assert [asked(), asked(capture=True), asked()] == 3 * ["cudnn"]
    assert asked(139) == "flash"
    assert asked() == "cudnn"
    # Two lengths are remembered: the one that was asked for last, and this; then the oldest is forgotten.
    assert [asked(138), asked(137), asked()] == 3 * ["flash"]


@pytest.mark.parametrize(("major", "first"), [(8, "flash"), (9, "cudnn"), (10, "cudnn"), (12, "flash")])
def test_cudnn_is_asked_where_it_is_the_faster_one(plain, monkeypatch, major, first):
    """It plans for each length, which elsewhere gains nothing that anybody measured."""
    monkeypatch.setattr(behind, "PAYS", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    dense.dense_attention(None, *given(), AttentionArguments(SCALING))
    assert plain[-1] == (("flash", 140, True) if first == "flash" else ("cudnn", 100, False))


@pytest.mark.parametrize("pays", [1 << 60, 0])
@pytest.mark.parametrize("preset", ["int4", "saw-int4", "saw-int4-kv", "kvarn", "triaxial", "full"])
def test_a_layers_prompt_behind_its_pages(plain, monkeypatch, preset, pays):
    """The same as with a mask, though nothing is rotated back: in one call, or apart where cuDNN has the context."""
    monkeypatch.setattr(behind, "PAYS", pays)
    outs = []
    for masked in (True, False):
        torch.manual_seed(0)
        layer = KVLayer(small(preset), PaddingReader())
        for tokens in (90, 1, 1, 33):
            query, keys, values = (torch.randn(2, heads, tokens, DIM) for heads in (HEADS * SHARE, HEADS, HEADS))
            handles = layer.update(keys, values)
            mask = torch.ones(tokens, layer.seen, dtype=torch.bool).tril(layer.seen - tokens)[None, None]
            with monkeypatch.context() as patch:
                if masked:
                    patch.setattr(attending, "is_plain", lambda *rest: False)
                out, _ = hfkvq_attention(
                    Module(), query, *handles, mask if masked or tokens < 33 else None, scaling=SCALING
                )
        outs.append((out, layer.dense("keys"), layer.dense("values")))
    assert plain == ([("flash", 125, True)] if pays else [("flash", 33, True), ("cudnn", 92, False)])
    torch.testing.assert_close(outs[1][0], outs[0][0], rtol=1e-4, atol=1e-4)
    # What is stored then is the same to the bit.
    assert all(torch.equal(a, b) for a, b in zip(*(x[1:] for x in outs), strict=True))


@pytest.mark.parametrize(
    ("mask", "more", "expected"),
    [
        (None, {}, True),
        (None, {"sliding_window": 500}, True),
        (None, {"sliding_window": 30}, False),
        (None, {"softcap": 30.0}, False),
        (None, {"dropout": 0.1}, False),
        (None, {"position_bias": torch.zeros(1, 8, 40, 140)}, False),
        (torch.ones(1, 1, 40, 140, dtype=torch.bool), {}, False),
    ],
)
def test_what_goes_without_a_mask(plain, mask, more, expected):
    query, keys, values = given()
    arguments = AttentionArguments(SCALING, mask, more.get("softcap", 0.0))
    out, _ = dense.dense_attention(None, query, keys, values, arguments, **more)
    assert out.shape == (2, 40, 8, 64)
    assert bool(plain) == expected


def test_a_bias_is_not_all_that_hides():
    """Of several queries without a mask, where it becomes one."""
    made = AttentionArguments(1.0, bias=torch.zeros(1, 2, 3, 5)).biased().mask
    assert made is not None
    assert (made[0, 0] > -1).tolist() == torch.ones(3, 5, dtype=torch.bool).tril(2).tolist()
    made = AttentionArguments(1.0, bias=torch.zeros(1, 2, 3, 5), causal=False).biased().mask
    assert made is not None
    assert (made == 0).all()


def test_without_a_gpu_there_is_a_mask():
    assert not behind.takes(*given())


@pytest.mark.gpu
@pytest.mark.parametrize("part", [1024, 128])
@pytest.mark.parametrize("pays", [0, 1 << 60])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(monkeypatch, part, pays, dtype):
    """Either way: its error is at most twice that of PyTorch's attention with a mask."""
    monkeypatch.setattr(behind, "PAYS", pays)
    monkeypatch.setattr(behind, "PART", part)
    query, keys, values = given("cuda", dtype, 200, 1100, dim=128)
    # As models make queries.
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert behind.takes(query, keys, values)
    got = behind.attend_behind(query, keys, values, SCALING)
    exact = attention(query.float(), keys.float(), values.float(), None, SCALING)
    triangle = torch.ones(200, 1100, dtype=torch.bool, device="cuda").tril(900)
    many = (x.repeat_interleave(4, 1) for x in (keys, values))
    usual = torch.nn.functional.scaled_dot_product_attention(query, *many, triangle, scale=SCALING).float()
    assert (got.float() - exact).square().mean() <= 4 * (usual - exact).square().mean()
