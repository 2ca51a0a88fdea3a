"""Tasks that are lm-eval's own with another loader, or our own: the class that task YAML names.

lm-eval lets YAML include other YAML by path only, and the path to its own tasks differs from machine to machine. So a
task here says ``class: !function hfkvq.lm_eval.upstream.UpstreamTask`` and ``upstream: gsm8k/gsm8k-cot.yaml``.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

PROTOCOLS: dict[str, dict[str, Any]] = {
    "sampled_4k": {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_gen_toks": 4096},
    "sampled_32k": {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_gen_toks": 32768},
}
"""How the papers generate, by the suffix of the task's name: Kitty 5.1; AIME there, and SAW-INT4, 32,768 tokens."""

NEEDS = {
    "math": ("math_verify", "sympy", "antlr4"),
    "longbench": ("jieba", "fuzzywuzzy", "rouge"),
    "ruler": ("nltk", "wonderwords"),
}
"""Libraries of a kind of task, by the extra of lm-eval that brings them."""


def missing(kind: str, what: object) -> ImportError:
    """The error for a library that is not installed."""
    return ImportError(f'this task needs a library that is not installed ({what}): pip install "lm-eval[{kind}]"')


def check_installed(kind: str) -> None:
    """Looks for libraries before a model is loaded, not after it has answered.

    Raises:
        ImportError: one is missing.
    """
    lost = [name for name in NEEDS[kind] if importlib.util.find_spec(name) is None]
    if lost:
        raise missing(kind, ", ".join(lost))


class UpstreamTask(ConfigurableTask):
    """A task that may begin as one of lm-eval's.

    Beyond lm-eval's own keys the configuration may have:

    * ``upstream``: path of the YAML to begin with, inside lm-eval's folder of tasks. Own keys win.
    * ``needs``: key of `NEEDS`, whose libraries must be installed.
    * ``protocol``: key of `PROTOCOLS`, whose values replace those in ``generation_kwargs``.
    * ``rendered``: true if prompts are complete as they are, so that ``--apply_chat_template`` leaves them alone.
    """

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        config = dict(config or {})
        config.pop("class", None)
        self._rendered = bool(config.pop("rendered", False))
        upstream, needs, protocol = (config.pop(key, None) for key in ("upstream", "needs", "protocol"))
        if needs is not None:
            check_installed(needs)
        if upstream is not None:
            config = _merged(upstream, needs, config)
        if protocol is not None:
            if protocol not in PROTOCOLS:
                raise ValueError(f"protocol: got {protocol!r} in {config['task']}, allowed {', '.join(PROTOCOLS)}.")
            config["generation_kwargs"] = {**config.get("generation_kwargs", {}), **PROTOCOLS[protocol]}
            # lm-eval writes the metadata into its results.
            config["metadata"] = {**(config.get("metadata") or {}), "protocol": protocol}
        super().__init__(config=config)

    # lm-eval passes all but the document by name.
    def fewshot_context(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, doc: dict[str, Any], **options: Any
    ) -> str | list[str]:
        if self._rendered:
            options.update(apply_chat_template=False, chat_template=None, system_instruction=None)
        return super().fewshot_context(doc, **options)


def _merged(upstream: str, needs: str | None, config: dict[str, Any]) -> dict[str, Any]:
    path = Path(lm_eval.tasks.__file__).parent / upstream
    if not path.is_file():
        raise FileNotFoundError(
            f"upstream: got {upstream!r}, which this lm-eval does not have; {config['task']} is written for 0.4.13."
        )
    try:
        with warnings.catch_warnings():
            # fuzzywuzzy recommends python-Levenshtein, which would change LongBench's scores.
            warnings.filterwarnings("ignore", "Using slow pure-python SequenceMatcher")
            base = load_yaml(path)
    except (ImportError, AssertionError) as error:
        # An assertion is how upstream refuses a wrong version of antlr4.
        raise (missing(needs, error) if needs else error) from error
    for key in ("tag", "group", "task_list", "dataset_kwargs"):
        base.pop(key, None)
    metadata = {**(base.get("metadata") or {}), **(config.get("metadata") or {})}
    return {**base, **config, "metadata": metadata}
