"""A budget of an engine: requests in 16 bits that step down together, in place, and never take more than the bytes."""

import random
from functools import lru_cache
from itertools import pairwise

import pytest
import torch

from hfkvq import get_scheme
from hfkvq.caches.store.row_lengths import RowState
from hfkvq.kernels import use_interpreter

serving = pytest.importorskip("hfkvq.serving", reason="Transformers before 5.19", exc_type=ImportError)

# Behind the line above: a module that was skipped before cannot be imported from.
from hfkvq.serving.ladder import Shape, ladder  # noqa: E402
from tests.caches.test_budget import Live  # noqa: E402
from tests.serving.test_batching import by_generate, generation, llama, model, prompts, settings  # noqa: E402

__all__ = ["model"]

PAGE = 32


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Pages and windows that short prompts fill."""
    monkeypatch.setattr(serving.engine, "ladder", lambda: ladder(PAGE))


class Engine:
    """An engine whose batches this thread runs one by one.

    Attributes:
        rungs: where requests stood after each batch.
        waiting: requests that waited after each batch.
    """

    def __init__(self, model, memory="6MiB", tokens=256, new=20, **given):
        self.model, self.rungs, self.waiting, self.asked = model, [], [], 0
        self.handle = serving.enable(model, memory=memory, request_tokens=tokens)
        given = {"num_blocks": None, "max_requests_per_batch": None} | given
        self.manager = model.init_continuous_batching(generation(max_new_tokens=new), settings(**given))
        self.processor = self.manager.batch_processor = self.manager._create_batch_processor()
        self.pages = self.processor.cache.cache_allocators["full_attention"]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.handle.disable()
        self.model.set_attn_implementation("sdpa")

    def ask(self, *inputs, **given):
        for ids in inputs:
            self.manager.add_request(ids, request_id=str(self.asked), **given)
            self.asked += 1

    @torch.no_grad()
    def step(self):
        """Runs a batch; False where there is none."""
        found = self.processor.prepare_next_batch()
        if found:
            self.processor._generation_step(self.model)
            self.processor.update_batch()
            self.rungs.append(self.pages.rung)
            self.waiting.append(len(self.processor.scheduler.waiting_requests))
        return found

    def run(self):
        """Runs batches until all is answered: tokens in the order of the requests. No block and no slot is lost."""
        while self.step():
            pass
        queue, found = self.manager.output_router.output_queue, {}
        while not queue.empty():
            result = queue.get()
            assert result.error is None
            found[int(result.request_id)] = result.generated_tokens
        pages, stage = self.pages, self.pages.stages[self.pages.rung]
        assert pages.slots == pages.block_table == {}
        assert sorted(pages._free) == list(range(1, stage.slots + 1))
        assert pages.pool.count_free_blocks(0) + pages.pool.num_free_sectors == stage.blocks == pages.num_blocks
        return [found[number] for number in sorted(found)]


@lru_cache
def answer(model, ids, scheme, new):
    return by_generate(model, list(ids), scheme, new)[0]


def expected(model, inputs, scheme, new=20):
    return [answer(model, tuple(ids), scheme, new) for ids in inputs]


def test_answers_are_those_of_16_bits_while_there_is_room(model):
    inputs = prompts(150, 40, 5)
    with Engine(model, max_blocks_per_request=16) as engine:
        engine.ask(*inputs)
        assert engine.run() == expected(model, inputs, get_scheme("full"))
    assert set(engine.rungs) == {0}


@pytest.mark.parametrize("blocks", [0, 16])
def test_after_a_step_down_pages_are_those_of_the_scheme(model, blocks):
    """Prompts attend to themselves whole, so from the first token on answers are those of the scheme below."""
    inputs = prompts(150, 40, 5)
    with Engine(model, max_blocks_per_request=blocks) as engine:
        engine.ask(*inputs)
        engine.step()
        assert engine.pages.step_down()
        found = engine.run()
        assert found == expected(model, inputs, ladder(PAGE)[1]) != expected(model, inputs, get_scheme("full"))
        # Requests that come to an empty engine begin in 16 bits.
        engine.ask(*inputs)
        assert engine.run() == expected(model, inputs, get_scheme("full"))
    assert set(engine.rungs) == {0, 1}


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled in this process")
def test_kernels_take_16_bits_behind_windows_and_step_down(model):
    """Triton's, interpreted."""
    pytest.importorskip("triton")
    inputs = prompts(70, 9)
    with Engine(model, new=3, max_blocks_per_request=8) as engine, use_interpreter():
        engine.ask(*inputs)
        engine.step()
        engine.step()
        engine.pages.step_down()
        assert engine.run() == expected(model, inputs, ladder(PAGE)[1], 3)


def tokens_of(pages, request, tokens):
    """Keys and values of a request's first pages in each layer, as the model made them: (H, tokens, D)."""
    table, slot, found = torch.tensor([pages.block_table[request]], dtype=torch.int32), pages.slots[request], []
    sink = pages.sizes.sink
    for layer in pages.layer_indices:
        windows = [window[slot : slot + 1] for window in pages._windows[layer]]
        counters = torch.tensor([[0], [sink + tokens], [tokens], [tokens]], dtype=torch.int32)
        store = pages._store(layer, table, counters, windows, RowState(sink + tokens, tokens, tokens))
        keys, values = (store.dense(side, sink + tokens)[:, :, sink:] for side in ("keys", "values"))
        smoothing = pages.smoothing.get(layer)
        found += [keys if smoothing is None else smoothing.raw(keys), values]
    return [x[0].clone() for x in found]


def test_all_go_down_rather_than_wait(model, monkeypatch):
    """Ten at once where 16 bits hold three: none waits, each holds what it held, and bytes stay below the budget."""
    peaks, errors, kept = [], [], serving.ladder.LadderPages.step_down
    budget = 3 * 2**20 + 2**19

    def step_down(pages):
        held = {name: tokens_of(pages, name, PAGE) for name in pages.block_table if name == "0"}
        with Live() as live:
            found = kept(pages)
        peaks.append(len(pages._bytes) + live.peak)
        for name, before in held.items():
            for own, other in zip(tokens_of(pages, name, PAGE), before, strict=True):
                errors.append(((own - other).norm() / other.norm()).item())
        return found

    monkeypatch.setattr(serving.ladder.LadderPages, "step_down", step_down)
    inputs = prompts(*[120 + i for i in range(10)])
    with Engine(model, budget, tokens=160, new=12, max_batch_tokens=1024) as engine:
        (blocks, slots, _), *_, last = engine.pages.stages
        assert slots < 4
        assert last.slots >= 10
        assert last.blocks >= 3 * blocks
        engine.ask(*inputs[:2])
        engine.step()
        assert engine.pages.rung == 0
        engine.ask(*inputs[2:])
        found = engine.run()
    assert [len(tokens) for tokens in found] == [12] * 10
    assert set(engine.waiting) == {0}
    assert engine.rungs[0] == 0
    assert engine.rungs[-1] == len(peaks) == 2
    assert max(peaks) <= budget
    # Layers' keys and values, which 4 bits change by a twentieth, 2 bits by somewhat more.
    assert 0 < max(errors[:4]) < 0.1
    assert max(errors) < 0.5
    # The last rung answers, and requests that come later wait as ever.
    with Engine(model, budget, tokens=160, new=3, max_batch_tokens=1024) as engine:
        engine.ask(*inputs, *inputs)
        assert [len(tokens) for tokens in engine.run()] == [3] * 20
    assert engine.rungs[-1] == 2
    assert max(engine.waiting) > 0


def test_a_prompt_that_16_bits_do_not_hold_begins_below(model):
    (ids,) = prompts(700)
    with Engine(model, "3MiB", new=5, max_batch_tokens=1024) as engine:
        assert engine.pages.stages[0].blocks * PAGE < 700
        engine.ask(ids)
        assert [len(tokens) for tokens in engine.run()] == [5]
        with pytest.raises(ValueError, match=r"request: got 700 tokens and \d+ new ones, allowed \d+ together"):
            engine.ask(ids, max_new_tokens=engine.pages.most_tokens)
    assert set(engine.rungs) == {1}


def test_warm_up_and_forks_step_down_as_requests_do(model):
    """Warm-up asks for all there is, in the name of no request; sequences of a request are requests."""
    with Engine(model, "3MiB", max_blocks_per_request=8) as engine:
        engine.processor.model_runner.pad_inputs = True
        engine.manager.warmup()
        assert engine.pages.rung == 0
    with serving.enable(model, memory="3MiB", request_tokens=256):
        out = model.generate_batch(
            inputs=prompts(90), generation_config=generation(do_sample=True, num_return_sequences=4, temperature=2.0),
            continuous_batching_config=settings(num_blocks=None, max_requests_per_batch=None), progress_bar=False,
        )  # fmt: skip
    assert len(out) == 4
    assert all(each.error is None for each in out.values())


def test_without_memory_for_a_step_down_requests_wait(model, monkeypatch, caplog):
    """The pool is as before; requests are answered one after another."""

    def fail(*args, **given):
        raise torch.OutOfMemoryError("none")

    with Engine(model, "3MiB", new=3) as engine:
        engine.ask(*prompts(90, 100, 110))
        with monkeypatch.context() as patch:
            patch.setattr(serving.ladder.torch, "empty", fail)
            assert not engine.pages.step_down()
        assert engine.pages.rung == 0
        monkeypatch.setattr(serving.ladder.LadderPages, "step_down", lambda pages: False)
        assert [len(tokens) for tokens in engine.run()] == [3] * 3
    assert set(engine.rungs) == {0}
    assert max(engine.waiting) > 0
    assert "a step down needs" in caplog.text


def test_layers_move_only_where_none_is_left():
    """A layer of any shape moves to bytes that no layer has that is still to move, and each rung holds more tokens."""
    draw, tried = random.Random(0), 0
    for _ in range(60):
        layers, page = draw.randint(1, 40), draw.choice([16, 128])
        rungs = tuple(tuple(each.in_layer(i, layers) for i in range(layers)) for each in ladder(page))
        heads, dim, dtype = draw.randint(1, 8), draw.choice([64, 128]), draw.choice([torch.float32, torch.bfloat16])
        shape = Shape(rungs, heads, dim, dtype, draw.choice([1, 9, 1024]), draw.randint(1, 5000))
        memory = int(2 ** draw.uniform(20, 36))
        stages, room = shape.stages(memory), shape.room(memory)
        if stages is None:
            with pytest.raises(ValueError, match=r"memory: got .*, allowed .* or more"):
                shape.checked(memory)
            continue
        tried += 1
        assert stages[-1].blocks * page >= shape.usual
        for rung, (old, new) in enumerate(pairwise(stages), 1):
            assert new.blocks >= old.blocks
            assert new.slots >= old.slots
            was, places = old.places(rung - 1, room), new.places(rung, room)
            order = list(range(layers))[:: 1 if rung % 2 == 0 else -1]
            for count, layer in enumerate(order):
                place = places[layer]
                assert 0 <= place.start <= place.stop <= room
                assert all(place.stop <= was[i].start or was[i].stop <= place.start for i in order[count:])
                assert all(place.stop <= places[i].start or places[i].stop <= place.start for i in order[:count])
    assert tried > 20


@pytest.mark.parametrize(
    ("given", "config", "words"),
    [
        ({"memory": "64KiB"}, {}, r"memory: got 64\.00 KiB, allowed \d.*MiB or more, which a request of 1024 tokens"),
        (
            {"memory": "6MiB", "scheme": "best-4.3"},
            {},
            "memory: got '6MiB' together with scheme 'best-4.3', allowed one",
        ),
        ({"memory": "6MiB", "bits": 4}, {}, "memory: got '6MiB' together with bits, allowed one"),
        ({"memory": "6 apples"}, {}, "memory: got '6 apples', allowed a size such as '24GiB'"),
        ({"memory": "auto"}, {}, "memory: got 'auto', allowed a size such as '24GiB'"),
        ({"memory": 0}, {}, "memory: got 0, allowed a size"),
        ({"memory": True}, {}, "memory: got True, allowed bytes or a size like '6GiB'"),
        ({"memory": 6.5}, {}, "memory: got 6.5, allowed bytes or a size like '6GiB'"),
        ({"memory": "60MiB"}, {"num_blocks": 8}, r"num_blocks: got 8 together with memory=60\.00 MiB, allowed one"),
        ({"memory": "60MiB"}, {"max_memory_percent": 0.5}, r"max_memory_percent: got 0\.5 together with memory"),
    ],
)
def test_bad_input(model, given, config, words):
    with pytest.raises(ValueError, match=words), serving.enable(model, **given):
        model.init_continuous_batching(generation(), settings(**{"num_blocks": None} | config))
    assert "init_continuous_batching" not in vars(model)


@pytest.mark.gpu
def test_graphs_are_captured_anew(monkeypatch):
    """Steps before and behind a step down, recorded and not: alike in bf16. It allocates what the budget has for it."""
    monkeypatch.setattr(serving.engine, "ladder", ladder)
    own = llama(512, 4, 4, 128, 4096).to("cuda", torch.bfloat16)
    inputs, found, memory = prompts(300, 20, 130, 1000, 1), [], 2**27
    for graphs in (True, False):
        given = {"max_batch_tokens": 4096, "use_cuda_graph": graphs, "use_async_batching": False}
        with Engine(own, memory, tokens=2048, new=60, **given) as engine:
            engine.processor.model_runner.pad_inputs = True
            engine.ask(*inputs)
            for rung in (1, 2):
                for _ in range(15):
                    engine.step()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                assert engine.pages.step_down()
                peak = torch.cuda.max_memory_allocated() - before
                assert peak + len(engine.pages._bytes) <= memory
                assert engine.pages.rung == rung
            found.append(engine.run())
    assert found[0] == found[1]
    assert found[0] != expected(own, inputs, get_scheme("full"), 60)


@pytest.mark.gpu
def test_many_users_step_down_while_batches_overlap(monkeypatch):
    """The engine's own thread, which prepares a batch while another one runs: all are answered, on the last rung."""
    monkeypatch.setattr(serving.engine, "ladder", ladder)
    own = llama(512, 4, 4, 128, 4096).to("cuda", torch.bfloat16)
    inputs = prompts(*[500 + 10 * i for i in range(24)])
    config = settings(num_blocks=None, max_requests_per_batch=None, max_batch_tokens=4096)
    with (
        serving.enable(own, memory=2**25, request_tokens=800),
        own.continuous_batching_context_manager(
            generation_config=generation(max_new_tokens=200), continuous_batching_config=config
        ) as manager,
    ):
        pages = manager.batch_processor.cache.cache_allocators["full_attention"]
        assert manager.batch_processor.use_async_batching
        for number, ids in enumerate(inputs):
            manager.add_request(ids, request_id=str(number), max_new_tokens=200)
        results = [manager.get_result(timeout=120) for _ in inputs]
        assert all(each.error is None and len(each.generated_tokens) == 200 for each in results)
        assert pages.rung == 2
        # The next request finds nobody, and is answered in 16 bits.
        manager.add_request(inputs[0], request_id="later", max_new_tokens=20)
        assert len(manager.get_result(timeout=120).generated_tokens) == 20
        assert pages.rung == 0
    assert pages.slots == pages.block_table == {}
