"""Is a Hugging Face directory read as it is meant? Its logits beside those of transformers, its tensors beside ours."""

import dataclasses
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, Int

from eqx_decoders.io.huggingface.directory import FLOATS, Directory, StoredTensor, stored_tensors
from eqx_decoders.io.huggingface.export import exported, save_hf
from eqx_decoders.io.huggingface.load import abstract_hf, load_hf, read_config, stored_weights
from eqx_decoders.io.huggingface.quantized import QUANTIZED, checkpoint_tensors
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.model.decoder import Decoder, DecoderConfig
from eqx_decoders.sharding.axes import AnyArray, named_leaves
from eqx_decoders.sharding.layout import Layout


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of two arrays of logits: the largest and mean |difference|, and at what share of positions the argmax agrees."""

    maximum: float
    mean: float
    agreement: float

    def __str__(self) -> str:
        return (
            f"logits: largest |difference| {self.maximum:.3g}, mean {self.mean:.3g}, "
            f"same most likely token at {self.agreement:.2%} of the positions"
        )


def compare_logits(one: Float[np.ndarray, "*shape vocab"], other: Float[np.ndarray, "*shape vocab"]) -> Difference:
    """The differences of two models' logits; infinite where one of them is not finite."""
    gap = np.nan_to_num(np.abs(one - other), nan=np.inf, posinf=np.inf)
    agreement = float(np.mean(one.argmax(-1) == other.argmax(-1)))
    return Difference(float(gap.max()), float(gap.mean()), agreement)


def random_ids(config: DecoderConfig, rows: int = 2, length: int = 32, seed: int = 0) -> Int[np.ndarray, "rows length"]:
    """Uniform token ids, no more of them in a row than the model has learned positions."""
    positions = config.positions
    if isinstance(positions, LearnedPositions):
        length = min(length, positions.max_positions)
    return np.random.default_rng(seed).integers(0, config.vocab_size, (rows, length), np.int32)


def our_logits(model: Decoder, ids: Int[np.ndarray, "rows length"]) -> Float[np.ndarray, "rows length vocab"]:
    """The logits of a loaded model, every product in full precision."""
    with jax.default_matmul_precision("highest"):
        return np.asarray(_logits(dataclasses.replace(model, origin=None), ids))


@eqx.filter_jit
def _logits(model: Decoder, ids: AnyArray) -> Any:
    return model(ids).logits


def has_transformers() -> bool:
    """Whether transformers and torch are installed."""
    return find_spec("transformers") is not None and find_spec("torch") is not None


def transformers_logits(
    directory: str | Path, ids: Int[np.ndarray, "rows length"]
) -> Float[np.ndarray, "rows length vocab"]:
    """What transformers makes of a directory, in float32.

    It sees `config.json` and the safetensors files only, and these after our reader has accepted them: no code, no
    pickles, no adapters that stand beside. Of a quantised checkpoint it sees a plain copy: with what precision it would
    compute with the original depends on the machine.
    """
    import torch  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM  # type: ignore[import-not-found]
    from transformers.utils import logging  # type: ignore[import-not-found]

    logging.disable_progress_bar()
    abstract_hf(directory)
    folder = Directory(directory)
    with tempfile.TemporaryDirectory() as seen:
        if any(isinstance(tensor, QUANTIZED) for tensor in checkpoint_tensors(folder).values()):
            save_hf(load_hf(directory), seen)
        else:
            files = {tensor.file.name for tensor in stored_tensors(folder).values()} | {"config.json"}
            for name in (*files, "model.safetensors.index.json"):
                if folder.has(name):
                    Path(seen, name).symlink_to(folder.file(name).resolve())
        model = AutoModelForCausalLM.from_pretrained(
            seen,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            attn_implementation="eager",
            dtype=torch.float32,  # now: some round constants to the dtype in which they are made
        )
        with torch.no_grad():
            return model.float().eval()(torch.from_numpy(ids.astype(np.int64)), use_cache=False).logits.numpy()


def compare_tensors(directory: str | Path, layout: Layout | None = None) -> tuple[int, list[str]]:
    """Load a directory, turn each weight back into the tensor of its file, and compare the bits.

    Returns the number of tensors and the names of those that differ. One tensor at a time is read beside the model.
    """
    mappings, stored = stored_weights(directory)
    dtypes = {"float32" if isinstance(tensor, QUANTIZED) else FLOATS[tensor.dtype] for tensor in stored.values()}
    model = load_hf(directory, dtype=dtypes.pop() if len(dtypes) == 1 else "float32", layout=layout)
    again = exported(named_leaves(model), mappings)
    different = [
        name for name, tensor in stored.items() if not _same_bits(np.asarray(again[name]()), tensor.read_all())
    ]
    return len(stored), different


def compare_directories(one: str | Path, other: str | Path) -> tuple[list[str], list[str]]:
    """The differences of two directories that change a model's structure, and the tensors that have other values.

    The first are settings that change what the model computes, and tensors that only one of them has or whose shapes
    differ; spellings, files and dtypes may differ. The second come with the largest difference.
    """
    first, second = (_settings("", read_config(directory)[0]) for directory in (one, other))
    wrong = [
        f"{name}: {first.get(name)!r} and {second.get(name)!r}"
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
    ]
    left, right = (stored_weights(directory)[1] for directory in (one, other))
    gaps = {}
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right:
            wrong.append(f"{name} is only in {one if name in left else other}")
        elif left[name].shape != right[name].shape:
            wrong.append(f"{name} has the shapes {left[name].shape} and {right[name].shape}")
        else:
            gaps[name] = _gap(left[name], right[name])
    return wrong, [f"{name}: by up to {gap:.3g}" for name, gap in gaps.items() if gap != 0]


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    one = one.astype(other.dtype)
    return one.shape == other.shape and one.tobytes() == np.ascontiguousarray(other).tobytes()


def _gap(one: StoredTensor, other: StoredTensor) -> float:
    """The largest difference; NaN where only one of both numbers is NaN."""
    dtype = np.float64 if "F64" in (one.dtype, other.dtype) else np.float32
    first, second = (tensor.read_all().astype(dtype) for tensor in (one, other))
    return 0.0 if np.array_equal(first, second, equal_nan=True) else float(np.max(np.abs(first - second)))


def _settings(where: str, value: Any) -> dict[str, Any]:
    """The plain values of a configuration by their paths, with the types of its parts and the lengths of its tuples."""
    if dataclasses.is_dataclass(value):
        found = {f"{where} is": type(value).__name__} if where else {}
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, tuple):
        found, parts = {f"{where} length": len(value)}, dict(enumerate(value))
    else:
        return {where: value}
    for name, part in parts.items():
        found |= _settings(f"{where}.{name}".strip("."), part)
    return found
