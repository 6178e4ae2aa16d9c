"""QK-clip (Kimi K2, 2025): smaller weights after a step for heads whose attention scores have grown too large."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from eqx_decoders.blocks.stats import BlockStats
from eqx_decoders.errors import check
from eqx_decoders.layers.attention.mla import LatentAttention
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import axes


def qk_clip(
    model: Decoder, stats: BlockStats | Float32[Array, "layers heads"], threshold: float | Float[Array, ""] = 100.0
) -> Decoder:
    """Scale the weights of each head so that its largest score would have been `threshold` at most.

    With gamma = min(1, threshold / largest score) the part of queries that is rotated is multiplied by gamma, the other
    part of queries and of keys by its root: the rotated part of the keys belongs to all heads. Each head of each layer
    has a gamma of its own (MaxText takes the largest score over all layers that it scans).

    **Arguments:**

    - `model`: a decoder with latent attention.
    - `stats`: `Output.stats` of a model with `attention_maxima`, or their `max_scores`.
    - `threshold`: of a score, scaled as attention scales it.
    """
    maxima = stats.max_scores if isinstance(stats, BlockStats) else stats
    check(maxima is not None, "qk_clip needs largest scores: model.replace(attention_maxima=True) tells them.")
    assert maxima is not None
    gammas = jnp.where(maxima > threshold, threshold / (maxima + 1e-6), 1.0)
    words = axes(model)
    for path, find, rows in latent_attentions(model):
        if rows.start >= gammas.shape[0]:
            break  # of a call without multi-token prediction
        layer = find(model)
        gamma = gammas[rows, None, : layer.config.num_heads, None]
        nope, plain = layer.config.nope_dim, jnp.ones_like(gamma)
        name = "query" if layer.query_up is None else "query_up"
        factors = {name: (jnp.sqrt(gamma), gamma), "kv_up": (jnp.sqrt(gamma), plain)}
        for name, (first, second) in factors.items():
            weight = getattr(layer, name)
            whole = eqx.is_array(weight)
            check(whole, f"qk_clip scales whole weights, but {path}.{name} is in parts: merge them first.")
            wide = jnp.arange(weight.shape[-1]).reshape(1, 1, 1, -1)
            scaled = (weight.astype(jnp.float32) * jnp.where(wide < nope, first, second)).astype(weight.dtype)
            scaled = model.execution.layout.constrain_weight(scaled, " ".join(words[f"{path}.{name}"]))
            model = eqx.tree_at(lambda m, find=find, name=name: getattr(find(m), name), model, scaled)
    return model


def clipped_weights(model: Decoder) -> list[str]:
    """Return the paths of the weights that `qk_clip` scales."""
    paths = []
    for path, find, _ in latent_attentions(model):
        paths += [f"{path}.kv_up", f"{path}.query" if find(model).query_up is None else f"{path}.query_up"]
    return paths


def latent_attentions(model: Decoder) -> Iterator[tuple[str, Callable[[Decoder], LatentAttention], slice]]:
    """Yield the path of each stack of latent attention, a function that finds it, and the rows of its statistics."""
    begin = 0
    for index, layers in enumerate(model.scanned_layers):
        positions = [i for i, block in enumerate(layers.unit) if isinstance(block.mixer, LatentAttention)]
        end = begin + layers.repeats * len(positions)
        for nth, position in enumerate(positions):
            path = f"scanned_layers.{index}.unit.{position}.mixer"
            yield path, partial(_mixer_at, index=index, position=position), slice(begin + nth, end, len(positions))
        begin = end
    if model.mtp is not None and isinstance(model.mtp.depth.block.mixer, LatentAttention):
        yield "mtp.depth.block.mixer", _mixer_ahead, slice(begin, None)


def _mixer_at(model: Decoder, *, index: int, position: int) -> LatentAttention:
    return cast(LatentAttention, model.scanned_layers[index].unit[position].mixer)


def _mixer_ahead(model: Any) -> LatentAttention:
    return cast(LatentAttention, model.mtp.depth.block.mixer)
