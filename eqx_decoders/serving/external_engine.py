"""Decoders for engines with their own caches, such as vLLM: functions from a list of caches to updated caches."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from eqx_decoders.blocks.repeats import find_repeats
from eqx_decoders.errors import ConfigError, check
from eqx_decoders.layers.cache.base import is_layer_cache
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.engine_owned import ExternalAttention, ExternalKVCache
from eqx_decoders.layers.cache.kv_cache import KVShape
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import AnyArray


def external_layers(model: Decoder) -> list[KVShape]:
    """Return the shape of each layer's cache, in order: heads, features, and the attention window (`slots` if rolling).

    Raises ConfigError for models with layers that need another kind of cache than keys and values.
    """
    fixed_length = model.config.fixed_length
    check(
        fixed_length is None,
        f"the RoPE frequencies of this model depend on whether a text is longer than {fixed_length} tokens. This is "
        f"not "
        f"supported here, because external engines concatenate texts of different lengths into one row.",
    )
    shapes = []
    for index, block in enumerate(model.config.blocks):
        for name, shape in block.cache_shape(1 << 30).items():
            if isinstance(shape, dict) or not shape.by_token or shape.by_slot:
                raise ConfigError(
                    f"layer {index} ({name}) needs a cache of kind {type(shape).__name__}, but external engines "
                    f"support "
                    f"only keys and values (or latents) per token."
                )
            shapes.append(shape)
    return shapes


def run_with_caches(
    model: Decoder,
    caches: Sequence[Any],
    tokens: Int[AnyArray, "tokens"],
    positions: Int[AnyArray, "tokens"],
    metadata: Any,
    attention: ExternalAttention,
) -> tuple[list[Any], Float[Array, "tokens embed"]]:
    """Run a decoder over the tokens of many sequences, concatenated.

    **Arguments:**

    - `caches`: one cache for each of `external_layers(model)`.
    - `tokens`, `positions`: id of each token, and its position in its sequence.
    - `metadata`: metadata of this call, which is passed to `attention`.
    - `attention`: the engine's attention, `(cache, query, key, value, metadata, sinks, call) -> (cache, out)`.

    **Returns:**

    The updated caches, and the hidden states after the last block, for `external_logits`.
    """
    count = len(external_layers(model))
    check(
        len(caches) == count,
        f"run_with_caches: caches has {len(caches)} entries, but the model has {count} layers with a cache.",
    )
    check(
        model.config.media is None,
        "run_with_caches supports text only, but the model has encoders: load its decoder without encoders.",
    )
    layer_caches, begin = [], 0
    order: list[list[int]] = []  # indices into `caches` of each layer cache
    for unit, repeats in find_repeats(model.config.blocks):
        blocks = []
        names_by_block = [list(block.cache_shape(1 << 30)) for block in unit]
        step, offset = sum(map(len, names_by_block)), 0
        for names in names_by_block:
            block_caches = {}
            for name in names:
                layers = [begin + offset + step * repeat for repeat in range(repeats)]
                block_caches[name] = ExternalKVCache(
                    caches=tuple(caches[layer] for layer in layers),
                    metadata=metadata,
                    attention=attention,
                    first=layers[0],
                    layer_stride=step,
                )
                order.append(layers)
                offset += 1
            blocks.append(block_caches)
        layer_caches.append(tuple(blocks))
        begin += step * repeats
    cache = Cache(layer_caches=tuple(layer_caches), length=jnp.zeros((1,), jnp.int32))
    rows = jnp.asarray(tokens)[None], jnp.asarray(positions)[None]
    hidden, proposal, _ = model.replace(scan=False, remat=None).forward_uncommitted(*rows, cache=cache)
    committed = cache.commit(proposal.entries, proposal.positions)
    new_caches = list(caches)
    for layers, layer_cache in zip(order, jax.tree.leaves(committed.layer_caches, is_leaf=is_layer_cache), strict=True):
        for layer, layer_result in zip(layers, layer_cache.caches, strict=True):
            new_caches[layer] = layer_result
    return new_caches, hidden[0]


def external_logits(model: Decoder, hidden: Float[Array, "tokens embed"]) -> Float32[Array, "tokens vocab"]:
    """Return the logits of hidden states."""
    return model.logits(hidden[None])[0]
