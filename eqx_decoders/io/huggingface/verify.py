"""Verification of Hugging Face directories: logits against transformers, tensors against their files."""

import dataclasses
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, Int

from eqx_decoders.io.gguf.gguf_header import is_gguf
from eqx_decoders.io.huggingface.directory import FLOATS, StoredTensor, stored_tensors
from eqx_decoders.io.huggingface.export import exported, save_hf
from eqx_decoders.io.huggingface.hub import resolve
from eqx_decoders.io.huggingface.load import abstract_hf, load_hf, read_config, stored_weights
from eqx_decoders.io.huggingface.quantized import QUANTIZED, checkpoint_tensors
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.sharding.axes import AnyArray, named_leaves
from eqx_decoders.sharding.layout import Layout


@dataclasses.dataclass(frozen=True)
class Difference:
    """Difference of two arrays of logits: largest and mean |difference|, share of positions with equal argmax."""

    maximum: float
    mean: float
    agreement: float

    def __str__(self) -> str:
        return (
            f"logits: largest |difference| {self.maximum:.3g}, mean {self.mean:.3g}, "
            f"same most likely token at {self.agreement:.2%} of the positions"
        )


def compare_logits(first: Float[np.ndarray, "*shape vocab"], second: Float[np.ndarray, "*shape vocab"]) -> Difference:
    """Compare two models' logits; differences are infinite where one of them is not finite."""
    gap = np.nan_to_num(np.abs(first - second), nan=np.inf, posinf=np.inf)
    agreement = float(np.mean(first.argmax(-1) == second.argmax(-1)))
    return Difference(float(gap.max()), float(gap.mean()), agreement)


def random_ids(config: DecoderConfig, rows: int = 2, length: int = 32, seed: int = 0) -> Int[np.ndarray, "rows length"]:
    """Draw uniform token ids, no more in a row than the model has learned positions."""
    positions = config.positions
    if isinstance(positions, LearnedPositions):
        length = min(length, positions.max_positions)
    return np.random.default_rng(seed).integers(0, config.vocab_size, (rows, length), np.int32)


def our_logits(model: Decoder, ids: Int[np.ndarray, "rows length"]) -> Float[np.ndarray, "rows places vocab"]:
    """Compute the logits of a loaded model, with every product in full precision; or the scores at the last tokens."""
    with jax.default_matmul_precision("highest"):
        logits = np.asarray(_logits(dataclasses.replace(model, origin=None), ids))
    return logits if model.config.scores is None else logits[:, -1:]


@eqx.filter_jit
def _logits(model: Decoder, ids: AnyArray) -> Any:
    return model(ids).logits


def has_transformers() -> bool:
    """Return whether transformers and torch are installed."""
    return find_spec("transformers") is not None and find_spec("torch") is not None


def transformers_logits(
    directory: str | Path, ids: Int[np.ndarray, "rows length"]
) -> Float[np.ndarray, "rows places vocab"]:
    """Compute the logits of a directory by transformers, in float32; of one that scores texts those at the last tokens.

    transformers sees `config.json` and the safetensors files only, and these after our reader has accepted them: no
    code, no pickles, no adapters in the same directory. It gets a plain copy of a quantized checkpoint, since its
    precision with the original would depend on the machine, and of a GGUF file.
    """
    import torch  # type: ignore[import-not-found]
    import transformers  # type: ignore[import-not-found]
    from transformers.utils import logging  # type: ignore[import-not-found]

    logging.disable_progress_bar()
    scores = abstract_hf(directory).config.scores
    folder = resolve(directory)
    with tempfile.TemporaryDirectory() as visible:
        quantized = any(isinstance(tensor, QUANTIZED) for tensor in checkpoint_tensors(folder).values())
        if quantized or is_gguf(folder.path):
            save_hf(load_hf(directory), visible)
        else:
            files = {tensor.file.name for tensor in stored_tensors(folder).values()} | {"config.json"}
            for name in (*files, "model.safetensors.index.json"):
                if folder.has(name):
                    Path(visible, name).symlink_to(folder.file(name).resolve())
        name = "AutoModelForCausalLM" if scores is None else "AutoModelForSequenceClassification"
        model = getattr(transformers, name).from_pretrained(
            visible,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            attn_implementation="eager",
            dtype=torch.float32,  # now: some round constants to the dtype in which they are made
        )
        model, tokens = model.float().eval(), torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            if scores is None:
                return model(tokens, use_cache=False).logits.numpy()
            model.config.pad_token_id = None  # any id may be the last one; rows are one by one then
            return np.stack([model(row[None], use_cache=False).logits.numpy() for row in tokens])


def compare_tensors(directory: str | Path, layout: Layout | None = None) -> tuple[int, list[str]]:
    """Load a directory, convert each weight back into the tensor of its file, and compare the bits.

    Returns the number of tensors and the names of those that differ. Memory holds the model and one tensor at a time.
    """
    mappings, stored = stored_weights(directory)
    dtypes = {"float32" if isinstance(tensor, QUANTIZED) else FLOATS[tensor.dtype] for tensor in stored.values()}
    model = load_hf(directory, dtype=dtypes.pop() if len(dtypes) == 1 else "float32", layout=layout)
    tensors = exported(named_leaves(model), mappings)
    different = [
        name for name, tensor in stored.items() if not _same_bits(np.asarray(tensors[name]()), tensor.read_all())
    ]
    return len(stored), different


def compare_directories(first: str | Path, second: str | Path) -> tuple[list[str], list[str]]:
    """Compare two directories: return differences in a model's structure, and tensors that have different values.

    The former are settings that change what the model computes, and tensors that only one of them has or whose shapes
    differ; spellings, files and dtypes may differ. The latter are listed with the largest difference.
    """
    settings, others = (_settings("", read_config(directory)[0]) for directory in (first, second))
    wrong = [
        f"{name}: {settings.get(name)!r} and {others.get(name)!r}"
        for name in sorted(settings.keys() | others.keys())
        if settings.get(name) != others.get(name)
    ]
    left, right = (stored_weights(directory)[1] for directory in (first, second))
    gaps = {}
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right:
            wrong.append(f"{name} is only in {first if name in left else second}")
        elif left[name].shape != right[name].shape:
            wrong.append(f"{name} has the shapes {left[name].shape} and {right[name].shape}")
        else:
            gaps[name] = _gap(left[name], right[name])
    return wrong, [f"{name}: by up to {gap:.3g}" for name, gap in gaps.items() if gap != 0]


def _same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    x = x.astype(y.dtype)
    return x.shape == y.shape and x.tobytes() == np.ascontiguousarray(y).tobytes()


def _gap(first: StoredTensor, second: StoredTensor) -> float:
    """Return the largest difference of two tensors; NaN where only one of two numbers is NaN."""
    dtype = np.float64 if "F64" in (first.dtype, second.dtype) else np.float32
    x, y = (tensor.read_all().astype(dtype) for tensor in (first, second))
    return 0.0 if np.array_equal(x, y, equal_nan=True) else float(np.max(np.abs(x - y)))


def _settings(where: str, value: Any) -> dict[str, Any]:
    """Return the plain values of a configuration by their paths, with types of its parts and lengths of its tuples."""
    if dataclasses.is_dataclass(value):
        settings: dict[str, Any] = {f"{where} is": type(value).__name__} if where else {}
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, tuple):
        settings, parts = {f"{where} length": len(value)}, dict(enumerate(value))
    else:
        return {where: value}
    for name, part in parts.items():
        settings |= _settings(f"{where}.{name}".strip("."), part)
    return settings
