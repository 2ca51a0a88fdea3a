"""An installation tried, with the README's example in small.

    python tests/installed.py        from a folder outside the checkout

It is a script, not a test: packages are tried without pytest and the other tools. The last line that it prints is a
record in JSON, as evals/results/installs.json has them.
"""

import importlib.metadata
import importlib.resources
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import hfkvq
from hfkvq import MixedKVCache, list_schemes

CHECKOUT = Path(__file__).resolve().parents[1]
COMMANDS = ["--version", "--help", "env", "schemes", "doctor --presets best-3.4,kivi-2"]
# A process that has not imported hfkvq: the file beside the package registers it.
REGISTERED = "import lm_eval.models; from lm_eval.api.registry import get_model; print(get_model('hf-kvq').__module__)"


def run(*command: str | Path) -> tuple[str, float]:
    """Output of a command, and its seconds; one that fails ends the script with its error."""
    start = time.monotonic()
    ran = subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{command}: exit {ran.returncode}\n{ran.stdout}{ran.stderr}"
    return ran.stdout, round(time.monotonic() - start, 1)


def main() -> None:
    """Stops at the first thing that is not as it should be."""
    command = Path(sys.executable).parent / "hfkvq"
    seconds = {f"hfkvq {words}": run(command, *words.split())[1] for words in COMMANDS}
    if importlib.util.find_spec("lm_eval"):
        said, seconds["lm-eval's registry"] = run(sys.executable, "-c", REGISTERED)
        assert said.split()[-1] == "hfkvq.lm_eval.model", said
    assert CHECKOUT not in Path(hfkvq.__file__).resolve().parents, "this is the checkout, not what was installed"
    assert hfkvq.__version__ == importlib.metadata.version("hfkvq")
    package = importlib.resources.files("hfkvq")
    assert (package / "py.typed").is_file()
    assert (package / "measure/reference/checkpoint/model.safetensors").is_file()

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()
    ids = torch.randint(3, 64, (1, 300))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, past_key_values=DynamicCache(), **options)
    cache = MixedKVCache(model, "full")
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)
    cache = MixedKVCache(model)
    model.generate(ids, past_key_values=cache, **options)
    assert cache.memory().code_bits < 4
    source = json.loads(importlib.metadata.distribution("hfkvq").read_text("direct_url.json") or "{}").get("url", "")
    names = ("hfkvq", "torch", "transformers", "triton", "lm_eval")
    versions = {name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(name)}
    tried = {"python": platform.python_version(), "installed": source.rpartition("/")[2], **versions}
    print(json.dumps(tried | {"presets": len(list_schemes()), "seconds": seconds}))


if __name__ == "__main__":
    main()
