"""Model summary: number of parameters, number of active parameters, and size of the cache."""

import collections
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.repeats import find_repeats
from eqx_decoders.families.registry import get_config
from eqx_decoders.model.caches import abstract_cache
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.init import abstract
from eqx_decoders.sharding.axes import axes, stored_leaves


_LONG = 2**20  # tokens; longer than any sliding window


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Number of parameters of a model, and size of its cache.

    **Arguments:**

    - `name`: name of the model; None for an unnamed configuration.
    - `parameters`: number of parameters, including multi-token prediction. Tied parameters count once.
    - `active_parameters`: number of parameters that a token uses; see `active_parameters`.
    - `bytes_per_token`: bytes that the cache needs for each token of a sequence.
    - `bytes_per_sequence`: bytes that the cache needs for a sequence of any length: rolling caches of sliding windows,
        and states of recurrent layers.
    - `layers`: number of layers, by kind of mixer.
    - `dtype`: data type of the cache.
    """

    name: str | None
    parameters: int
    active_parameters: int
    bytes_per_token: int
    bytes_per_sequence: int
    layers: dict[str, int]
    dtype: str

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.layers.items())
        return (
            f"{self.name or 'model'}: {self.parameters / 1e9:,.2f} B weights, {self.active_parameters / 1e9:,.2f} B "
            f"active; a cache in {self.dtype} holds {self.bytes_per_token / 1e3:,.1f} kB per token and "
            f"{self.bytes_per_sequence / 1e6:,.1f} MB per sequence; layers: {kinds}"
        )


def describe_model(model: str | DecoderConfig, *, dtype: DTypeLike = jnp.bfloat16) -> ModelInfo:
    """Return the size of a model and of its cache, without creating weights.

    `model`: name or configuration of the model. `dtype`: data type of the cache.
    """
    config = get_config(model) if isinstance(model, str) else model
    tree = abstract(config)
    short_bytes, long_bytes = (_cache_bytes(config, length, dtype) for length in (_LONG, 2 * _LONG))
    bytes_per_token = (long_bytes - short_bytes) // _LONG
    return ModelInfo(
        name=model if isinstance(model, str) else None,
        parameters=sum(math.prod(leaf.shape) for leaf in stored_leaves(tree).values()),
        active_parameters=sum(active_parameters(tree).values()),
        bytes_per_token=bytes_per_token,
        bytes_per_sequence=short_bytes - bytes_per_token * _LONG,
        layers=dict(collections.Counter(_kind(block) for block in config.blocks)),
        dtype=str(np.dtype(dtype)),
    )


def active_parameters(model: Decoder) -> dict[str, int]:
    """Return the number of parameters of each weight that a token uses, by the path of the weight.

    Experts count in proportion to the number of experts per token. Tables of n-grams and of per-layer embeddings count
    as 0, because a token only reads a few of their rows.
    """
    axis_names = axes(model)
    counts: dict[str, int] = {}
    for path, leaf in stored_leaves(model).items():
        own_axes = [axis for axis in axis_names[path] if axis != "layers"]
        first_axis = own_axes[0] if own_axes else ""
        size = math.prod(leaf.shape)
        if first_axis == "experts" and len(own_axes) > 1:
            size = size * _experts_per_token(path, model.config) // leaf.shape[axis_names[path].index("experts")]
        is_table = first_axis in ("vocab", "rows", "table_parts") and len(own_axes) > 1  # and not a bias of the head
        counts[path] = 0 if is_table and path != "embedding.table" else size
    return counts


def _experts_per_token(path: str, config: DecoderConfig) -> int:
    """Return the number of experts per token in the layers of the weight `path`."""
    part, index, _, position, *_ = (*path.split("."), "", "", "")
    if part == "scanned_layers":
        block = find_repeats(config.blocks)[int(index)][0][int(position)]
    else:
        block = config.blocks[-1] if config.mtp is None else config.mtp.block
    return getattr(block.mixer if ".mixer." in path else block.mlp, "num_experts_per_token", 0)


def _cache_bytes(config: DecoderConfig, length: int, dtype: DTypeLike) -> int:
    leaves = jax.tree.leaves(abstract_cache(config, 1, length, dtype=dtype))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _kind(block: BlockConfig) -> str:
    """Return the names of a block's mixers, with the size of the window of a windowed mixer."""

    def name(mixer: Any) -> str:
        size = getattr(getattr(mixer, "mask", None), "size", None)
        return type(mixer).__name__.removesuffix("Config") + (f" (window {size:,})" if size else "")

    return " and ".join(map(name, block.mixers())) or "none"
