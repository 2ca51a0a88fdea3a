"""Evaluations of two processes: the rows and the bill of one, whatever happens to the other."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

import lm_eval
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from lm_eval.tasks import TaskManager

from hfkvq.lm_eval import task_folder
from hfkvq.lm_eval.answers import AnswerLog, Known
from hfkvq.lm_eval.bill import Bill
from hfkvq.lm_eval.model import HFKVQ
from hfkvq.lm_eval.ranks import RankError, Ranks, deal
from hfkvq.measure.reference import load_reference, reference_path

ROOT = Path(__file__).resolve().parents[2]
KITTY = {"scheme": "kitty", "page_size": 8, "sink_length": 2, "local_length": 8}
TASKS = ["ref_recall_24", "ref_recall_ll"]


@pytest.fixture(scope="module")
def subject():
    model, tokenizer = load_reference(torch.float32)
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers, model.config.layer_types = 2, model.config.layer_types[:2]
    return model, tokenizer


def make(subject, ranks=None, **arguments):
    model, tokenizer = subject
    return HFKVQ(pretrained=model, tokenizer=tokenizer, max_length=2048, ranks=ranks, **KITTY, **arguments)


def evaluate(lm, limit=2, tasks=TASKS):
    manager = TaskManager(include_path=str(task_folder()), include_defaults=False)
    return lm_eval.simple_evaluate(lm, tasks=list(tasks), limit=limit, task_manager=manager, bootstrap_iters=0)


def in_two(job, *arguments):
    """Runs ``job(rank, say, *arguments)`` in two processes; what each has said, and its exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Models and modules are there already.
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]

    def run(rank):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
        # A fork of a process that has used a GPU cannot.
        torch.accelerator.is_available = lambda: False
        PartialState._reset_state()
        AcceleratorState._reset_state()
        job(rank, pipes[rank][1].send, *arguments)

    processes = [context.Process(target=run, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    assert not late, "a process waits for ever"
    said = []
    for reader, _ in pipes:
        said.append([])
        while reader.poll():
            said[-1].append(reader.recv())
    return said, [process.exitcode for process in processes]


def assert_same(results, others):
    """Rows, answers and bill, but for the clock; sums of floats depend on their order."""
    found = []
    for each in (results, others):
        rows = {f"{task} {name}": x for task, row in each["results"].items() for name, x in row.items()}
        figures = {name: x for name, x in {**rows, **each["config"]["kvq"]}.items() if "second" not in name}
        answers = [(row["doc_id"], row["resps"]) for rows in each["samples"].values() for row in rows]
        found.append(({name: x for name, x in figures.items() if isinstance(x, (int, float))}, answers))
    (numbers, answers), (other_numbers, other_answers) = found
    assert {"total_bits", "code_bits", "requests", "peak_cache_bytes"} <= numbers.keys()
    assert numbers == pytest.approx(other_numbers, rel=1e-9)
    assert json.dumps(answers) == json.dumps(other_answers)


# lm-eval says so of every model that is given to it; forking in a process with threads is what Python warns of.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestTwo:
    @pytest.mark.parametrize(("limit", "tasks"), [(2, TASKS), (1, TASKS[:1])])
    def test_rows_and_bill_are_those_of_one(self, subject, limit, tasks):
        """With one question, the second process has nothing to do."""

        def job(rank, say):
            say(evaluate(make(subject, Ranks.join()), limit, tasks))

        one = evaluate(make(subject), limit, tasks)
        (first, second), codes = in_two(job)
        assert codes == [0, 0]
        assert second == [None]
        assert_same(first[0], one)

    def test_both_answer(self, subject):
        def job(rank, say):
            lm = make(subject, Ranks.join())
            stock = lm._answer_share
            lm._answer_share = lambda part: (say(len(part[1])), stock(part))[1]
            evaluate(lm, 4, ["ref_recall_24"])

        assert in_two(job) == ([[2], [2]], [0, 0])

    def test_one_that_fails_ends_the_other(self, subject):
        def job(rank, say):
            lm = make(subject, Ranks.join())
            if rank == 1:

                def fail(part):
                    raise ValueError("out of luck")

                lm._answer_share = fail
            try:
                evaluate(lm)
            except (RankError, ValueError) as error:
                say(f"{type(error).__name__}: {error}")

        (first, second), _ = in_two(job)
        assert second == ["ValueError: out of luck"]
        assert "RankError: one of 2 processes has died; its own output says why" in first[0]

    def test_an_error_of_the_first_is_told_once(self, subject):
        """Here there is no such task; the other one goes home, quietly."""

        def job(rank, say):
            lm = make(subject, Ranks.join())
            if rank == 0:
                lm._answer = lambda *arguments: 1 / 0
            try:
                evaluate(lm)
            except ZeroDivisionError as error:
                say(str(error))

        assert in_two(job) == ([["division by zero"], []], [0, 0])


def test_dealing():
    """Long ones first, each task to everyone, and a context is read by one."""
    asked = [("a", ("x" * n, "end")) for n in (1, 5, 3)] + [("b", ("y" * n, "end")) for n in (2, 2, 4)]
    assert deal(asked, 2, together=False) == [[1, 0, 3], [2, 5, 4]]
    assert deal(asked, 2, together=True) == [[1, 0, 3, 4], [2, 5]]
    assert deal(asked[:1], 3, together=False) == [[0], [], []]
    assert deal([], 2, together=True) == [[], []]


class TestAnswersKept:
    def test_what_was_cut_goes_on(self, subject, tmp_path, monkeypatch):
        """Stopped in the second batch: the others are asked, and rows and bill are those of a whole run."""
        one = evaluate(make(subject), tasks=TASKS[:1])
        lm = make(subject)
        assert lm.keep_answers(tmp_path) == 0
        stock, calls = lm._model_generate, []

        def generate(*arguments, **options):
            calls.append(True)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return stock(*arguments, **options)

        monkeypatch.setattr(lm, "_model_generate", generate)
        with pytest.raises(KeyboardInterrupt):
            evaluate(lm, tasks=TASKS[:1])
        # Cut in the middle of a line, as a full disk does it.
        [log] = tmp_path.iterdir()
        log.write_text(log.read_text() + '{"bill": {}, "answ')
        again = make(subject)
        assert again.keep_answers(tmp_path) == 1
        calls.clear()
        stock = again._model_generate
        monkeypatch.setattr(again, "_model_generate", lambda *a, **b: (calls.append(True), stock(*a, **b))[1])
        done = evaluate(again, tasks=TASKS[:1])
        assert len(calls) == 1
        assert_same(done, one)
        # The third time nothing is asked at all.
        idle = make(subject)
        assert idle.keep_answers(tmp_path) == 2
        monkeypatch.setattr(idle, "_answer_share", lambda part: [1 / 0 for _ in part[1]])
        assert_same(evaluate(idle, tasks=TASKS[:1]), one)

    def test_repeated_questions_have_several_answers(self, tmp_path):
        log = AnswerLog(tmp_path)
        log.task = "t"
        for answer in ("one", "two"):
            log.add_partial("generate_until", ("p", {"until": []}), answer)
        log.add_partial("loglikelihood", ("p", "q"), (-1.5, True))
        log.flush(Bill())
        known = Known(tmp_path)
        asked = "generate_until", "t", ("p", {"until": []})
        assert [known.take(*asked) for _ in range(3)] == [["one"], ["two"], []]
        assert known.take("loglikelihood", "u", ("p", "q")) == []
        assert known.take("loglikelihood", "t", ("p", "q")) == [(-1.5, True)]

    def test_costs_of_all_runs_and_processes(self, tmp_path):
        for steps in (2, 3):
            log, bill = AnswerLog(tmp_path), Bill()
            for number in range(2):
                bill.of("t").steps += steps
                log.add_partial("generate_until", (str(number), {}), "x")
                log.flush(bill)
        assert len(list(tmp_path.iterdir())) == 2
        assert Known(tmp_path).bill.of("t").steps == 10

    @pytest.mark.parametrize(
        "line", ["[]", "{}", '{"answers": [1], "bill": {}}', '{"answers": [], "bill": {"t": {"x": 1}}}']
    )
    def test_damage(self, tmp_path, line):
        (tmp_path / "answers-0.jsonl").write_text(line)
        with pytest.raises(ValueError, match=r"answers-0\.jsonl is damaged .* move it away"):
            Known(tmp_path)

    def test_a_folder_that_this_machine_does_not_see(self, tmp_path):
        log = AnswerLog(tmp_path / "elsewhere")
        log.add_partial("generate_until", ("p", {}), "x")
        log.flush(Bill())
        assert list(tmp_path.iterdir()) == []


def launch(count, *arguments, gpu=False):
    """``accelerate launch -m ...`` as it is typed; without --multi_gpu accelerate starts one process on a CPU."""
    launcher = ["-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", f"--num_processes={count}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"TRITON_INTERPRET": "0"} if gpu else {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *(launcher if count > 1 else ()), "-m", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


def results_of(out, count, model, options, device="cpu"):
    """What lm-eval saved, of so many processes."""
    command = ["lm_eval", "--model", "hf-kvq", "--model_args", model, *options, "--device", device]
    ran = launch(count, *command, "--output_path", out, gpu=device != "cpu")
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count("|ref_recall_ll") == 1
    [file] = out.rglob("results_*.json")
    found = json.loads(file.read_text(encoding="utf-8")) | {"samples": {}}
    for task in TASKS:
        [samples] = file.parent.glob(f"samples_{task}_*.jsonl")
        found["samples"][task] = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    return found


@pytest.mark.slow
class TestLaunched:
    def test_lm_eval(self, tmp_path):
        """A file each, and what is in them is the same; also of a model that is split."""
        model = f"pretrained={reference_path()},scheme=kitty,dtype=float32"
        options = ["--include_path", task_folder(), "--tasks", ",".join(TASKS), "--limit", 3, "--log_samples"]
        one = results_of(tmp_path / "one", 1, model, options)
        assert_same(results_of(tmp_path / "two", 2, model, options), one)
        # Where there is no GPU, what is split is left on the disk, through the same hooks.
        split = f"{model},parallelize=True,offload_folder={tmp_path / 'offload'}"
        assert_same(results_of(tmp_path / "split", 1, split, options), one)

    def test_leaderboard(self, tmp_path):
        options = ["--out", tmp_path / "board", "--tasks", "ref_recall_24", "--limit", 3, "--device", "cpu"]
        options += ["--windows", 1, "--context", 256, "--schemes", "kitty"]
        ran = launch(2, "hfkvq.cli", "leaderboard", *options)
        assert ran.returncode == 0, ran.stderr[-3000:]
        assert ran.stdout.count("saved in") == 3
        for name in ("none", "full", "kitty"):
            [results] = (tmp_path / "board" / name).rglob("results_*.json")
            config = json.loads(results.read_text(encoding="utf-8"))["config"]
            assert (config["processes"], config["kvq"]["requests"]) == (2, 3)
        # One process finds what two have done; what is wrong is said, and ends both.
        again = launch(1, "hfkvq.cli", "leaderboard", *options)
        assert again.stdout.count("already") == 3
        refused = launch(2, "hfkvq.cli", "leaderboard", *options, "--num-fewshot", 1)
        assert refused.returncode != 0
        assert refused.stderr.count("holds results with other settings: num_fewshot") == 1


@pytest.mark.gpu
class TestGPUs:
    @pytest.fixture(autouse=True)
    def two(self):
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")

    def test_launched_and_split(self, tmp_path):
        """A process a GPU, and one model over both: rows and bill of one GPU."""
        model = f"pretrained={reference_path()},scheme=kitty,dtype=float32"
        options = ["--include_path", task_folder(), "--tasks", ",".join(TASKS), "--limit", 4, "--log_samples"]
        one = results_of(tmp_path / "one", 1, model, options, "cuda:0")
        assert_same(results_of(tmp_path / "two", 2, model, options, "cuda"), one)
        assert_same(results_of(tmp_path / "split", 1, f"{model},parallelize=True", options, "cuda"), one)
