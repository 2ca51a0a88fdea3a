"""Runs of lm-eval, one scheme after the other, with the model loaded once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager

from hfkvq.caches import Preset
from hfkvq.measure.models import Source

from . import task_folder
from .board import ASKED, Board
from .model import HFKVQ
from .ranks import Ranks

SEEDS = {"random_seed": 0, "numpy_random_seed": 1234, "torch_random_seed": 1234, "fewshot_random_seed": 1234}
"""lm-eval's own."""


def run_tasks(
    source: Source,
    presets: Mapping[str, Preset | None],
    tasks: Sequence[str],
    board: Board,
    ranks: Ranks,
    *,
    options: Mapping[str, Any],
    metadata: Mapping[str, Any],
    loading: Mapping[str, Any],
    tell: Callable[[str], object] = lambda _: None,
) -> Iterator[tuple[str, str]]:
    """Evaluates the presets, and saves results and samples as lm-eval does, in a folder for each.

    Answers are kept as they come, until the results are saved: a run that was cut asks only what it has not asked yet.

    Args:
        source: the model.
        presets: by name; None is Transformers' own cache.
        tasks: lm-eval's and hfkvq's.
        board: what is there already, which is left out.
        ranks: the processes, of which this one leads; the others are in `follow_tasks`.
        options: of `simple_evaluate`.
        metadata: for the tasks.
        loading: of the model.
        tell: is told what is done beside: kernels may be compiled.

    Yields:
        A preset's name, and what is asked, or came of it.

    Raises:
        ValueError: see `Board.missing`; before anything is loaded.
    """
    import lm_eval

    todo = {name: board.missing(name, preset, tasks) for name, preset in presets.items()}
    # Decorators hide what they take.
    evaluate: Any = lm_eval.simple_evaluate
    loaded: list[Any] = []
    manager: TaskManager | None = None
    for name, missing in todo.items():
        folder = board.folder(name)
        if not missing:
            yield name, f"the results are already in {folder}"
            continue
        if not loaded:
            # Reads thousands of files.
            manager = TaskManager(include_path=str(task_folder()), metadata={"pretrained": source.path, **metadata})
            ranks.ask("load", None, lambda _: loaded.append(_load(source, ranks, loading)))
            asked = [preset for other, preset in presets.items() if preset is not None and todo[other]]
            loaded[0].compile_ahead(asked, tell)
        [subject] = loaded
        ranks.ask("use", presets[name], subject.use)
        answers = folder / "answers"
        answers.mkdir(parents=True, exist_ok=True)
        known = subject.keep_answers(answers)
        yield name, f"asking {', '.join(missing)}" + (f"; {known} answers are kept from before" if known else "")
        # lm-eval names folders by this; of a path only the last part is for the record.
        arguments = {"pretrained": source.name, "scheme": name}
        tracker = EvaluationTracker(output_path=str(folder))
        results = evaluate(
            subject,
            model_args=arguments,
            tasks=missing,
            task_manager=manager,
            evaluation_tracker=tracker,
            **options,
        )
        results["config"] |= {"model": "hf-kvq", "model_args": arguments, ASKED: missing, "processes": ranks.count}
        samples = results.pop("samples")
        tracker.save_results_aggregated(results=results, samples=samples)
        for task, rows in samples.items():
            tracker.save_results_samples(task_name=task, samples=rows)
        if board.missing(name, presets[name], missing):
            # lm-eval logs what went wrong, and goes on.
            raise OSError(f"out: the results of {name} could not be saved in {folder}; its answers are kept there.")
        shutil.rmtree(answers)
        bits = results["config"]["kvq"]["total_bits"]
        yield name, f"saved in {folder}, {bits:.2f} total bits"


def follow_tasks(source: Source, ranks: Ranks, loading: Mapping[str, Any]) -> None:
    """What the other processes do meanwhile."""
    handlers: dict[str, Any] = {}

    def load(_: None) -> None:
        subject = _load(source, ranks, loading)
        handlers.update(subject.handlers, use=subject.use)

    handlers["load"] = load
    ranks.follow(handlers)


def _load(source: Source, ranks: Ranks, loading: Mapping[str, Any]) -> Any:
    make: Any = HFKVQ
    return make(pretrained=source.path, ranks=ranks, **loading)
