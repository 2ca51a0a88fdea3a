"""One rank of `test_batching`: a model split by ``tp_plan="auto"``, whose ranks serve together.

torchrun --nproc-per-node 2 tests/serving/tensor_parallel.py MODEL OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from hfkvq import serving


def main(folder: str, out: str) -> None:
    """Serves, and writes the first rank's tokens."""
    torch.distributed.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32).eval()
    asked = json.loads((Path(folder) / "asked.json").read_text(encoding="utf-8"))
    generation = GenerationConfig(max_new_tokens=asked["new"], do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = {}
    for name in asked["schemes"]:
        settings = ContinuousBatchingConfig(num_blocks=24, max_batch_tokens=256, max_requests_per_batch=4)
        with serving.enable(model, name):
            answers = model.generate_batch(
                inputs=asked["inputs"], generation_config=generation, continuous_batching_config=settings,
                progress_bar=False, persistent_manager=False,
            )  # fmt: skip
        found[name] = [[each.generated_tokens, each.error] for each in answers.values()]
    if torch.distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
