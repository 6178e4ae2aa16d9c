"""Flags for the model of `generate`, `serve` and `evaluate`: from a run directory, or from Hugging Face."""

import dataclasses
from pathlib import Path
from typing import Literal

from eqx_decoders.cli.devices import Devices
from eqx_decoders.errors import NonNegativeInt, check
from eqx_decoders.inference.text_model import TextModel, load_text_model
from eqx_decoders.io.atomic_files import expand_paths
from eqx_decoders.io.huggingface.generation_config import read_generation_config
from eqx_decoders.io.huggingface.load import QuantizedName
from eqx_decoders.io.huggingface.peft import load_peft
from eqx_decoders.numerics.precision import Precision
from eqx_decoders.training import load_text_run, merge_lora


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource(Devices):
    """Flags for the model that a program loads, and for its devices."""

    model: str | None = None
    """Hugging Face checkpoint: a directory, "org/name" on the hub, or a GGUF file."""
    run_dir: str | None = None
    """Run directory of scripts/train.py, or the --checkpoint-dir of a run. Without --run-dir and --model: runs/tiny."""
    step: NonNegativeInt | None = None
    """Step of the run's checkpoint. None: the newest."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of activations and, with --model, of weights. auto: bfloat16 on TPU and GPU, float32 on CPU."""
    special_tokens_in_content: bool = True
    """Tokenize names of special tokens in messages as special tokens, as transformers does. False: as plain text."""

    def __post_init__(self):
        super().__post_init__()
        check(
            self.run_dir is None or self.model is None,
            f"model={self.model!r} and run_dir={self.run_dir!r} exclude each other: leave one out.",
        )
        check(
            self.step is None or self.model is None,
            f"step={self.step} selects a checkpoint of run_dir, and cannot be used with model={self.model!r}: leave it "
            f"out.",
        )

    @property
    def weights_dtype(self) -> str | None:
        """Dtype of loaded weights. None: the default of the platform."""
        return None if self.dtype == "auto" else self.dtype

    def load(self, quantized: QuantizedName = "expand") -> TextModel:
        """Load the model and its tokenizer."""
        layout, dtype = self.layout(), self.weights_dtype
        if self.model is not None:
            return load_text_model(self.model, dtype, layout=layout, quantized=quantized)
        precision = Precision(compute=dtype or layout.backend.compute_dtype)
        return load_text_run(self.run_dir or "runs/tiny", self.step, precision=precision, layout=layout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptedModelSource(ModelSource):
    """Flags for a model with an adapter, which is merged into the model."""

    adapter: str | None = None
    """LoRA adapter of the model: a directory in the format of PEFT. Its weights are merged into the model."""

    def __post_init__(self):
        super().__post_init__()
        expand_paths(self, "adapter")

    def load(self, quantized: QuantizedName = "expand") -> TextModel:
        """Load the model, its tokenizer and the adapter."""
        if self.adapter is None:
            return super().load(quantized)
        check(
            (Path(self.adapter) / "adapter_config.json").is_file(),
            f"adapter={self.adapter!r} must be a directory in the format of PEFT: it has no adapter_config.json.",
        )
        text = super().load(quantized)
        stop_ids = {*text.stop_ids, *read_generation_config(self.adapter).stop_ids}
        model = merge_lora(load_peft(text.model, self.adapter))
        return dataclasses.replace(text, model=model, stops=tuple(sorted(stop_ids)))
