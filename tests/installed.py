"""The README's example in small, on what is installed: python tests/installed.py, from a folder outside the checkout.

It is a script, not a test: the packages are tried without pytest and the other tools.
"""

import importlib.metadata
import importlib.resources
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import hfkvq
from hfkvq import MixedKVCache, list_schemes

CHECKOUT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Stops at the first thing that is not as it should be."""
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
    print(f"hfkvq {hfkvq.__version__}, {len(list_schemes())} presets, {cache.memory().code_bits:.2f} bits of codes")


if __name__ == "__main__":
    main()
