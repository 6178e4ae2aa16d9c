"""Export to GGUF files, which llama.cpp and `load_hf` open."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError, check_option
from eqx_decoders.families.family import Family, differences, for_inference
from eqx_decoders.families.registry import FAMILIES
from eqx_decoders.io.atomic_files import expanded
from eqx_decoders.io.gguf.gguf_architectures import ARCHITECTURES, find_architecture
from eqx_decoders.io.gguf.gguf_directory import tensor_names
from eqx_decoders.io.gguf.gguf_header import gguf_package, shortest_float
from eqx_decoders.io.gguf.gguf_table import Architecture, FileMetadata, NewMetadata
from eqx_decoders.io.gguf.gguf_vocabulary import tokenizer_metadata
from eqx_decoders.io.huggingface.export import TensorMaker, export_plan, tensor_makers
from eqx_decoders.io.processes import run_in_process_0
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.numerics.quantized_weight import quantized_weights
from eqx_decoders.sharding.axes import named_leaves


GGUFType = Literal["f32", "f16", "bf16", "q8_0"]

_FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}
_BLOCK = 32  # values of a row that share a scale in Q8_0
_LAYER = re.compile(r"\.layers?\.(\d+)\.|\.h\.(\d+)\.")
# Small or sensitive matrices, which llama.cpp stores in float32: routers, positions, convolutions.
_FLOAT32_TENSORS = (
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
    "position_embd.weight",
    "conv.weight",
    "_norm.weight",
)


class _NewTensor(NamedTuple):
    """Tensor of a new file.

    - `shape`: its shape in the order of NumPy.
    - `ggml_type`: name of its type.
    - `make`: function that returns its values before quantization.
    """

    shape: tuple[int, ...]
    ggml_type: str
    make: TensorMaker


def save_gguf(
    model: Decoder,
    path: str | Path,
    *,
    dtype: GGUFType = "f16",
    family: str | None = None,
    settings: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
) -> None:
    """Write a model as a GGUF file, which llama.cpp and `load_hf` open.

    **Arguments:**

    - `model`: a model of a family in `gguf_architectures.py`. Merge adapters and dequantize weights first.
    - `path`: a new file; it is written completely or not at all.
    - `dtype`: type of matrices; vectors and routers are stored in float32. "q8_0": 8 bits with a scale for 32 values;
        matrices with rows that are not a multiple of 32 are stored in float16.
    - `family`: a `model_type`. None: the family from which the model was loaded or, for other models, the first family
        that can express the model.
    - `settings`: other keys of `config.json`, such as `eos_token_id` and `max_position_embeddings`.
    - `tokenizer`: directory or file whose tokenizer is written; None: the tokenizer of the checkpoint from which the
        model was loaded.

    Raises ConversionError if llama.cpp does not implement exactly this model. In a run of several processes, all
    processes must call it, and the first process writes.
    """
    check_option("save_gguf: dtype", dtype, get_args(GGUFType), ConversionError)
    package = gguf_package()
    if quantized_weights(model):
        raise ConversionError(
            "save_gguf: the model has quantized weights, which cannot be written. Call dequantize first."
        )
    kind, config, _ = export_plan(model, family=family, settings=settings)
    architecture, metadata, tensors = _plan(model, kind, config, dtype)
    if tokenizer is not None:
        source = Path(expanded(tokenizer))
    elif model.origin is not None and model.origin.directory is not None and Path(model.origin.directory).exists():
        source = Path(model.origin.directory)
    else:
        source = None
    file = Path(expanded(path)).absolute()
    partial = file.with_name(f".{file.name}.partial")

    def start() -> Any:
        if file.exists():
            raise ConversionError(f"{file} already exists. Give a new file.")
        if not file.parent.is_dir():
            raise ConversionError(f"{file} cannot be created, because its directory does not exist. Create it first.")
        tokenizer_values = tokenizer_metadata(source, config, model.config.vocab_size, file.stem)
        writer = package.GGUFWriter(partial, architecture.name)
        _write_header(writer, architecture, metadata, tokenizer_values, tensors, dtype)
        return writer

    def finish() -> None:
        writer.close()
        partial.replace(file)

    try:
        writer: Any = run_in_process_0("save_gguf", start)
        for name, tensor in tensors.items():
            values = tensor.make()  # all processes take part
            run_in_process_0("save_gguf", functools.partial(_write_tensor, writer, name, values, tensor.ggml_type))
        run_in_process_0("save_gguf", finish)
    finally:
        if jax.process_index() == 0:
            partial.unlink(missing_ok=True)


def _plan(
    model: Decoder, kind: Family, config: Mapping[str, Any], dtype: str
) -> tuple[Architecture, NewMetadata, dict[str, _NewTensor]]:
    """Return the architecture of a model, its metadata and its tensors. Raises ConversionError."""
    architecture, kind, config = _find_architecture(model, kind, dict(config))
    metadata = architecture.metadata(config)
    tensors = _model_tensors(model, architecture, kind, config, dtype)
    for name, factors in metadata.factors.items():
        tensors[name] = _NewTensor((len(factors),), "F32", functools.partial(np.asarray, factors, np.float32))
    _check_metadata(architecture, metadata, tensors, model)
    return architecture, metadata, tensors


def _find_architecture(
    model: Decoder, kind: Family, config: dict[str, Any]
) -> tuple[Architecture, Family, dict[str, Any]]:
    """Return the architecture, the family and the `config.json` with which the model is written.

    If no architecture has the family `kind`, another family is used that can express the model.
    """
    architectures = [architecture for architecture in ARCHITECTURES if not architecture.interleaved_tensors]
    for architecture in architectures:
        if architecture.family == kind.model_type:
            return architecture, kind, config
    for architecture in architectures:
        other = FAMILIES[architecture.family]
        try:
            encoded = other.encode(model.config)
        except ConversionError:
            continue
        return architecture, other, config | encoded
    supported = ", ".join(architecture.family for architecture in architectures)
    raise ConversionError(
        f"save_gguf: models of the family {kind.model_type} cannot be written. Supported: {supported}. Export with "
        "save_hf."
    )


def _check_metadata(
    architecture: Architecture, metadata: NewMetadata, tensors: Mapping[str, _NewTensor], model: Decoder
) -> None:
    """Raise ConversionError unless reading the metadata gives the configuration of the model."""
    values = {
        name: shortest_float(value) if isinstance(value, float) else value for name, value in metadata.values.items()
    }
    factors = {name: tuple(map(shortest_float, factors)) for name, factors in metadata.factors.items()}
    found = FileMetadata(Fields(values, f"save_gguf: {architecture.name}"), tensors.keys(), factors)
    read = find_architecture(architecture.name, found)
    config, _ = FAMILIES[read.family].decode(read.settings(found, model.config.vocab_size))
    lines = differences(_in_float32(for_inference(config)), _in_float32(for_inference(model.config)))
    if lines:
        raise ConversionError(
            f"save_gguf: llama.cpp's architecture {architecture.name} would compute another model: {'; '.join(lines)}. "
            "Export with save_hf."
        )


def _in_float32(value: Any) -> Any:
    """Return a configuration with numbers rounded to float32, as a file stores them."""
    if isinstance(value, float):
        return shortest_float(value)
    if isinstance(value, tuple):
        return tuple(map(_in_float32, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: _in_float32(getattr(value, name)) for name in fields})
    return value


def _model_tensors(
    model: Decoder, architecture: Architecture, kind: Family, config: Mapping[str, Any], dtype: str
) -> dict[str, _NewTensor]:
    """Return the tensors with the model's weights, by llama.cpp's names."""
    mappings = kind.bind(model)
    makers = tensor_makers(named_leaves(model), mappings)
    shapes = {name: mapping.shape for mapping in mappings.values() for name in mapping.names}
    gguf_names = {family_name: gguf_name for gguf_name, family_name in tensor_names(architecture).items()}
    sources: dict[str, list[str]] = {}  # the family's tensors that a tensor of the file consists of
    for mapping in sorted(mappings.values(), key=lambda mapping: mapping.stacked):  # files start with the embedding
        for name in mapping.names:
            sources.setdefault(_gguf_name(name, gguf_names), []).append(name)
    return {
        name: _new_tensor(name, list(dict.fromkeys(family_names)), makers, shapes, architecture, config, dtype)
        for name, family_names in sources.items()
    }


def _gguf_name(name: str, gguf_names: Mapping[str, str]) -> str:
    """Return llama.cpp's name of one of the family's tensors. The experts of a layer have the same name.

    `gguf_names`: llama.cpp's names by the family's names, both with `{layer}`.
    """
    template = re.sub(r"\.experts\.\d+\.", ".experts.{expert}.", name)
    match = _LAYER.search(template)
    layer = "" if match is None else match[1] or match[2]
    if match is not None:
        template = template[: match.start()] + match[0].replace(layer, "{layer}") + template[match.end() :]
    if template not in gguf_names:
        raise ConversionError(f"save_gguf: llama.cpp has no tensor for {name}. Export with save_hf.")
    return gguf_names[template].format(layer=layer)


def _new_tensor(
    name: str,
    family_names: list[str],
    makers: Mapping[str, TensorMaker],
    shapes: Mapping[str, tuple[int, ...]],
    architecture: Architecture,
    config: Mapping[str, Any],
    dtype: str,
) -> _NewTensor:
    """Return a tensor of the file, from one of the family's tensors, or from the tensors of all experts."""
    convert = _conversion(name, architecture, config)
    # A view of a single zero, which needs no memory, shows the shape after the conversion.
    shape = convert(np.broadcast_to(np.float32(0), shapes[family_names[0]])).shape
    if len(family_names) > 1:
        shape = (len(family_names), *shape)

    def make() -> np.ndarray | None:
        parts = [makers[family_name]() for family_name in family_names]
        converted = [convert(part) for part in parts if part is not None]
        if not converted:
            return None
        return converted[0] if len(family_names) == 1 else np.stack(converted)

    if len(shape) == 1 or name.endswith(_FLOAT32_TENSORS) or not name.endswith(".weight"):
        ggml_type = "F32"
    elif dtype == "q8_0" and shape[-1] % _BLOCK:
        ggml_type = "F16"
    else:
        ggml_type = dtype.upper()
    return _NewTensor(shape, ggml_type, make)


def _conversion(name: str, architecture: Architecture, config: Mapping[str, Any]) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function that converts one of the family's tensors to llama.cpp's layout."""
    head_keys = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    part = name.split(".")[-2]
    if architecture.interleaved_rope and part in head_keys:
        heads = config.get(head_keys[part]) or config["num_attention_heads"]
        return lambda x: x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    if architecture.norms_plus_one and name.endswith("norm.weight"):
        return lambda x: x.astype(np.float32) + np.float32(1)
    if name.endswith(architecture.transposed):
        return np.transpose
    axis = next((axis for ending, axis in architecture.extra_axes.items() if name.endswith(ending)), None)
    return (lambda x: x) if axis is None else lambda x: x.squeeze(axis)


def _write_header(
    writer: Any,
    architecture: Architecture,
    metadata: NewMetadata,
    tokenizer_values: Mapping[str, Any],
    tensors: Mapping[str, _NewTensor],
    dtype: str,
) -> None:
    """Write the metadata, and the descriptions of all tensors."""
    package = gguf_package()
    general = {"general.type": "model", "general.file_type": _FILE_TYPES[dtype]}
    general |= {"general.quantization_version": package.GGML_QUANT_VERSION}
    model_values = {f"{architecture.name}.{key}": value for key, value in metadata.values.items()}
    for key, value in (general | model_values | dict(tokenizer_values)).items():
        if value != []:  # the type of an empty list is unknown
            writer.add_key_value(key, value, *_value_types(value))
    for name, tensor in tensors.items():
        type_id = package.GGMLQuantizationType[tensor.ggml_type]
        block, block_bytes = package.GGML_QUANT_SIZES[type_id]
        num_bytes = int(np.prod(tensor.shape)) // block * block_bytes
        shape = tensor.shape
        if tensor.ggml_type in ("F32", "F16"):
            dtype_in_file = np.dtype(np.float32 if tensor.ggml_type == "F32" else np.float16)
        else:
            shape = (*shape[:-1], shape[-1] // block * block_bytes)
            dtype_in_file = np.dtype(np.uint8)
        writer.add_tensor_info(name, shape, dtype_in_file, num_bytes, raw_dtype=type_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _value_types(value: Any) -> tuple[Any, Any]:
    """Return the type of a metadata value, and the type of the values of a list."""
    types = gguf_package().GGUFValueType
    types_by_class = {bool: types.BOOL, int: types.UINT32, float: types.FLOAT32, str: types.STRING}
    if isinstance(value, list):
        return types.ARRAY, types.INT32 if type(value[0]) is int else types_by_class[type(value[0])]
    return types_by_class[type(value)], None


def _write_tensor(writer: Any, name: str, values: np.ndarray | None, ggml_type: str) -> None:
    """Quantize and write a tensor. Raises ConversionError for values that float16 cannot represent."""
    assert values is not None, "only the first process writes"
    package = gguf_package()
    values = np.ascontiguousarray(values, np.float32)
    with np.errstate(over="ignore"):
        stored = package.quants.quantize(values, package.GGMLQuantizationType[ggml_type])
    if ggml_type in ("F16", "Q8_0"):
        largest = float(np.abs(values[np.isfinite(values)]).max(initial=0))
        largest_float16 = largest if ggml_type == "F16" else largest / 127
        if largest_float16 >= 65_520:
            raise ConversionError(
                f"save_gguf: {name} has values up to {largest:.4g}, which {ggml_type} cannot represent. Use "
                "dtype='bf16'."
            )
    writer.write_tensor_data(stored)
