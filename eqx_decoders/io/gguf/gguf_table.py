"""`Architecture`: conversion between the metadata of GGUF files and the `config.json` of a family.

The family's tables convert `config.json` to a model configuration. An export reads its metadata again, to check that it
describes the same model. Small tensors that are settings, such as factors of RoPE, belong to the metadata here.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import numpy as np

from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.errors import ConversionError


Settings = dict[str, Any]

# Metadata of sizes, without the prefix of the architecture, and the keys of Llama's config.json.
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
RMS, LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (FREQUENCIES, LONG, SHORT)
_FLOATS = ("_epsilon", "freq_base", "freq_base_swa", "factor", "scale", "softcapping", "_fast", "_slow", "clamp_kqv")
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


@dataclasses.dataclass
class FileMetadata:
    """Contents of a GGUF file that describe the model.

    **Arguments:**

    - `fields`: the metadata of its architecture.
    - `tensors`: names of its tensors.
    - `factors`: values of the tensors of RoPE factors, by name.
    """

    fields: Fields
    tensors: Collection[str]
    factors: Mapping[str, tuple[float, ...]]

    def has(self, tensor: str) -> bool:
        """Return whether the first layer has this tensor."""
        return f"blk.0.{tensor}" in self.tensors


@dataclasses.dataclass
class NewMetadata:
    """Metadata of an architecture for a new GGUF file, and its tensors of RoPE factors, by name."""

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    factors: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)


def no_further_settings(*_: Any) -> None:
    """Do nothing: default of `Architecture.read` and `Architecture.write`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Architecture of llama.cpp, with the family that has the same model.

    **Arguments:**

    - `name`: name of the architecture in `general.architecture`.
    - `family`: `model_type` of the family.
    - `keys`: metadata other than `SIZES`, with the keys of the family's `config.json`.
    - `renamed`: values of `SIZES` that have another key in the family, with this key. None: the family has no such key.
    - `norm`: metadata and key of the epsilon of norms; None: files do not contain it.
    - `fixed`: settings that are constants in llama.cpp's implementation of the architecture.
    - `flags`: settings that are true if the first layer has a tensor, with the name of this tensor.
    - `head_dim`: whether the family has the key `head_dim`.
    - `rope`: "full": RoPE rotates all features of a head; "partial": a part of them; None: there is no RoPE.
    - `theta`: default base of the RoPE frequencies.
    - `interleaved_rope`: whether llama.cpp stores the two rows of queries and keys that RoPE rotates together in
        adjacent positions. The family stores them in different halves of the head.
    - `norms_plus_one`: whether llama.cpp stores the weights of norms plus one.
    - `transposed`: endings of llama.cpp's tensor names whose tensors the family stores as `[in, out]`.
    - `names`: family's tensor names by llama.cpp's names, in addition to the names that the package gguf knows.
    - `interleaved_tensors`: names of the family's tensors that alternate between the rows of two tensors of llama.cpp,
        with the names of these two. Such an architecture can be loaded, but not exported.
    - `extra_axes`: endings of llama.cpp's tensor names whose tensors have an additional dimension of size 1 in the
        family, with the index of this dimension.
    - `read`, `write`: functions that convert further settings in either direction.
    """

    name: str
    family: str
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    norm: tuple[str, str] | None = (RMS, "rms_norm_eps")
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    head_dim: bool = True
    rope: Literal["full", "partial"] | None = "full"
    theta: float = 10_000.0
    interleaved_rope: bool = False
    norms_plus_one: bool = False
    transposed: tuple[str, ...] = ()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    interleaved_tensors: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    extra_axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    read: Callable[[FileMetadata, Settings], None] = no_further_settings
    write: Callable[[Settings, NewMetadata], None] = no_further_settings

    @property
    def sizes(self) -> dict[str, str]:
        """Keys of the family's `config.json`, by the names of the metadata."""
        keys = {name: self.renamed.get(key, key) for name, key in SIZES.items()}
        return {name: key for name, key in keys.items() if key is not None} | dict(self.keys)

    def settings(self, found: FileMetadata, vocab_size: int) -> Settings:
        """Return the content of a `config.json`. Raises ConversionError for unknown or unsupported metadata."""
        fields = found.fields
        settings: Settings = {"model_type": self.family, "vocab_size": vocab_size, **self.fixed}
        fields.layers("block_count")
        for name, key in self.sizes.items():
            value = _same_in_all_layers(fields, name)
            if value is not None:
                settings[key] = value
        if self.norm is not None:
            settings[self.norm[1]] = fields.number(self.norm[0])
        settings["tie_word_embeddings"] = "output.weight" not in found.tensors
        settings |= {key: found.has(tensor) for key, tensor in self.flags.items()}
        head_dim = self._read_head_dim(fields)
        if self.head_dim:
            settings["head_dim"] = head_dim
        if self.rope is not None:
            is_partial = self.rope == "partial"
            settings["rope_parameters"] = read_rope(found, settings, head_dim, self.theta, partial=is_partial)
        self.read(found, settings)
        _allow_default_values(fields)
        fields.finish()
        return settings

    def _read_head_dim(self, fields: Fields) -> int:
        heads = _same_in_all_layers(fields, "attention.head_count")
        embed = fields.integer("embedding_length")
        default = embed // heads if type(heads) is int and heads > 0 else embed
        head_dim = fields.integer("attention.key_length", default)
        for key in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
            fields.allow_only(key, head_dim)
        if not self.head_dim and head_dim != default:
            raise fields.error(
                f"attention.key_length={head_dim} must be embedding_length / attention.head_count = {default}."
            )
        return head_dim

    def metadata(self, settings: Settings) -> NewMetadata:
        """Return the metadata for the settings in the family's `config.json`."""
        sizes = {"vocab_size": "vocab_size", **self.sizes}
        metadata = NewMetadata({name: settings.get(key) for name, key in sizes.items()})
        values = metadata.values
        if self.norm is not None:
            values[self.norm[0]] = settings.get(self.norm[1])
        heads = values.get("attention.head_count")
        head_dim = settings.get("head_dim") or values["embedding_length"] // max(1, heads or 1)
        if self.head_dim:
            values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        if self.rope is not None:
            write_rope(settings, head_dim, metadata)
        self.write(settings, metadata)
        metadata.values = {
            name: float(value) if name.endswith(_FLOATS) else value
            for name, value in values.items()
            if value is not None
        }
        return metadata


def _same_in_all_layers(fields: Fields, name: str) -> Any:
    """Return a value that is stored as one number or as a list with the same number for each layer."""
    value = fields.take(name, None)
    if isinstance(value, list):
        if not value or any(layer_value != value[0] for layer_value in value):
            raise fields.error(f"{name}={abbreviate(value)} must be the same in all layers.")
        value = value[0]
    if value is not None and type(value) not in ((int,) if name in SIZES else (int, float, bool)):
        raise fields.error(f"{name}={abbreviate(value)} must be a number.")
    return value


def _allow_default_values(fields: Fields) -> None:
    """Read metadata that are only supported with values that have no effect."""
    fields.take("vocab_size", None)  # the shape of the embedding shows it
    for key in ("rope.scaling.finetuned", "tensor_data_layout", "expert_shared_count"):
        fields.take(key, None)
    defaults = {
        "attention.causal": (True,),
        "attention.max_alibi_bias": (0.0,),
        "attention.clamp_kqv": (0.0,),
        "expert_count": (0,),
        "expert_used_count": (0,),
        "expert_group_count": (0, 1),
        "expert_group_used_count": (0, 1),
        "expert_gating_func": (0, 1),
        "expert_weights_scale": (0.0, 1.0),
        "nextn_predict_layers": (0,),
        "rope.dimension_count_swa": (fields.content.get("rope.dimension_count"),),
        WINDOW: (0,),
        "use_parallel_residual": (True,),
    }
    for key, allowed in defaults.items():
        if not fields.is_read(key):
            fields.allow_only(key, *allowed)


# --- RoPE -------------------------------------------------------------------------------------------------------------


def read_rope(
    found: FileMetadata, settings: Settings, head_dim: int, theta: float, *, partial: bool = False
) -> Settings:
    """Return the value of `rope_parameters` in `config.json`.

    **Arguments:**

    - `found`, `settings`: the file's metadata, and the settings that have been read.
    - `head_dim`: features of a head.
    - `theta`: default base of the frequencies.
    - `partial`: whether only a part of the features may be rotated.
    """
    fields = found.fields
    rope: Settings = {"rope_theta": fields.number("rope.freq_base", theta)}
    rotated = fields.integer("rope.dimension_count", head_dim)
    if partial:
        rope["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise fields.error(f"rope.dimension_count={rotated} must equal the number of features of a head, {head_dim}.")
    kind = fields.word(
        "rope.scaling.type", {"none": "default", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}, "none"
    )
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    length = fields.integer("rope.scaling.original_context_length", None)
    if FREQUENCIES in found.factors and (kind in ("linear", "yarn") or (kind == "default" and factor != 1.0)):
        raise fields.error(
            f"rope.scaling.type={kind} with the factor {factor} is not supported together with the tensor "
            f"{FREQUENCIES}. Load another file of the model."
        )
    if LONG in found.factors and SHORT in found.factors:
        rope |= {"rope_type": "longrope", "long_factor": list(found.factors[LONG])}
        rope |= {"short_factor": list(found.factors[SHORT]), "original_max_position_embeddings": length}
        attention_factor = fields.number("rope.scaling.attn_factor", None)
        default = _default_attention_factor(settings, length)
        is_default = default is not None and math.isclose(attention_factor or 0.0, default, rel_tol=1e-6)
        if attention_factor is not None and not is_default:
            rope["attention_factor"] = attention_factor
    elif kind == "linear" or (kind == "default" and factor != 1.0):
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
        rope |= {word: fields.take(f"rope.scaling.yarn_{word}", None) for word in ("beta_fast", "beta_slow")}
        fields.allow_only("rope.scaling.yarn_ext_factor", 1.0)
    elif FREQUENCIES in found.factors:
        rope |= _rope_from_factors(found.factors[FREQUENCIES], rope["rope_theta"], settings)
    if rope.get("rope_type") != "longrope":
        fields.allow_only("rope.scaling.attn_factor", 1.0)
    fields.allow_only("rope.scaling.yarn_attn_factor", 1.0)
    return {key: value for key, value in rope.items() if value is not None}


def _rope_from_factors(factors: tuple[float, ...], theta: float, settings: Settings) -> Settings:
    """Return settings of RoPE whose frequencies are divided by `factors`: "llama3" if possible, else "longrope"."""
    max_factor = max(factors)
    for length in (8192, *(2**power for power in range(4, 20))):
        rope = {"factor": max_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"rope_type": "llama3", "original_max_position_embeddings": length}
        if max_factor > 1 and np.allclose(llama3_factors(rope, 2 * len(factors), theta), factors, rtol=1e-5, atol=0):
            return rope
    length = settings.get("max_position_embeddings", 2)
    return {
        "rope_type": "longrope",
        "long_factor": list(factors),
        "short_factor": list(factors),
        "attention_factor": 1.0,
        "factor": 1.0,
        "original_max_position_embeddings": length,
    }


def llama3_factors(rope: Settings, size: int, theta: float) -> tuple[float, ...]:
    """Return the numbers by which Llama 3's RoPE divides the frequencies (Grattafiori et al. 2024).

    `rope`: values of `rope_parameters`. `size`: number of rotated features.
    """
    wavelengths = 2 * math.pi * np.float64(theta) ** (np.arange(0, size, 2) / size)
    low, high, factor = (rope[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
    smooth = (rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    factors = 1 / ((1 - smooth) / factor + smooth)
    return tuple(np.where(smooth > 1, 1.0, np.where(smooth < 0, factor, factors)).astype(np.float32).tolist())


def write_rope(settings: Settings, head_dim: int, metadata: NewMetadata) -> None:
    """Add the settings in `rope_parameters` to the metadata. Raises ConversionError if llama.cpp has no such RoPE."""
    rope = settings.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    values, kind = metadata.values, rope.get("rope_type", "default")
    rotated = int(rope.get("partial_rotary_factor", 1.0) * head_dim)
    values |= {"rope.freq_base": rope.get("rope_theta"), "rope.dimension_count": rotated}
    if kind == "llama3":
        metadata.factors[FREQUENCIES] = llama3_factors(rope, head_dim, rope["rope_theta"])
    elif kind == "longrope":
        metadata.factors |= {LONG: tuple(rope["long_factor"]), SHORT: tuple(rope["short_factor"])}
        original = rope.get("original_max_position_embeddings") or settings.get("max_position_embeddings")
        factor = rope.get("attention_factor") or _default_attention_factor(settings, original)
        values |= {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": factor}
        values["rope.scaling.original_context_length"] = original
    elif kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": rope.get("factor")}
    elif kind != "default":
        raise ConversionError(
            f"save_gguf: rope_parameters has rope_type={kind}, which llama.cpp does not support. Export with save_hf."
        )
    if kind == "yarn":
        values["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
        values |= {f"rope.scaling.yarn_{word}": rope.get(word) for word in ("beta_fast", "beta_slow")}


def _default_attention_factor(settings: Settings, original: int | None) -> float | None:
    """Return the attention factor of LongRoPE that transformers computes from two lengths, or None without lengths."""
    length = settings.get("max_position_embeddings")
    if type(length) is not int or type(original) is not int or original < 2:
        return None
    return math.sqrt(1 + math.log(length / original) / math.log(original)) if length > original else 1.0


# --- masks ------------------------------------------------------------------------------------------------------------


def read_masks(found: FileMetadata, settings: Settings, period: int, window: int | None = None) -> None:
    """Read `sliding_window` and `layer_types` into `settings`.

    By default, every `period`-th layer has full attention, and the other layers a sliding window of size `window`.
    """
    fields = found.fields
    num_layers = settings["num_hidden_layers"]
    size = fields.integer(WINDOW, window, least=0) or None
    has_window = fields.content.get(PATTERN)
    if isinstance(has_window, list):
        fields.take(PATTERN)
    else:
        file_period = fields.integer(PATTERN, period)
        has_window = [index % max(1, file_period) < file_period - 1 for index in range(num_layers)]
    if len(has_window) < num_layers or not all(isinstance(flag, bool | int) for flag in has_window):
        raise fields.error(
            f"{PATTERN}={abbreviate(has_window)} must be a list with a flag for each of {num_layers} layers."
        )
    layer_types = ["sliding_attention" if size and flag else "full_attention" for flag in has_window[:num_layers]]
    settings |= {"sliding_window": size, "layer_types": layer_types}


def write_masks(settings: Settings, metadata: NewMetadata, period: int) -> None:
    """Add the masks to the metadata. The layers are listed only if they differ from the default of `read_masks`."""
    has_window = [layer_type == "sliding_attention" for layer_type in settings.get("layer_types") or ()]
    metadata.values[WINDOW] = settings.get("sliding_window") or None
    if has_window != [index % period < period - 1 for index in range(len(has_window))]:
        metadata.values[PATTERN] = has_window
