"""Tensors that belong together in a quantized checkpoint: numbers, and the scales and zeros beside them."""

from eqx_decoders.errors import ConversionError, check
from eqx_decoders.io.huggingface.directory import StoredTensor
from eqx_decoders.io.huggingface.quantized.unpack import DTYPE, ScaledTensor


Tensors = dict[str, StoredTensor]
FLOATS = ("F32", "BF16", "F16")
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale")  # of the KV cache and of attention


def scaled(
    name: str,
    numbers: StoredTensor,
    scales: StoredTensor,
    block: tuple[int, int],
    zeros: StoredTensor | None = None,
    group_index: StoredTensor | None = None,
) -> ScaledTensor:
    """Return the tensor of numbers with scales, and zeros if there are any."""
    views = numbers, scales, zeros, block, group_index
    return ScaledTensor(numbers.file, name, numbers.shape, DTYPE, numbers.offset, *views)


def matrix_shape(tensor: StoredTensor, dimensions: int | None = None) -> tuple[int, ...]:
    """Return the shape of a tensor that must be a matrix or a stack of them, or have so many dimensions."""
    valid = len(tensor.shape) > 1 if dimensions is None else len(tensor.shape) == dimensions
    where = f"{tensor.file}: {tensor.name} is {tensor.description}"
    check(valid, f"{where}: only matrices have scales of few bits, and blocks.", ConversionError)
    return tensor.shape


def pop_companion(tensors: Tensors, name: str, values: StoredTensor) -> StoredTensor:
    """Remove and return the tensor `name` that belongs to `values`. Raises ConversionError."""
    rule = f"is quantized, but {name} is missing: the checkpoint is incomplete"
    check(name in tensors, f"{values.file}: {values.name} {rule}.", ConversionError)
    return tensors.pop(name)


def check_none_left(tensors: Tensors, *ends: str) -> None:
    """Refuse tensors with these ends: no weight belongs to them."""
    left = [name for name in tensors if name.endswith(ends)]
    rule = "the weights of these scales are not in F8_E4M3" if "_scale_inv" in ends else "no weight belongs to them"
    check(not left, f"{', '.join(left[:5])}: {rule}. Download the files again.", ConversionError)


def check_dtype(tensor: StoredTensor, *dtypes: str) -> None:
    """Refuse other dtypes."""
    where = f"{tensor.file}: {tensor.name} is {tensor.description}"
    check(tensor.dtype in dtypes, f"{where}, but must be {' or '.join(dtypes)}.", ConversionError)


def check_stored(tensor: StoredTensor, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """Refuse other dtypes and shapes."""
    valid, rule = tensor.dtype in dtypes and tensor.shape == shape, f"{' or '.join(dtypes)} of shape {shape}"
    where = f"{tensor.file}: {tensor.name} is {tensor.description}"
    check(valid, f"{where}, but must be {rule}. Check weight_block_size or group_size in config.json.", ConversionError)
