"""Runs of lm-eval, one scheme after the other, with the model loaded once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager

from hfkvq.caches import Preset
from hfkvq.measure.models import find_model

from . import task_folder
from .model import HFKVQ


def folder_name(name: str) -> str:
    """A scheme's typed form as a folder: ``kitty:boost_ratio=0.2`` is ``kitty-boost_ratio-0.2``."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in Path(name).name)


def run_tasks(
    model: str | None,
    presets: Mapping[str, Preset | None],
    tasks: Sequence[str],
    out: Path,
    *,
    options: Mapping[str, Any],
    metadata: Mapping[str, Any],
    loading: Mapping[str, Any],
) -> Iterator[tuple[str, str]]:
    """Evaluates the presets, and saves results and samples as lm-eval does, in a folder for each.

    Args:
        model: see `find_model`.
        presets: by name; None is Transformers' own cache.
        tasks: lm-eval's and hfkvq's.
        out: folder of the folders. A preset that has results there is left out.
        options: of `simple_evaluate`.
        metadata: for the tasks.
        loading: of the model.

    Yields:
        A preset's name, and what came of it.
    """
    import lm_eval

    source = find_model(model)
    # Decorators hide what they take.
    evaluate: Any = lm_eval.simple_evaluate
    make: Any = HFKVQ
    subject: Any = None
    manager: TaskManager | None = None
    for name, preset in presets.items():
        folder = out / folder_name(name)
        if any(folder.rglob("results_*.json")):
            yield name, f"results are in {folder} already"
            continue
        if subject is None:
            # Reads thousands of files.
            manager = TaskManager(include_path=str(task_folder()), metadata={"pretrained": source.path, **metadata})
            subject = make(pretrained=source.path, scheme=preset, **loading)
        else:
            subject.use(preset)
        # lm-eval names folders by this; of a path only the last part is for the record.
        arguments = {"pretrained": source.name, "scheme": name}
        tracker = EvaluationTracker(output_path=str(folder))
        results = evaluate(
            subject,
            model_args=arguments,
            tasks=list(tasks),
            task_manager=manager,
            evaluation_tracker=tracker,
            **options,
        )
        if results is None:
            # Another process saves.
            continue
        results["config"] |= {"model": "hf-kvq", "model_args": arguments}
        samples = results.pop("samples")
        tracker.save_results_aggregated(results=results, samples=samples)
        for task, rows in samples.items():
            tracker.save_results_samples(task_name=task, samples=rows)
        bits = results["config"]["kvq"]["total_bits"]
        yield name, f"saved in {folder}, {bits:.2f} total bits"
