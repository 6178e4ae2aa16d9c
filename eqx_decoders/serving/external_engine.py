"""Decoders for engines that own the memory: a list of caches goes in and comes out, one for each attention layer."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from eqx_decoders.blocks.stack import segments
from eqx_decoders.errors import ConfigError, check
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.engine_owned import ExternalAttention, ExternalKVCache
from eqx_decoders.layers.cache.kv_cache import KVShape, is_memory
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import AnyArray


def external_layers(model: Decoder) -> list[KVShape]:
    """Of each layer that has a cache, in order: heads, features, and (`slots` of rings) how far it looks back.

    Raises ConfigError for models whose layers remember what engines have no caches for.
    """
    shapes = []
    for index, block in enumerate(model.config.blocks):
        for name, shape in block.memory(1 << 30).items():
            rule = "engines with caches of their own have none for it"
            if not isinstance(shape, KVShape) or shape.by_slot:
                raise ConfigError(f"layer {index} ({name}) remembers a {type(shape).__name__}: {rule}.")
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
    """One call over the tokens of many sequences, side by side.

    **Arguments:**

    - `caches`: one for each of `external_layers(model)`.
    - `tokens`, `positions`: of each token its id, and where it stands in its own sequence.
    - `metadata`: what the engine's attention has to know of this call.
    - `attention`: the engine's: `(cache, query, key, value, metadata, sinks, call) -> (cache, out)`.

    **Returns:**

    The caches with these tokens, and the stream after the last block, of which `external_logits` makes logits.
    """
    count = len(external_layers(model))
    check(len(caches) == count, f"caches has {len(caches)} entries: the model has {count} layers with a cache.")
    check(model.config.media is None, "run_with_caches takes text alone, and the model has encoders.")
    memories, begin = [], 0
    order: list[list[int]] = []
    for unit, repeats in segments(model.config.blocks):
        blocks = []
        names = [list(block.memory(1 << 30)) for block in unit]
        step, place = sum(map(len, names)), 0
        for each in names:
            found = {}
            for name in each:
                layers = [begin + place + step * repeat for repeat in range(repeats)]
                found[name] = ExternalKVCache(
                    caches=tuple(caches[layer] for layer in layers),
                    metadata=metadata,
                    attention=attention,
                    first=layers[0],
                    step=step,
                )
                order.append(layers)
                place += 1
            blocks.append(found)
        memories.append(tuple(blocks))
        begin += step * repeats
    cache = Cache(segments=tuple(memories), length=jnp.zeros((1,), jnp.int32))
    rows = jnp.asarray(tokens)[None], jnp.asarray(positions)[None]
    hidden, proposal, _ = model.replace(scan=False, remat=None).propose(*rows, cache=cache)
    done = cache.commit(proposal.entries, proposal.positions)
    new = list(caches)
    for layers, memory in zip(order, jax.tree.leaves(done.segments, is_leaf=is_memory), strict=True):
        for layer, each in zip(layers, memory.caches, strict=True):
            new[layer] = each
    return new, hidden[0]


def external_logits(model: Decoder, hidden: Float[Array, "tokens embed"]) -> Float32[Array, "tokens vocab"]:
    """Logits of some tokens' streams."""
    return model.logits(hidden[None])[0]
