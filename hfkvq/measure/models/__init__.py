"""Models by name: the reference model, SmolLM2 as a package brings it, GGUF files, folders and names on the Hub."""

from .names import SMOLLM2, Source, find_model, load_model, load_tokenizer, read_config

__all__ = ["SMOLLM2", "Source", "find_model", "load_model", "load_tokenizer", "read_config"]
