"""Kernels of other packages: layouts by their inverse, a fake of one package from end to end, plain Triton."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from evals.other_kernels import __main__ as script
from evals.other_kernels import kitty, kivi, turboquant
from evals.other_kernels.peer import paged
from evals.other_kernels.split_kv import GRID, split_kv
from hfkvq.measure.bench import kernels
from hfkvq.measure.bench.cases import Shape
from hfkvq.measure.bench.kernels import error_of
from hfkvq.measure.bench.timing import Timing


@pytest.mark.parametrize("heads_first", [False, True])
def test_pages_hold_tokens_in_order_and_zeros_behind(heads_first):
    x = torch.arange(2 * 3 * 5 * 4.0).view(2, 3, 5, 4)
    pages = paged(x, 2, heads_first)
    tokens = pages.transpose(1, 2) if heads_first else pages
    assert torch.equal(tokens.reshape(2, 6, 3, 4)[:, :5].transpose(1, 2), x)
    assert not tokens.reshape(2, 6, 3, 4)[:, 5].any()


def test_codes_come_back_from_their_words():
    x = torch.randn(2, 64, 3).half()
    for bits, most in ((2, 0.5), (4, 0.1)):
        words, scale, least = kivi.pack(x, bits, 1)
        assert words.shape == (2, 64 * bits // 32, 3)
        assert error_of(kivi.unpacked(words, scale, least, bits, 1), x) < most
    assert kitty.two_bits(torch.tensor([0b11100100], dtype=torch.uint8)).tolist() == [0, 1, 2, 3]
    assert turboquant.unpack(torch.tensor([0b10001000, 0b11000110, 0b11111010]), 3, 8).tolist() == list(range(8))
    matrix = turboquant.rotation(8, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix, torch.eye(8))


def flash(wrong: float = 1.0):
    """FlashAttention as vLLM packages it: rows of pages, or rows one after the other; queries are a row's newest."""

    def varlen(q, k, v, *, softmax_scale, block_table=None, seqused_k=None, cu_seqlens_k=None, **options):
        queries, outs = options["max_seqlen_q"], []
        for i in range(len(q) // queries):
            if block_table is None:
                keys, values = (x[cu_seqlens_k[i] : cu_seqlens_k[i + 1]] for x in (k, v))
            else:
                keys, values = (x[block_table[i].long()].flatten(0, 1)[: seqused_k[i]] for x in (k, v))
            keys, values = (x.float().transpose(0, 1)[None] for x in (keys, values))
            query = q[i * queries : (i + 1) * queries].float().transpose(0, 1)[None]
            outs.append(wrong * script.plain(query, keys, values, softmax_scale)[0].transpose(0, 1))
        return torch.cat(outs).to(q.dtype)

    plan = {"get_scheduler_metadata": lambda **options: "a plan", "FA2_AVAILABLE": True, "FA3_AVAILABLE": True}
    return SimpleNamespace(flash_attn_varlen_func=varlen, **plan)


@pytest.fixture
def vllm(monkeypatch):
    """Only vLLM's FlashAttention is installed; times are invented, 5 us for each call."""
    for root in ("vllm", "flashinfer", "kitty", "kivi_gemv", "bit_decode_cuda"):
        for name in [x for x in sys.modules if x.partition(".")[0] == root]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, root, None)

    def install(wrong: float = 1.0):
        name = "vllm.vllm_flash_attn.flash_attn_interface"
        module = ModuleType(name)
        vars(module).update(vars(flash(wrong)))
        for package in ("vllm", "vllm.vllm_flash_attn"):
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
        monkeypatch.setitem(sys.modules, name, module)

    def timed(calls, replays):
        calls[0]()
        return Timing(5.0, 5.0, 5.0, 1, 1, replays)

    properties = SimpleNamespace(
        name="Synthetic 9000", major=9, minor=0, multi_processor_count=2, L2_cache_size=10**5, total_memory=10**9
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch, "device", lambda *names: torch.empty(0).device)
    monkeypatch.setattr(script, "CONTEXT", 256)
    monkeypatch.setattr(kernels, "self_check", lambda *rest: {})
    monkeypatch.setattr(kernels, "copy_bandwidth", lambda device: (10**6, Timing(1, 1, 1, 1, 1, 1)))
    for module in (script, kernels):
        monkeypatch.setattr(module, "time_calls", timed)
    monkeypatch.setattr(script, "GRID", GRID[:1])
    return install


SIZES = "--sizes 1x256 --formats int4 --heads 4 --kv-heads 2 --head-dim 32 --peers vllm-fa3,vllm-fa2,flashinfer"


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter")
def test_a_run_without_a_gpu(vllm, tmp_path, capsys):
    vllm()
    record = script.main([*SIZES.split(), "--json", str(tmp_path / "a.json")])
    assert "flashinfer: flashinfer-python is not installed" in capsys.readouterr().out
    assert kernels.load(tmp_path / "a.json") == record
    rows = {row["name"]: row for row in record["rows"]}
    assert {"plain Triton", "vllm-fa3", "vllm-fa2", "int4"} <= set(rows)
    assert all(rows[name]["us"]["p50"] == 5 for name in ("plain Triton", "vllm-fa3", "int4"))
    assert rows["vllm-fa3"]["remark"] in ("pages of 128", "pages of 256", "no pages")


def test_a_wrong_kernel_is_not_timed(vllm, monkeypatch):
    vllm(1.05)
    monkeypatch.setattr(script, "time_calls", lambda *rest: pytest.fail("it was timed"))
    (peer,) = script.present(["vllm-fa2"])
    shape = Shape(2, 256, 4, 2, 32)
    checked = script.check_peers([peer], [shape], torch.empty(0).device)
    assert all(words.startswith("wrong: off by 0.05") for words in checked["vllm-fa2"].values())
    row = script.measure_peer(peer, shape, shape.data(torch.empty(0).device), 30, 4e12, checked["vllm-fa2"])
    assert row["error"].startswith("wrong: off by 0.05")


def exact(data):
    return F.scaled_dot_product_attention(*(x.double() for x in data), enable_gqa=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter")
@pytest.mark.parametrize("context", [128, 131])
def test_plain_triton(context):
    shape = Shape(2, context, 4, 2, 32)
    data = shape.data(torch.device("cpu"))
    assert error_of(split_kv(*data, shape.scaling), exact(data)) < 0.005


@pytest.mark.gpu
def test_every_variant_of_plain_triton_gives_the_same():
    shape = Shape(2, 5000)
    data = shape.data(torch.device("cuda"))
    for tuning in GRID:
        assert error_of(split_kv(*data, shape.scaling, tuning), exact(data)) < 0.005
