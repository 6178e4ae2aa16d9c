"""Helpers for finding and checking the tensors of one quantized weight: values, scales and zero points."""

from eqx_decoders.errors import ConversionError
from eqx_decoders.io.huggingface.directory import StoredTensor
from eqx_decoders.io.huggingface.quantized.unpack import DEQUANTIZED_DTYPE, ScaledTensor


Tensors = dict[str, StoredTensor]
FLOATS = ("F32", "BF16", "F16")
# Names of scales of a quantized KV cache, and of quantized attention. They do not change the weights.
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale")


def scaled_tensor(
    name: str,
    values: StoredTensor,
    scales: StoredTensor,
    block: tuple[int, int],
    zeros: StoredTensor | None = None,
    group_index: StoredTensor | None = None,
) -> ScaledTensor:
    """Return the quantized matrix `name`; see `ScaledTensor`."""
    views = values, scales, zeros, block, group_index
    return ScaledTensor(values.file, name, values.shape, DEQUANTIZED_DTYPE, values.offset, *views)


def matrix_shape(tensor: StoredTensor, dimensions: int | None = None) -> tuple[int, ...]:
    """Return the shape of a quantized tensor.

    Raises ConversionError unless it has `dimensions` dimensions, or at least two if `dimensions` is None.
    """
    is_valid = len(tensor.shape) > 1 if dimensions is None else len(tensor.shape) == dimensions
    if not is_valid:
        required = "at least 2" if dimensions is None else str(dimensions)
        raise ConversionError(
            f"{tensor.file}: {tensor.name} is {tensor.description}, but a quantized weight must have {required} "
            "dimensions. Download the file again."
        )
    return tensor.shape


def pop_companion(tensors: Tensors, name: str, values: StoredTensor) -> StoredTensor:
    """Remove and return the tensor `name`, such as the scales of `values`. Raises ConversionError if it is missing."""
    if name not in tensors:
        raise ConversionError(
            f"{values.file}: {values.name} is quantized, but {name} is missing, so the checkpoint is incomplete. "
            "Download the files again."
        )
    return tensors.pop(name)


def check_none_left(tensors: Tensors, *endings: str) -> None:
    """Raise ConversionError if there are tensors whose names have these endings: no weight uses them."""
    left = [name for name in tensors if name.endswith(endings)]
    if left:
        raise ConversionError(
            f"{', '.join(left[:5])} belong to no weight with quantized values (such as F8_E4M3). Download the files "
            "again."
        )


def check_dtype(tensor: StoredTensor, *dtypes: str) -> None:
    """Raise ConversionError unless the tensor has one of the dtypes."""
    if tensor.dtype not in dtypes:
        raise ConversionError(
            f"{tensor.file}: {tensor.name} is {tensor.description}, but must be {' or '.join(dtypes)}. Check "
            "quantization_config in config.json."
        )


def check_dtype_and_shape(tensor: StoredTensor, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """Raise ConversionError unless the tensor has one of the dtypes, and the shape."""
    if tensor.dtype not in dtypes or tensor.shape != shape:
        raise ConversionError(
            f"{tensor.file}: {tensor.name} is {tensor.description}, but must be {' or '.join(dtypes)} of shape "
            f"{shape}. Check quantization_config in config.json, such as weight_block_size and group_size."
        )
