"""Drafts by multi-token prediction: its depths run over new tokens, and guess those after the last of them."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eqx_decoders.blocks.stack import at_layer
from eqx_decoders.context import Context
from eqx_decoders.layers.cache import base as cache_base
from eqx_decoders.model.decoder import Decoder


class MTPDepthStates(eqx.Module):
    """Caches of the depths, and the stream of depth k at token p - k, p being the next position.

    Depth k can store token t once token t + k is known, so it is k - 1 tokens behind the first depth, whose entries
    are as many as the model's.
    """

    layer_caches: tuple[dict[str, Any], ...]
    last: tuple[Float[Array, "batch 1 embed"], ...]


def draft_with_mtp(
    model: Decoder,
    depths: MTPDepthStates,
    hidden: Float[Array, "batch length embed"],
    following: Int[Array, "batch length"],
    begin: Int[Array, "batch"],
    known: Int[Array, "batch"],
    *,
    cache_is_empty: bool = False,
) -> tuple[MTPDepthStates, Int[Array, "batch draft"]]:
    """Run all depths over new tokens and draft those after the last of them.

    **Arguments:**

    - `hidden`, `following`: the model's stream at each new token, and the token after it.
    - `begin`: the position of the first new token.
    - `known`: number of the new tokens that count.
    """
    assert model.mtp is not None
    length, depth_modules = hidden.shape[1], model.mtp.unstacked()
    stream, drafted, caches, last = model.mtp_input(hidden), [], [], []
    for index, cache in enumerate(depths.layer_caches):
        # it begins `index` tokens earlier, where the last call had to stop: stream and tokens are one longer
        if index > 0:
            stream = jnp.concatenate([depths.last[index - 1], stream], axis=1)
            following = _with_draft(following, known + index - 1, drafted[-1])
        offset = jnp.arange(length + index, dtype=jnp.int32)[None]
        positions = begin[:, None] - index + offset
        real = (positions >= 0) & (offset < known[:, None] + index) & (known[:, None] > 0)
        positions = jnp.where(real, positions, -1)
        ctx = Context(positions=positions, execution=model.execution, cache_is_empty=cache_is_empty)
        later = Context(positions=jnp.where(real, positions + index + 1, -1), execution=model.execution)
        past = None if cache_is_empty else cache_base.pasts(cache, at_layer(cache_base.slices(cache), 0))
        stream, entries, _ = depth_modules[index](stream, model.embed(following, later), ctx, past)
        # only entries whose input was no draft token
        stored = jnp.where(offset < known[:, None], positions, -1)
        caches.append(cache_base.commit(cache, jax.tree.map(lambda x: x[None], entries), stored))
        end = jnp.maximum(known - 1, 0)[:, None, None]
        tip = jnp.take_along_axis(stream, end + index, axis=1)
        drafted.append(jnp.argmax(model.logits(tip, depth=index + 1)[:, 0], axis=-1).astype(jnp.int32))
        last.append(jnp.take_along_axis(stream, end, axis=1))
    return MTPDepthStates(tuple(caches), tuple(last[: len(depths.last)])), jnp.stack(drafted, axis=1)


def _with_draft(
    following: Int[Array, "batch length"], where: Int[Array, "batch"], token: Int[Array, "batch"]
) -> Int[Array, "batch longer"]:
    """Insert the draft token after the tokens of each row."""
    longer = jnp.pad(following, ((0, 0), (0, 1)))
    index = jnp.arange(longer.shape[1], dtype=jnp.int32)[None]
    return jnp.where(index == where[:, None], token[:, None], longer)
