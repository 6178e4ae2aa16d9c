"""Verification of Hugging Face directories: compares logits with transformers, and loaded weights with the files."""

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
from eqx_decoders.io.huggingface.export import save_hf, tensor_makers
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
    """Difference of two arrays of logits.

    **Arguments:**

    - `maximum`, `mean`: largest and mean absolute difference.
    - `agreement`: fraction of positions with the same argmax.
    """

    maximum: float
    mean: float
    agreement: float

    def __str__(self) -> str:
        return (
            f"logits: largest |difference| {self.maximum:.3g}, mean {self.mean:.3g}, "
            f"same most likely token at {self.agreement:.2%} of the positions"
        )


def compare_logits(first: Float[np.ndarray, "*shape vocab"], second: Float[np.ndarray, "*shape vocab"]) -> Difference:
    """Return the difference of two models' logits. It is infinite where a logit is not finite."""
    gap = np.nan_to_num(np.abs(first - second), nan=np.inf, posinf=np.inf)
    agreement = float(np.mean(first.argmax(-1) == second.argmax(-1)))
    return Difference(float(gap.max()), float(gap.mean()), agreement)


def random_ids(config: DecoderConfig, rows: int = 2, length: int = 32, seed: int = 0) -> Int[np.ndarray, "rows length"]:
    """Return uniformly distributed token ids. Rows are not longer than the model's table of learned positions."""
    positions = config.positions
    if isinstance(positions, LearnedPositions):
        length = min(length, positions.max_positions)
    return np.random.default_rng(seed).integers(0, config.vocab_size, (rows, length), np.int32)


def model_logits(model: Decoder, ids: Int[np.ndarray, "rows length"]) -> Float[np.ndarray, "rows positions vocab"]:
    """Return the logits of a loaded model, computed with the highest precision of matrix products.

    For a sequence classification model, returns the scores at the last token of each row.
    """
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
) -> Float[np.ndarray, "rows positions vocab"]:
    """Return the logits of a directory's model, computed by transformers in float32.

    For a sequence classification model, returns the scores at the last token of each row.

    transformers gets only `config.json` and the safetensors files, after this library has accepted them, so that it
    cannot run code from the directory, or load pickles and adapters. Quantized checkpoints and GGUF files are converted
    to float32 first, because transformers' precision for quantized checkpoints depends on the machine.
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
            dtype=torch.float32,  # here and not only in .float(), because some models round constants to this dtype
        )
        model = model.float().eval()
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            if scores is None:
                return model(tokens, use_cache=False).logits.numpy()
            # Without a padding id, the last token of a row may have any id, but rows must be processed one by one.
            model.config.pad_token_id = None
            return np.stack([model(row[None], use_cache=False).logits.numpy() for row in tokens])


def compare_tensors(directory: str | Path, layout: Layout | None = None) -> tuple[int, list[str]]:
    """Load a directory, convert each weight back to the tensor of its file, and compare the bits.

    Returns the number of tensors, and the names of tensors that differ. The memory contains the model and one tensor.
    """
    mappings, stored = stored_weights(directory)
    dtypes = {"float32" if isinstance(tensor, QUANTIZED) else FLOATS[tensor.dtype] for tensor in stored.values()}
    model = load_hf(directory, dtype=dtypes.pop() if len(dtypes) == 1 else "float32", layout=layout)
    makers = tensor_makers(named_leaves(model), mappings)
    different = [
        name for name, tensor in stored.items() if not _same_bits(np.asarray(makers[name]()), tensor.read_all())
    ]
    return len(stored), different


def compare_directories(first: str | Path, second: str | Path) -> tuple[list[str], list[str]]:
    """Compare two directories. Returns the differences in structure, and the tensors with different values.

    Differences in structure are settings that change what the model computes, tensors that only one directory has, and
    tensors with different shapes. File names, dtypes and the spelling of settings may differ. Tensors with different
    values are listed with the largest difference.
    """
    first_settings, second_settings = (_flat_settings("", read_config(path)[0]) for path in (first, second))
    structure = [
        f"{name}: {first_settings.get(name)!r} and {second_settings.get(name)!r}"
        for name in sorted(first_settings.keys() | second_settings.keys())
        if first_settings.get(name) != second_settings.get(name)
    ]
    first_tensors, second_tensors = (stored_weights(path)[1] for path in (first, second))
    differences = {}
    for name in sorted(first_tensors.keys() | second_tensors.keys()):
        if name not in first_tensors or name not in second_tensors:
            structure.append(f"{name} is only in {first if name in first_tensors else second}")
        elif first_tensors[name].shape != second_tensors[name].shape:
            structure.append(f"{name} has the shapes {first_tensors[name].shape} and {second_tensors[name].shape}")
        else:
            differences[name] = _max_difference(first_tensors[name], second_tensors[name])
    return structure, [f"{name}: by up to {gap:.3g}" for name, gap in differences.items() if gap != 0]


def _same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    x = x.astype(y.dtype)
    return x.shape == y.shape and x.tobytes() == np.ascontiguousarray(y).tobytes()


def _max_difference(first: StoredTensor, second: StoredTensor) -> float:
    """Return the largest absolute difference of two tensors; NaN if an element is NaN in only one of them."""
    dtype = np.float64 if "F64" in (first.dtype, second.dtype) else np.float32
    x, y = (tensor.read_all().astype(dtype) for tensor in (first, second))
    return 0.0 if np.array_equal(x, y, equal_nan=True) else float(np.max(np.abs(x - y)))


def _flat_settings(path: str, value: Any) -> dict[str, Any]:
    """Return the values in a configuration by path, including the types of dataclasses and the lengths of tuples."""
    if dataclasses.is_dataclass(value):
        settings: dict[str, Any] = {f"{path} is": type(value).__name__} if path else {}
        children = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, tuple):
        settings = {f"{path} length": len(value)}
        children = dict(enumerate(value))
    else:
        return {path: value}
    for name, child in children.items():
        settings |= _flat_settings(f"{path}.{name}".strip("."), child)
    return settings
