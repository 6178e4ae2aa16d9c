"""Export to GGUF files, which llama.cpp opens, and `load_hf`."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError, check, check_option
from eqx_decoders.families.family import Family, differences, for_inference
from eqx_decoders.families.registry import FAMILIES
from eqx_decoders.families.weight_rows import WeightMapping
from eqx_decoders.io.atomic_files import expanded
from eqx_decoders.io.gguf.gguf_architectures import ARCHITECTURES, find_architecture
from eqx_decoders.io.gguf.gguf_directory import tensor_names
from eqx_decoders.io.gguf.gguf_header import exact, gguf_package
from eqx_decoders.io.gguf.gguf_table import Architecture, Found, Metadata
from eqx_decoders.io.gguf.gguf_vocabulary import tokenizer_metadata
from eqx_decoders.io.huggingface.export import export_plan, exported
from eqx_decoders.io.processes import in_first
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.numerics.quantized_weight import quantized_weights
from eqx_decoders.sharding.axes import named_leaves


GGUFType = Literal["f32", "f16", "bf16", "q8_0"]

_FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}
_BLOCK = 32  # numbers of a row that share a scale in Q8_0
_LAYER = re.compile(r"\.layers?\.(\d+)\.|\.h\.(\d+)\.")
# Small or sensitive matrices, which llama.cpp keeps in float32: routers, positions, convolutions.
_WIDE = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight", "conv.weight", "_norm.weight")

Maker = Callable[[], np.ndarray | None]


class _Tensor(NamedTuple):
    """Tensor of a file that is written: its shape as in NumPy, its type, and a function that makes its numbers."""

    shape: tuple[int, ...]
    kind: str
    make: Maker


def save_gguf(
    model: Decoder,
    path: str | Path,
    *,
    dtype: GGUFType = "f16",
    family: str | None = None,
    settings: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
) -> None:
    """Write a GGUF file, which llama.cpp opens, and `load_hf`.

    **Arguments:**

    - `model`: of a family that is one of llama.cpp's architectures here; merge adapters and dequantize first.
    - `path`: a new file; it appears completely or not at all.
    - `dtype`: of matrices; vectors and routers are in float32. `"q8_0"`: 8 bits with a scale for 32 numbers, or
        float16 for rows that are no multiple of them.
    - `family`: a `model_type`; None for the origin's family or, without an origin, the first that can express it.
    - `settings`: other keys of `config.json`, such as `eos_token_id` and `max_position_embeddings`.
    - `tokenizer`: a directory or file whose tokenizer is written; None for the origin's tokenizer.

    Raises ConversionError where llama.cpp has no program for exactly this model. In a run of several processes all of
    them must call it; the first one writes.
    """
    check_option("save_gguf: dtype", dtype, get_args(GGUFType), ConversionError)
    package = gguf_package()
    check(not quantized_weights(model), "save_gguf: call dequantize first.", ConversionError)
    kind, config, _ = export_plan(model, family=family, settings=settings)
    row, metadata, tensors = _plan(model, kind, config, dtype)
    origin = None if model.origin is None or model.origin.directory is None else Path(model.origin.directory)
    own = origin if origin is not None and origin.exists() else None
    source = own if tokenizer is None else Path(expanded(tokenizer))
    file = Path(expanded(path)).absolute()
    partial = file.with_name(f".{file.name}.partial")

    def begin() -> Any:
        check(not file.exists(), f"{file} exists already: give a new file.", ConversionError)
        check(file.parent.is_dir(), f"{file} cannot be made: its directory does not exist.", ConversionError)
        words = tokenizer_metadata(source, config, model.config.vocab_size, file.stem)
        writer = package.GGUFWriter(partial, row.name)
        _write_header(writer, row, metadata, words, tensors, dtype)
        return writer

    def finish() -> None:
        writer.close()
        partial.replace(file)

    try:
        writer: Any = in_first("save_gguf", begin)
        for name, tensor in tensors.items():
            numbers = tensor.make()  # all processes together
            in_first("save_gguf", functools.partial(_write_tensor, writer, name, numbers, tensor.kind))
        in_first("save_gguf", finish)
    finally:
        if jax.process_index() == 0:
            partial.unlink(missing_ok=True)


def _plan(
    model: Decoder, kind: Family, config: Mapping[str, Any], dtype: str
) -> tuple[Architecture, Metadata, dict[str, _Tensor]]:
    """Return the architecture of a model, its metadata and its tensors. Raises ConversionError."""
    row, kind, config = _architecture(model, kind, dict(config))
    metadata = row.metadata(config)
    tensors = _tensors(model, row, kind, config, dtype)
    for name, numbers in metadata.factors.items():
        tensors[name] = _Tensor((len(numbers),), "F32", functools.partial(np.asarray, numbers, np.float32))
    _check_metadata(row, metadata, tensors, model)
    return row, metadata, tensors


def _architecture(model: Decoder, kind: Family, config: dict[str, Any]) -> tuple[Architecture, Family, dict[str, Any]]:
    """Return the row of a model's family, or of another one that can express the model, and its settings."""
    rows = [row for row in ARCHITECTURES if not row.joined]
    for row in rows:
        if row.family == kind.model_type:
            return row, kind, config
    for row in rows:
        other = FAMILIES[row.family]
        try:
            written = other.encode(model.config)
        except ConversionError:
            continue
        return row, other, config | written
    known = ", ".join(row.family for row in rows)
    raise ConversionError(f"save_gguf: {kind.model_type} is none of llama.cpp's architectures here. Known: {known}.")


def _check_metadata(row: Architecture, metadata: Metadata, tensors: Mapping[str, _Tensor], model: Decoder) -> None:
    """Raise ConversionError unless reading the metadata gives the same model."""
    values = {name: exact(value) if isinstance(value, float) else value for name, value in metadata.values.items()}
    factors = {name: tuple(map(exact, numbers)) for name, numbers in metadata.factors.items()}
    found = Found(Fields(values, f"save_gguf: {row.name}"), tensors.keys(), factors)
    read = find_architecture(row.name, found)
    config, _ = FAMILIES[read.family].decode(read.settings(found, model.config.vocab_size))
    lines = differences(_in_float32(for_inference(config)), _in_float32(for_inference(model.config)))
    rule = f"save_gguf: llama.cpp's {row.name} is another model"
    check(not lines, f"{rule}: {'; '.join(lines)}.", ConversionError)


def _in_float32(value: Any) -> Any:
    """Return a configuration with numbers as a file stores them."""
    if isinstance(value, float):
        return exact(value)
    if isinstance(value, tuple):
        return tuple(map(_in_float32, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: _in_float32(getattr(value, name)) for name in fields})
    return value


def _tensors(
    model: Decoder, row: Architecture, kind: Family, config: Mapping[str, Any], dtype: str
) -> dict[str, _Tensor]:
    """Return the tensors of a file by llama.cpp's names."""
    mappings = kind.bind(model)
    makers = exported(named_leaves(model), mappings)
    shapes = {name: mapping.shape for mapping in mappings.values() for name in mapping.names}
    theirs = {ours: name for name, ours in tensor_names(row, dict(config)).items()}
    groups: dict[str, list[str]] = {}
    for name in (name for mapping in _in_order(mappings) for name in mapping.names):
        groups.setdefault(_their_name(name, theirs), []).append(name)
    return {
        name: _tensor(name, list(dict.fromkeys(ours)), makers, shapes, row, config, dtype)
        for name, ours in groups.items()
    }


def _in_order(mappings: Mapping[str, WeightMapping]) -> list[WeightMapping]:
    """Return the mappings, those of the table first: llama.cpp's files begin with it."""
    return sorted(mappings.values(), key=lambda mapping: mapping.stacked)


def _their_name(name: str, theirs: Mapping[str, str]) -> str:
    """Return llama.cpp's name of a tensor, which is one for all experts of a layer."""
    template = re.sub(r"\.experts\.\d+\.", ".experts.{expert}.", name)
    layer = _LAYER.search(template)
    number = "" if layer is None else layer[1] or layer[2]
    if layer is not None:
        template = template[: layer.start()] + layer[0].replace(number, "{layer}") + template[layer.end() :]
    found = theirs.get(template)
    check(found is not None, f"save_gguf: llama.cpp has no tensor for {name}.", ConversionError)
    return str(found).format(layer=number)


def _tensor(
    name: str,
    ours: list[str],
    makers: Mapping[str, Maker],
    shapes: Mapping[str, tuple[int, ...]],
    row: Architecture,
    config: Mapping[str, Any],
    dtype: str,
) -> _Tensor:
    """Return a tensor of one of ours, or of those of all experts."""
    shape, change = shapes[ours[0]], _change(name, row, config)
    # on zeros that take no memory: what is done to numbers says the shape
    after = change(np.broadcast_to(np.float32(0), shape)).shape
    whole = after if len(ours) == 1 else (len(ours), *after)

    def make() -> np.ndarray | None:
        parts = [makers[each]() for each in ours]
        changed = [change(part) for part in parts if part is not None]
        return None if not changed else changed[0] if len(ours) == 1 else np.stack(changed)

    wide = len(whole) == 1 or name.endswith(_WIDE) or not name.endswith(".weight")
    kind = "F32" if wide else "F16" if dtype == "q8_0" and whole[-1] % _BLOCK else dtype.upper()
    return _Tensor(whole, kind, make)


def _change(name: str, row: Architecture, config: Mapping[str, Any]) -> Callable[[np.ndarray], np.ndarray]:
    """Return what makes llama.cpp's numbers of a tensor of the family."""
    part = name.split(".")[-2]
    axis = next((axis for end, axis in row.added.items() if name.endswith(end)), None)
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    if row.in_pairs and part in heads:
        count = config.get(heads[part]) or config["num_attention_heads"]
        return lambda x: x.reshape(count, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    if row.plus_one and name.endswith("norm.weight"):
        return lambda x: x.astype(np.float32) + np.float32(1)
    if name.endswith(row.transposed):
        return np.transpose
    return (lambda x: x) if axis is None else lambda x: x.squeeze(axis)


def _write_header(
    writer: Any,
    row: Architecture,
    metadata: Metadata,
    words: Mapping[str, Any],
    tensors: Mapping[str, _Tensor],
    dtype: str,
) -> None:
    """Write all but the numbers."""
    package = gguf_package()
    general = {"general.type": "model", "general.file_type": _FILE_TYPES[dtype]}
    general |= {"general.quantization_version": package.GGML_QUANT_VERSION}
    own = {f"{row.name}.{key}": value for key, value in metadata.values.items()}
    for key, value in (general | own | dict(words)).items():
        if value != []:  # a list without a value has no type
            writer.add_key_value(key, value, *_types(value))
    for key, tensor in tensors.items():
        kind = package.GGMLQuantizationType[tensor.kind]
        each, size = package.GGML_QUANT_SIZES[kind]
        count = int(np.prod(tensor.shape)) // each * size
        shape, stored = tensor.shape, np.dtype(np.float32)
        if tensor.kind not in ("F32", "F16"):
            shape, stored = (*shape[:-1], shape[-1] // each * size), np.dtype(np.uint8)
        stored = np.dtype(np.float16) if tensor.kind == "F16" else stored
        writer.add_tensor_info(key, shape, stored, count, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _types(value: Any) -> tuple[Any, Any]:
    """Return the types of a value, and of the values in a list."""
    types = gguf_package().GGUFValueType
    kinds = {bool: types.BOOL, int: types.UINT32, float: types.FLOAT32, str: types.STRING}
    if isinstance(value, list):
        return types.ARRAY, types.INT32 if type(value[0]) is int else kinds[type(value[0])]
    return kinds[type(value)], None


def _write_tensor(writer: Any, name: str, numbers: np.ndarray | None, kind: str) -> None:
    """Write a tensor in the type `kind`. Raises ConversionError for numbers that it does not hold."""
    assert numbers is not None, "only the first process writes"
    package = gguf_package()
    numbers = np.ascontiguousarray(numbers, np.float32)
    with np.errstate(over="ignore"):
        stored = package.quants.quantize(numbers, package.GGMLQuantizationType[kind])
    if kind in ("F16", "Q8_0"):
        high = float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0)) / (1 if kind == "F16" else 127)
        check(high < 65_520, f"save_gguf: {name} has numbers that float16 does not hold: take bf16.", ConversionError)
    writer.write_tensor_data(stored)
