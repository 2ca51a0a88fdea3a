"""The stand-in model of tests/measure, and Triton's interpreter, for scripts of evals/."""

from tests.measure.conftest import keep_progress_bars, stand_in, tokenizer

__all__ = ["keep_progress_bars", "stand_in", "tokenizer"]
