"""Attention to latents in CUDA C++: its source runs on the CPU, and where there is a GPU, on that."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from hfkvq.kernels.cuda import rtc
from hfkvq.kernels.cuda.latent import LARGE, SOURCE, Arguments, Arrivals, Build, Shapes, serves, splits_of
from hfkvq.kernels.pages import StoreFormat
from tests.kernels.stores import Case, assert_as_good_as_torch, attend
from tests.kernels.test_latent import checked, latents

BUILDS = {"large": LARGE, "small": Build(1, 16, 2), "two": Build(2, 9, 4)}

CASE = Case(
    runs="4t512p128/8t64p128",
    heads=1,
    share=16,
    head_dim=512,
    value_dim=64,
    rotate_keys=512,
    dtype=torch.bfloat16,
    sink=4,
    tail=(40, 40),
    pages=3,
    lengths=[4 + 310 + 17, 4 + 32 + 3],
    keys=[[310], [32]],
    values=[[310], [32]],
)


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Builds of the source that run on this machine, by build and dtype."""
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("there is no g++ on Linux")
    probe = tmp_path_factory.mktemp("cuda") / "half.cpp"
    probe.write_text("_Float16 half;\n")
    if subprocess.run([compiler, "-fsyntax-only", probe], capture_output=True).returncode:
        pytest.skip("this g++ has no f16")
    built = {}

    def machine(build: Build, dtype: torch.dtype) -> ctypes.CDLL:
        key = (build, dtype)
        if key not in built:
            path = tmp_path_factory.mktemp("cuda") / "latent.so"
            macros = {"UNITS": build.units, "SLOTS": build.slots, "TILES": build.tiles, "BF16": dtype == torch.bfloat16}
            subprocess.run(
                [
                    # Fibers jump from stack to stack, which a fortified longjmp refuses.
                    *(compiler, "-O1", "-U_FORTIFY_SOURCE", "-std=c++17", "-shared", "-fPIC", "-Wno-unknown-pragmas"),
                    *("-o", path),
                    *(f"-D{name}={int(value)}" for name, value in macros.items()),
                    *(f"-I{SOURCE.parent}", Path(__file__).with_name("cuda") / "latent.cpp"),
                ],
                check=True,
            )
            built[key] = ctypes.CDLL(str(path))
            built[key].run.restype = ctypes.c_char_p
        return built[key]

    return machine


PLANS = [(1, 1), (3, 1), (2, 2), (6, 2), (4, 4), (8, 8), (16, 8)]
"""Splits and blocks of a cluster: one block, several, one cluster, several, and units without tokens."""


def emulated(machine, layer, form, plan, sinks=None, backwards=False):
    """What the kernel makes of a layer. Counters are 0 again then."""
    q, counters, windows, runs = layer.to(torch.device("cpu"))
    batch, heads = q.shape[:2]
    out = torch.full((batch, heads, 1, 512), float("nan"), dtype=q.dtype)
    (splits, cluster), tail = plan, windows[2].shape[2]
    strides = q.stride(0), q.stride(1)
    shapes = Shapes(batch, heads, runs[0].shape[1], splits, cluster, form.sink, tail, 0.07, *strides)
    part = torch.full(shapes.part, float("nan"))
    arrived = torch.zeros(shapes.counters, dtype=torch.int32)
    given = [q, counters, *windows, *runs], sinks, out, part.data_ptr(), arrived.data_ptr()
    arguments = shapes.arguments(*given)
    error = machine.run(ctypes.byref(arguments), *shapes.grid, shapes.cluster, backwards)
    assert error is None, error.decode()
    assert not arrived.any()
    return out


def holds(machine, case, plan, change=None, sinks=None):
    layer, form = latents(case, change=change)
    got = emulated(machine, layer, form, plan, sinks)
    exact, plain = (attend(layer, dtype, 0.07, None, sinks, 0.0) for dtype in (torch.float64, case.dtype))
    assert_as_good_as_torch(got, exact, plain)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_source_is_as_good_as_torch(machines, build, dtype):
    """Of rows that end within a chunk, with a sink, a ring of loose tokens, and pages in any order."""
    holds(machines(BUILDS[build], dtype), dataclasses.replace(CASE, dtype=dtype), (4, 2))


@pytest.mark.parametrize(
    "more",
    [
        {"share": 5},
        {"sink": 0, "lengths": [310 + 17, 32 + 3]},
        {"sink": 40, "tail": (70, 70), "lengths": [40 + 310 + 66, 30], "keys": [[310], [0]], "values": [[310], [0]]},
        {"lengths": [4 + 900 + 17, 4 + 128], "keys": [[900], [128]], "values": [[900], [128]], "pages": 8},
    ],
    ids=["few heads", "no sink", "more loose than a block", "rings go round"],
)
@pytest.mark.parametrize("plan", [(1, 1), (6, 2)])
def test_rows_of_all_kinds(machines, more, plan):
    holds(machines(LARGE, torch.bfloat16), dataclasses.replace(CASE, **more), plan)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("share", [16, 5])
def test_blocks_are_joined(machines, plan, share):
    """By any number of blocks and clusters, with fewer heads than blocks have to share, and with sinks in turns."""
    case = dataclasses.replace(CASE, share=share, lengths=[331, 0, 39], keys=[[310], [0], [32]], starts=[0, 0, 11])
    case = dataclasses.replace(case, values=case.keys)
    holds(machines(LARGE, torch.bfloat16), case, plan)
    holds(machines(LARGE, torch.bfloat16), case, plan, sinks=(torch.randn(share) + 6).bfloat16())


def test_sinks_of_each_row(machines):
    layer, form = latents(CASE)
    sinks, machine = torch.randn(32) + 6, machines(LARGE, torch.bfloat16)
    got = emulated(machine, layer, form, (6, 2), sinks)
    for row in range(2):
        alone = emulated(machine, layer, form, (6, 2), sinks[16 * row : 16 * row + 16])
        torch.testing.assert_close(got[row], alone[row], atol=0, rtol=0)
    assert (got[1] != emulated(machine, layer, form, (6, 2), sinks[:16])[1]).any()


@pytest.mark.parametrize("plan", [(1, 1), (3, 1), (6, 2), PLANS[-1]])
def test_who_comes_last_does_not_matter(machines, plan):
    """The same bits, whichever cluster joins them, and in whichever order threads run."""
    layer, form = latents(CASE)
    machine = machines(LARGE, torch.bfloat16)
    first, last = (emulated(machine, layer, form, plan, backwards=backwards) for backwards in (False, True))
    torch.testing.assert_close(first, last, atol=0, rtol=0)


@pytest.mark.parametrize("grow", [0.3, 30.0])
def test_maxima_that_move_from_step_to_step(machines, grow):
    """Sums are rescaled in some steps and not in others, by little and by more than f16 holds."""
    case = dataclasses.replace(CASE, lengths=[4 + 900 + 17, 40], keys=[[900], [32]], values=[[900], [32]], pages=8)
    holds(
        machines(LARGE, torch.bfloat16), case, (1, 1), lambda _, x: x * torch.linspace(0.1, grow, x.shape[2])[:, None]
    )


LONG = dataclasses.replace(CASE, lengths=[5021, 40], keys=[[5000], [32]], values=[[5000], [32]], pages=40)
"""Rows of several clusters."""


def test_rounded_probabilities_cancel_with_minima(machines):
    """In f16, where torch rounds as finely, codes' sums and minima's must be rescaled and rounded alike."""
    case = dataclasses.replace(LONG, dtype=torch.float16)
    holds(machines(LARGE, torch.float16), case, (8, 8), lambda _, x: x * torch.linspace(0.1, 0.3, x.shape[2])[:, None])


def test_rows_without_tokens(machines):
    layer, form = latents(dataclasses.replace(CASE, lengths=[0, 39], keys=[[0], [32]], values=[[0], [32]]))
    got = emulated(machines(LARGE, torch.bfloat16), layer, form, (2, 1))
    assert (got[0] == 0).all()
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("build", BUILDS)
def test_launcher_and_source_mean_the_same(machines, build):
    machine = machines(BUILDS[build], torch.bfloat16)
    assert machine.size_of_arguments() == ctypes.sizeof(Arguments)
    assert machine.bytes_shared() == BUILDS[build].shared


RESIDENT = {1: 132, 2: 66, 4: 32, 8: 16}


def test_splits_fill_the_gpu():
    """One wave of blocks, as many as there are multiprocessors or nearly so; fewer where the row is short."""
    assert splits_of(32, 32768, RESIDENT) == (4, 4)
    assert splits_of(1, 131072, RESIDENT) == (112, 8)
    assert splits_of(1, 8192, RESIDENT) == (48, 8)
    assert splits_of(1000, 32768, RESIDENT) == (1, 1)
    # Of rows that leave half of it idle, more and shorter blocks.
    assert splits_of(70, 32768, RESIDENT)[0] > 1


def test_clusters_that_do_not_fit_are_not_chosen():
    """A GPU whose parts have other numbers of multiprocessors must not run one more wave for the last cluster."""
    assert splits_of(32, 32768, {**RESIDENT, 4: 31, 8: 14}) == (4, 2)
    assert splits_of(1, 131072, {1: 132, 2: 0, 4: 0, 8: 0})[1] == 1


def test_what_is_served():
    form = StoreFormat.parse("ls32;k512;v0;4t512p128/8t64p128")
    assert serves(form, 16, 512, 64, torch.bfloat16, 1)
    assert not serves(form, 16, 512, 64, torch.bfloat16, 2)
    assert not serves(form, 32, 512, 64, torch.bfloat16, 1)
    assert not serves(form, 16, 512, 64, torch.float32, 1)
    assert not serves(StoreFormat.parse("ls32;k512;v0;4t128p128/8t64p128"), 16, 512, 64, torch.bfloat16, 1)
    assert not serves(StoreFormat.parse("ls32;k66048;v0;4t512p128/8t64p128"), 16, 512, 64, torch.bfloat16, 1)


class Emulated:
    """Stands for `rtc.Kernel`."""

    def __init__(self, machine):
        self.machine, self.grids, self.graph = machine, [], 0

    def resident(self, cluster):
        return 6 // cluster

    def capture_of(self, stream):
        return self.graph

    def __call__(self, grid, cluster, stream, argument):
        self.grids.append((grid, cluster))
        assert self.machine.run(ctypes.byref(argument), *grid, cluster, False) is None


@pytest.fixture
def pretended(machines, monkeypatch):
    """A GPU of compute capability 9.0 with six multiprocessors, as far as launchers look; its launches by dtype."""
    from hfkvq.kernels.triton import latent

    kernels = {dtype: Emulated(machines(LARGE, dtype)) for dtype in (torch.bfloat16, torch.float16)}
    monkeypatch.setattr(latent, "capability", lambda device: (9, 0))
    monkeypatch.setattr(latent, "kernel_of", lambda dtype, device: kernels[dtype])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: types.SimpleNamespace(cuda_stream=0))
    latent._plan.cache_clear()
    yield kernels
    latent._plan.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_whole_way_of_a_call(triton_backend, pretended, dtype):
    """Blocks are joined with the sinks, and come in the order of rows and heads."""
    from hfkvq.kernels.triton import configs

    if triton_backend.type == "cuda":
        pytest.skip("there is a GPU")
    with configs.override("latent", None, cuda=2 * 3 * 128):
        checked(dataclasses.replace(CASE, dtype=dtype), triton_backend, sinks=torch.randn(16) + 6)
        checked(dataclasses.replace(CASE, dtype=dtype), triton_backend, sinks=(torch.randn(16) + 6).double())
    splits, cluster = splits_of(2, 3 * 128, {size: 6 // size for size in (1, 2, 4, 8)})
    assert pretended[dtype].grids == 2 * [((splits, 2), cluster)]


def test_counters_are_of_a_stream_or_of_a_graph(pretended):
    """Launches that may run at the same time count apart, and those one after the other do not take new ones."""
    kernel = pretended[torch.bfloat16]
    arrivals = Arrivals(kernel, torch.device("cpu"))
    kernel.graph = 7
    unready = arrivals(64, 1)
    assert unready.numel() == 64
    assert arrivals(64, 1).data_ptr() != unready.data_ptr()
    kernel.graph = 0
    eager = arrivals(64, 1)
    assert arrivals(64, 1).data_ptr() == eager.data_ptr()
    others = [arrivals(64, 2), arrivals(32, 1)]
    for graph in (7, 8):
        kernel.graph = graph
        others.append(arrivals(64, 1))
        assert arrivals(64, 1).data_ptr() == others[-1].data_ptr()
    ranges = sorted((x.data_ptr(), x.data_ptr() + 4 * x.numel()) for x in (eager, *others))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    kernel.graph = 0
    large = arrivals(Arrivals.SIZE, 3)
    assert large.numel() == Arrivals.SIZE
    assert not large.any()


def test_who_serves(pretended):
    """Nobody who was not asked for; rows with little room, masks and caps are Triton's."""
    from hfkvq.kernels.triton import configs
    from hfkvq.kernels.triton.decode import Queries, Scoring
    from hfkvq.kernels.triton.latent import _cuda_plan

    query = Queries((2, 16, 1, 576), (16 * 576, 576, 576, 1), torch.bfloat16, torch.bfloat16)
    plain, device = Scoring(None, None, 0.07, 0.0), torch.device("cpu")

    def asked(query=query, scoring=plain, blocks=3):
        return _cuda_plan("ls4;k512;v0;4t512p128/8t64p128", query, 64, 40, blocks, scoring, device)

    assert asked() is None
    with configs.override("latent", None, cuda=2 * 3 * 128):
        assert asked() is not None
        assert asked(blocks=2) is None
        assert asked(blocks=(1 << 17) + 1) is None
        assert asked(scoring=plain._replace(softcap=3.0)) is None
        assert asked(scoring=plain._replace(mask=(1, torch.bool, 400, (0, 0, 0, 1)))) is None
        assert asked(query=query._replace(dtype=torch.float32)) is None


def nvrtc_or_skip():
    try:
        rtc._nvrtc()
    except rtc.Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_compiles(dtype, tmp_path, monkeypatch):
    """Without a word from the compiler, and once: the cache on disk has it then."""
    nvrtc_or_skip()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    defines = {"UNITS": LARGE.units, "SLOTS": LARGE.slots, "TILES": LARGE.tiles, "BF16": int(dtype == torch.bfloat16)}
    code = rtc.compiled(SOURCE.read_text(), "sm_90a", defines)
    assert code[:4] == b"\x7fELF"
    monkeypatch.setattr(rtc, "_asked", lambda failed: pytest.fail("it was compiled again"))
    assert rtc.compiled(SOURCE.read_text(), "sm_90a", defines) == code


@pytest.mark.gpu
def test_what_does_not_compile_says_why(tmp_path, monkeypatch):
    nvrtc_or_skip()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(rtc.Unavailable, match="does not compile"):
        rtc.compiled("this is no source", "sm_90a", {})


def launched(monkeypatch):
    """Counts launches of the kernel, which serves from one token on."""
    from hfkvq.kernels.triton import configs

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    count = []
    launch = rtc.Kernel.__call__
    monkeypatch.setattr(rtc.Kernel, "__call__", lambda *given: (count.append(1), launch(*given)))
    return count, configs.override("latent", None, cuda=1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grow", [0.3, 1.0, 30.0])
def test_kernel_is_as_good_as_torch(monkeypatch, dtype, grow):
    count, forced = launched(monkeypatch)
    case = dataclasses.replace(LONG, dtype=dtype)
    sinks = torch.randn(case.share) + 6
    with forced:
        checked(
            case,
            torch.device("cuda"),
            sinks=sinks,
            change=lambda _, x: x * torch.linspace(0.1, grow, x.shape[2])[:, None],
        )
    assert count


@pytest.mark.gpu
@pytest.mark.parametrize("plan", PLANS)
def test_blocks_are_joined_on_a_gpu(monkeypatch, plan):
    """Rows of several lengths and one without tokens, by any number of blocks and clusters."""
    from hfkvq.kernels.triton import latent

    count, forced = launched(monkeypatch)
    monkeypatch.setattr(latent, "splits_of", lambda *given: plan)
    case = dataclasses.replace(CASE, lengths=[331, 0, 39], keys=[[310], [0], [32]], starts=[0, 0, 11])
    case = dataclasses.replace(case, values=case.keys)
    latent._plan.cache_clear()
    try:
        with forced:
            checked(case, torch.device("cuda"))
            checked(case, torch.device("cuda"), sinks=(torch.randn(16) + 6).bfloat16())
    finally:
        latent._plan.cache_clear()
    assert len(count) == 2


@pytest.mark.gpu
def test_masks_and_caps_are_left_to_triton(monkeypatch):
    count, forced = launched(monkeypatch)
    with forced:
        checked(CASE, torch.device("cuda"), softcap=3.0)
        checked(CASE, torch.device("cuda"), mask=torch.rand(2, 1, 1, max(CASE.lengths)) > 0.3)
    assert not count


def attended_on_a_gpu(case):
    """A call of the kernel, and what it counts."""
    from hfkvq.kernels import latent_attention

    layer, form = latents(case)
    q, counters, windows, runs = layer.to(torch.device("cuda"))
    return lambda: latent_attention(q, counters, windows, runs, None, None, 0.07, 0.0, form), counters


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASE, LONG], ids=["short", "long"])
def test_kernel_is_captured(monkeypatch, case):
    """A graph replays steps after tokens have come: counters are 0 again after each."""
    count, forced = launched(monkeypatch)
    attended, counters = attended_on_a_gpu(case)
    with forced:
        attended()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attended()
            again = attended()
        for _ in range(20):
            counters[1] -= 1
            graph.replay()
            torch.testing.assert_close(out, again, atol=0, rtol=0)
            torch.testing.assert_close(out, attended(), atol=0, rtol=0)
    assert count


@pytest.mark.gpu
def test_launches_side_by_side(monkeypatch):
    """On several streams, and by graphs that were captured on one: nobody counts with another's counters."""
    _, forced = launched(monkeypatch)
    attended, _ = attended_on_a_gpu(LONG)
    with forced:
        want = attended()
        torch.cuda.synchronize()
        streams, outs, graphs = [torch.cuda.Stream() for _ in range(3)], [], []
        for _ in range(30):
            for stream in streams:
                with torch.cuda.stream(stream):
                    outs.append(attended())
        torch.cuda.synchronize()
        for out in outs:
            torch.testing.assert_close(out, want, atol=0, rtol=0)
        for _ in streams:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                graphs.append((graph, [attended() for _ in range(10)]))
        for _ in range(30):
            for (graph, _), stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for _, outs in graphs:
            for out in outs:
                torch.testing.assert_close(out, want, atol=0, rtol=0)


@pytest.mark.gpu
def test_kernel_runs_on_another_gpu(monkeypatch):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    count, forced = launched(monkeypatch)
    with forced:
        checked(LONG, torch.device("cuda", 1))
        checked(LONG, torch.device("cuda", 0))
    assert len(count) == 2
