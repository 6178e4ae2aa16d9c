"""Models with their tokenizers from Hugging Face directories."""

from pathlib import Path
from typing import Unpack

import jax
from jax.typing import DTypeLike

from eqx_decoders.context import ExecutionOptions
from eqx_decoders.inference.text_model import TextModel, build_text_model
from eqx_decoders.io.huggingface.hub import resolve
from eqx_decoders.io.huggingface.load import QuantizedName, load_hf
from eqx_decoders.io.text.tokenizer import load_tokenizer


def load_text_model(
    source: str | Path,
    dtype: DTypeLike | None = None,
    *,
    revision: str | None = None,
    quantized: QuantizedName = "expand",
    **execution: Unpack[ExecutionOptions],
) -> TextModel:
    """Load the model and the tokenizer of a Hugging Face directory, or of the repository `"org/name"` (see `load_hf`).

    dtype: None for float32 on CPUs, bfloat16 elsewhere.
    """
    folder = resolve(source, revision).path
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    tokenizer = load_tokenizer(folder)  # first, since it fails faster than the weights
    return build_text_model(load_hf(folder, dtype, quantized=quantized, **execution), tokenizer, folder)
