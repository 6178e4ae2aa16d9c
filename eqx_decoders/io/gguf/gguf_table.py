"""Architecture of llama.cpp: how the metadata of its GGUF files becomes the settings of a family, and back.

A family's own tables do the rest: metadata becomes the content of a `config.json`, and what is written is read again
before it counts. Numbers of tensors, such as rotary factors, stand for settings here as well.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.errors import ConversionError


Settings = dict[str, Any]

# llama.cpp's names of sizes, behind the architecture's, and Llama's keys.
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
class Found:
    """What a GGUF file says of its model.

    **Arguments:**

    - `fields`: the metadata of its architecture.
    - `tensors`: names of its tensors.
    - `factors`: numbers of the tensors of rotary factors.
    """

    fields: Fields
    tensors: Collection[str]
    factors: Mapping[str, tuple[float, ...]]

    def has(self, tensor: str) -> bool:
        """Return whether the first layer has a tensor."""
        return f"blk.0.{tensor}" in self.tensors


@dataclasses.dataclass
class Metadata:
    """Metadata of an architecture that are written, and tensors of rotary factors."""

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    factors: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)


def nothing(*_: Any) -> None:
    """Do nothing: for architectures without settings of their own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Architecture of llama.cpp, and the family that it is.

    **Arguments:**

    - `name`: its name in files.
    - `family`: a `model_type`.
    - `keys`: names of other metadata than `SIZES`, and the family's keys.
    - `renamed`: Llama's keys of `SIZES`, and the family's; None where it has no such key.
    - `norm`: metadata and key of the constant in norms; None where files do not say it.
    - `fixed`: settings that llama.cpp's program for the architecture has in it.
    - `flags`: settings that are true where the first layer has a tensor.
    - `head_dim`: whether the family has that key.
    - `rope`: whether positions are rotated: all of a head, or a part of it ("partial").
    - `theta`: base of frequencies where a file has none.
    - `in_pairs`: whether queries and keys are stored with the two numbers of a rotation side by side, unlike the
        family's.
    - `plus_one`: whether factors of norms are stored plus one.
    - `transposed`: ends of names of the tensors that the family stores as `[in, out]`.
    - `names`: llama.cpp's names of tensors, and the family's, where the package gguf does not know them.
    - `joined`: names of the family's tensors that hold two of llama.cpp's, one row of each in turn. Such a family is
        read alone.
    - `added`: ends of names of tensors that have one more dimension in the family, of size 1, and its place.
    - `read`, `write`: what else to read into the settings, and to write from them.
    """

    name: str
    family: str
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    norm: tuple[str, str] | None = (RMS, "rms_norm_eps")
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    head_dim: bool = True
    rope: str | None = "whole"
    theta: float = 10_000.0
    in_pairs: bool = False
    plus_one: bool = False
    transposed: tuple[str, ...] = ()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    joined: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    added: Mapping[str, int] = dataclasses.field(default_factory=dict)
    read: Callable[[Found, Settings], None] = nothing
    write: Callable[[Settings, Metadata], None] = nothing

    @property
    def sizes(self) -> dict[str, str]:
        """Metadata of sizes, and the family's keys."""
        named = {name: self.renamed.get(key, key) for name, key in SIZES.items()}
        return {name: key for name, key in named.items() if key is not None} | dict(self.keys)

    def settings(self, found: Found, vocab_size: int) -> Settings:
        """Return the content of a `config.json`. Raises ConversionError for metadata that are not understood."""
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
        size = self._head_size(fields)
        if self.head_dim:
            settings["head_dim"] = size
        if self.rope is not None:
            settings["rope_parameters"] = read_rope(found, settings, size, self.theta, partial=self.rope == "partial")
        self.read(found, settings)
        _ignore(fields)
        fields.finish()
        return settings

    def _head_size(self, fields: Fields) -> int:
        heads, embed = _same_in_all_layers(fields, "attention.head_count"), fields.integer("embedding_length")
        whole = embed // heads if type(heads) is int and heads > 0 else embed
        size = fields.integer("attention.key_length", whole)
        for key in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
            fields.allow_only(key, size)
        if not self.head_dim and size != whole:
            raise fields.error(f"attention.key_length={size} must be embedding_length / attention.head_count = {whole}")
        return size

    def metadata(self, settings: Settings) -> Metadata:
        """Return the metadata for the settings of the family."""
        sizes = {"vocab_size": "vocab_size", **self.sizes}
        metadata = Metadata({name: settings.get(key) for name, key in sizes.items()})
        values = metadata.values
        if self.norm is not None:
            values[self.norm[0]] = settings.get(self.norm[1])
        heads, embed = values.get("attention.head_count"), values["embedding_length"]
        size = settings.get("head_dim") or embed // max(1, heads or 1)
        if self.head_dim:
            values |= {"attention.key_length": size, "attention.value_length": size}
        if self.rope is not None:
            write_rope(settings, size, metadata)
        self.write(settings, metadata)
        given = {name: value for name, value in values.items() if value is not None}
        metadata.values = {name: float(value) if name.endswith(_FLOATS) else value for name, value in given.items()}
        return metadata


def _same_in_all_layers(fields: Fields, name: str) -> Any:
    """Return a value that may stand once, or once for each layer, all of them equal."""
    value = fields.take(name, None)
    if isinstance(value, list):
        if not value or any(each != value[0] for each in value):
            raise fields.error(f"{name}={abbreviate(value)} must be the same in all layers.")
        value = value[0]
    if value is not None and type(value) not in ((int,) if name in SIZES else (int, float, bool)):
        raise fields.error(f"{name}={abbreviate(value)} must be a number.")
    return value


def _ignore(fields: Fields) -> None:
    """Read metadata that change nothing where they have their usual values."""
    fields.take("vocab_size", None)  # the table says it
    for key in ("rope.scaling.finetuned", "tensor_data_layout", "expert_shared_count"):
        fields.take(key, None)
    usual = {
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
    for key, allowed in usual.items():
        if not fields.is_read(key):
            fields.allow_only(key, *allowed)


# --- rotary embeddings ------------------------------------------------------------------------------------------------


def read_rope(found: Found, settings: Settings, head_dim: int, theta: float, *, partial: bool = False) -> Settings:
    """Return `rope_parameters`."""
    fields = found.fields
    rope: Settings = {"rope_theta": fields.number("rope.freq_base", theta)}
    rotated = fields.integer("rope.dimension_count", head_dim)
    if partial:
        rope["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise fields.error(f"rope.dimension_count={rotated} must be the size of a head, {head_dim}.")
    kind = fields.word(
        "rope.scaling.type", {"none": "default", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}, "none"
    )
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    length = fields.integer("rope.scaling.original_context_length", None)
    if FREQUENCIES in found.factors and (kind in ("linear", "yarn") or (kind == "default" and factor != 1.0)):
        both = f"rope.scaling.type={kind} with the factor {factor}"
        raise fields.error(f"{FREQUENCIES} beside {both} is not implemented: only one of them is.")
    if LONG in found.factors and SHORT in found.factors:
        rope |= {"rope_type": "longrope", "long_factor": list(found.factors[LONG])}
        rope |= {"short_factor": list(found.factors[SHORT]), "original_max_position_embeddings": length}
        factor, usual = fields.number("rope.scaling.attn_factor", None), _usual_factor(settings, length)
        if factor is not None and not (usual and math.isclose(factor, usual, rel_tol=1e-6)):
            rope["attention_factor"] = factor
    elif kind == "linear" or (kind == "default" and factor != 1.0):
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
        rope |= {word: fields.take(f"rope.scaling.yarn_{word}", None) for word in ("beta_fast", "beta_slow")}
        fields.allow_only("rope.scaling.yarn_ext_factor", 1.0)
    elif FREQUENCIES in found.factors:
        rope |= _rope_of_factors(found.factors[FREQUENCIES], rope["rope_theta"], settings)
    if rope.get("rope_type") != "longrope":
        fields.allow_only("rope.scaling.attn_factor", 1.0)
    fields.allow_only("rope.scaling.yarn_attn_factor", 1.0)
    return {key: value for key, value in rope.items() if value is not None}


def _rope_of_factors(factors: tuple[float, ...], theta: float, settings: Settings) -> Settings:
    """Return the rotary embedding whose frequencies are divided by factors: Llama 3's where they are its."""
    most = max(factors)
    for length in (8192, *(2**power for power in range(4, 20))):
        rope = {"factor": most, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"rope_type": "llama3", "original_max_position_embeddings": length}
        if most > 1 and np.allclose(llama3_factors(rope, 2 * len(factors), theta), factors, rtol=1e-5, atol=0):
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
    """Return the numbers that divide the frequencies of Llama 3's rotary embedding (Grattafiori et al. 2024)."""
    lengths = 2 * math.pi * np.float64(theta) ** (np.arange(0, size, 2) / size)
    low, high, factor = (rope[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
    smooth = (rope["original_max_position_embeddings"] / lengths - low) / (high - low)
    factors = 1 / ((1 - smooth) / factor + smooth)
    return tuple(np.where(smooth > 1, 1.0, np.where(smooth < 0, factor, factors)).astype(np.float32).tolist())


def write_rope(settings: Settings, head_dim: int, metadata: Metadata) -> None:
    """Add the rotary embedding of `rope_parameters` to the metadata."""
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
        factor = rope.get("attention_factor") or _usual_factor(settings, original)
        values |= {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": factor}
        values["rope.scaling.original_context_length"] = original
    elif kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": rope.get("factor")}
    elif kind != "default":
        raise ConversionError(f"save_gguf: llama.cpp has no rotary embedding like rope_type={kind}.")
    if kind == "yarn":
        values["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
        values |= {f"rope.scaling.yarn_{word}": rope.get(word) for word in ("beta_fast", "beta_slow")}


def _usual_factor(settings: Settings, original: int | None) -> float | None:
    """Return the factor of queries and keys that transformers computes of two lengths where no other is given."""
    length = settings.get("max_position_embeddings")
    if type(length) is not int or type(original) is not int or original < 2:
        return None
    return math.sqrt(1 + math.log(length / original) / math.log(original)) if length > original else 1.0


# --- masks ------------------------------------------------------------------------------------------------------------


def read_masks(found: Found, settings: Settings, period: int, window: int | None = None) -> None:
    """Read `sliding_window` and `layer_types`: every `period`-th layer has none, unless the file says otherwise."""
    fields, layers = found.fields, settings["num_hidden_layers"]
    size = fields.integer(WINDOW, window, least=0) or None
    local = fields.content.get(PATTERN)
    if isinstance(local, list):
        fields.take(PATTERN)
    else:
        every = fields.integer(PATTERN, period)
        local = [index % max(1, every) < every - 1 for index in range(layers)]
    if len(local) < layers or not all(isinstance(each, bool | int) for each in local):
        raise fields.error(f"{PATTERN}={abbreviate(local)} must be a list of a flag for each of {layers} layers.")
    kinds = ["sliding_attention" if size and flag else "full_attention" for flag in local[:layers]]
    settings |= {"sliding_window": size, "layer_types": kinds}


def write_masks(settings: Settings, metadata: Metadata, period: int) -> None:
    """Add the masks to the metadata: layers by name only where they are unusual."""
    local = [kind == "sliding_attention" for kind in settings.get("layer_types") or ()]
    metadata.values[WINDOW] = settings.get("sliding_window") or None
    if local != [index % period < period - 1 for index in range(len(local))]:
        metadata.values[PATTERN] = local
