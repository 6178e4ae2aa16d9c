"""Model summary: its weights, those that a token uses, and the bytes of a cache for each token and each sequence."""

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


_LONG = 2**20  # tokens: more than any window


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Sizes of a model.

    **Arguments:**

    - `name`: of the model; None for another configuration.
    - `parameters`: number of weights; tied ones count once, those of multi-token prediction too.
    - `active_parameters`: the same without the experts that a token does not use, and without lookup tables other than
        the embedding.
    - `bytes_per_token`: growth of a cache of `dtype` with each token.
    - `bytes_per_sequence`: constant size of a cache for each sequence: windows, and states of recurrent layers.
    - `layers`: number of layers with each kind of mixer.
    - `dtype`: of the cache.
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
            f"active; a cache in {self.dtype} holds {self.bytes_per_token / 1e3:,.1f} kB a token and "
            f"{self.bytes_per_sequence / 1e6:,.1f} MB a sequence; layers: {kinds}"
        )


def describe_model(model: str | DecoderConfig, *, dtype: DTypeLike = jnp.bfloat16) -> ModelInfo:
    """Return the sizes of a model, by its name or its configuration, with a cache of `dtype`. No weight is made."""
    config = get_config(model) if isinstance(model, str) else model
    tree, kinds = abstract(config), collections.Counter(_kind(block) for block in config.blocks)
    shorter, longer = (_cache_bytes(config, length, dtype) for length in (_LONG, 2 * _LONG))
    per_token = (longer - shorter) // _LONG
    return ModelInfo(
        name=model if isinstance(model, str) else None,
        parameters=sum(math.prod(leaf.shape) for leaf in stored_leaves(tree).values()),
        active_parameters=sum(active_parameters(tree).values()),
        bytes_per_token=per_token,
        bytes_per_sequence=shorter - per_token * _LONG,
        layers=dict(kinds),
        dtype=str(np.dtype(dtype)),
    )


def active_parameters(model: Decoder) -> dict[str, int]:
    """Return, by path, the number of a weight's parameters that a token uses: experts count by use.

    Lookup tables other than the embedding, of which a token reads some rows, count as 0.
    """
    words, counts = axes(model), {}
    for name, leaf in stored_leaves(model).items():
        first, *others = *(word for word in words[name] if word != "layers"), ""  # a number of each layer has no other
        size = math.prod(leaf.shape)
        if first == "experts" and len(others) > 1:
            size = size * _experts_per_token(name, model.config) // leaf.shape[words[name].index("experts")]
        counts[name] = 0 if first in ("vocab", "rows", "table_parts") and name != "embedding.table" else size
    return counts


def _experts_per_token(name: str, config: DecoderConfig) -> int:
    """Return the number of experts that a token uses in the layers of the weight `name`."""
    part, index, _, place, *_ = (*name.split("."), "", "", "")
    if part == "scanned_layers":
        block = find_repeats(config.blocks)[int(index)][0][int(place)]
    else:
        block = config.blocks[-1] if config.mtp is None else config.mtp.block
    return getattr(block.mixer if ".mixer." in name else block.mlp, "num_experts_per_token", 0)


def _cache_bytes(config: DecoderConfig, length: int, dtype: DTypeLike) -> int:
    leaves = jax.tree.leaves(abstract_cache(config, 1, length, dtype=dtype))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _kind(block: BlockConfig) -> str:
    """Return the names of a block's mixers: of their configurations' classes, with their windows if they have one."""

    def name(mixer: Any) -> str:
        size = getattr(getattr(mixer, "mask", None), "size", None)
        return type(mixer).__name__.removesuffix("Config") + (f" (window {size:,})" if size else "")

    return " and ".join(map(name, block.mixers())) or "none"
