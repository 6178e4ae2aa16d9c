"""QK-clip (Kimi K2, 2025): scales down the weights of heads whose attention scores exceed a threshold."""

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
    """Scale the weights of each head so that its largest score would have been at most `threshold`.

    With gamma = min(1, threshold / largest score), the rotated part of queries is multiplied by gamma, and the other
    part of queries and keys by sqrt(gamma), because all heads share the rotated part of the keys. Each head of each
    layer has its own gamma. (MaxText uses the largest score over all scanned layers.)

    Raises ConfigError if there are no largest scores, or if a weight has adapters or is quantized.

    **Arguments:**

    - `model`: a decoder with latent attention.
    - `stats`: `Output.stats` of a model with `attention_maxima`, or their `max_scores`.
    - `threshold`: threshold of the scaled scores.
    """
    maxima = stats.max_scores if isinstance(stats, BlockStats) else stats
    check(maxima is not None, "qk_clip: stats has no largest scores. Use model.replace(attention_maxima=True).")
    assert maxima is not None
    gammas = jnp.where(maxima > threshold, threshold / (maxima + 1e-6), 1.0)
    axis_names = axes(model)
    for path, find, rows in latent_attentions(model):
        if rows.start >= gammas.shape[0]:
            break  # the statistics are those of a call without multi-token prediction
        layer = find(model)
        gamma = gammas[rows, None, : layer.config.num_heads, None]
        nope, plain = layer.config.nope_dim, jnp.ones_like(gamma)
        name = "query" if layer.query_up is None else "query_up"
        factors = {name: (jnp.sqrt(gamma), gamma), "kv_up": (jnp.sqrt(gamma), plain)}
        for name, (first, second) in factors.items():
            weight = getattr(layer, name)
            check(
                eqx.is_array(weight),
                f"qk_clip: {path}.{name} has an adapter or is quantized. Merge the adapter first.",
            )
            feature = jnp.arange(weight.shape[-1]).reshape(1, 1, 1, -1)
            scaled = (weight.astype(jnp.float32) * jnp.where(feature < nope, first, second)).astype(weight.dtype)
            scaled = model.execution.layout.constrain_weight(scaled, " ".join(axis_names[f"{path}.{name}"]))
            model = eqx.tree_at(lambda m, find=find, name=name: getattr(find(m), name), model, scaled)
    return model


def clipped_weights(model: Decoder) -> list[str]:
    """Return the paths of the weights that `qk_clip` scales."""
    paths = []
    for path, find, _ in latent_attentions(model):
        paths += [f"{path}.kv_up", f"{path}.query" if find(model).query_up is None else f"{path}.query_up"]
    return paths


def latent_attentions(model: Decoder) -> Iterator[tuple[str, Callable[[Decoder], LatentAttention], slice]]:
    """Yield the path of each latent attention, a function that returns it, and its rows in the statistics."""
    begin = 0
    for index, layers in enumerate(model.scanned_layers):
        positions = [i for i, block in enumerate(layers.unit) if isinstance(block.mixer, LatentAttention)]
        end = begin + layers.repeats * len(positions)
        for nth, position in enumerate(positions):
            path = f"scanned_layers.{index}.unit.{position}.mixer"
            yield path, partial(_mixer_at, index=index, position=position), slice(begin + nth, end, len(positions))
        begin = end
    if model.mtp is not None and isinstance(model.mtp.depth.block.mixer, LatentAttention):
        yield "mtp.depth.block.mixer", _mtp_mixer, slice(begin, None)


def _mixer_at(model: Decoder, *, index: int, position: int) -> LatentAttention:
    return cast(LatentAttention, model.scanned_layers[index].unit[position].mixer)


def _mtp_mixer(model: Any) -> LatentAttention:
    return cast(LatentAttention, model.mtp.depth.block.mixer)
