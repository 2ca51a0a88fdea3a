"""Bytes that `hfkvq fit` plans are those of the caches that evals/model_steps.py measured."""

import json

from evals import model_steps
from hfkvq.caches.steps import step_buffer
from hfkvq.tuning.fit.layer import layer_bytes


def test_the_planner_agrees_with_what_was_measured(monkeypatch):
    """To the byte, with the room that buffers had then."""
    monkeypatch.setattr(step_buffer, "MOST_HEADROOM", 1 << 30)
    # Bytes of a layer are kept by what they follow from, which this is not.
    layer_bytes.cache_clear()
    try:
        for row in json.loads(model_steps.RESULTS.read_text(encoding="utf-8"))["rows"]:
            grown = row["shape"] in ("bloom-7b1", "gpt-j-6b") and row["cache"] == "kitty-pro"
            # These kept no tokens whole then.
            bare = ":sink_length=0:local_length=0" if row["cache"].startswith("latent") else ""
            if row["cache"] != "DynamicCache" and not grown:
                planned = model_steps.planned(row | {"cache": row["cache"] + bare})
                assert planned == row["bytes"], (row["shape"], row["cache"])
    finally:
        layer_bytes.cache_clear()
