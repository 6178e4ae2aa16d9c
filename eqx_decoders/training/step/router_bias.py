"""Selection biases of routers, which are updated after each step to balance the load of the experts."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from eqx_decoders.blocks.stats import BlockStats
from eqx_decoders.errors import check
from eqx_decoders.layers.moe.experts import Experts
from eqx_decoders.layers.moe.router import Router, RoutingStats
from eqx_decoders.model.decoder import Decoder


def update_router_bias(
    model: Decoder, stats: BlockStats | RoutingStats, rate: float | Float[Array, ""] | None = None
) -> Decoder:
    """Add `rate * sign(mean count - count)` to the selection biases of the model (Wang et al. 2024).

    The biases of experts with fewer tokens than the mean increase. Raises ConfigError if `stats` has no routing.

    **Arguments:**

    - `model`: a decoder.
    - `stats`: `Output.stats`, or the sum of its `routing` over the microbatches of a step.
    - `rate`: size of the update. None: `bias_update_rate` of each router.
    """
    layout, routing = model.execution.layout, stats.routing if isinstance(stats, BlockStats) else stats
    check(routing is not None, "update_router_bias: stats must have the routing statistics of a model with experts.")
    assert routing is not None
    for find, rows in _routers(model):
        router, counts = find(model), routing.counts[rows]
        if router.selection_bias is not None and counts.shape[0] > 0:
            step = router.config.bias_update_rate if rate is None else rate
            bias = _updated(router.selection_bias, counts[:, : router.selection_bias.shape[-1]], step)
            bias = layout.constrain_weight(bias, "layers experts")
            model = eqx.tree_at(lambda m, find=find: find(m).selection_bias, model, bias)
    return model


def _routers(model: Decoder) -> Iterator[tuple[Callable[[Decoder], Router], slice]]:
    """Yield, for each stack of routers, a function that returns it, and the rows of its layers in the statistics."""
    begin = 0
    for index, layers in enumerate(model.scanned_layers):
        positions = [i for i, block in enumerate(layers.unit) if isinstance(block.mlp, Experts)]
        end = begin + layers.repeats * len(positions)
        for nth, position in enumerate(positions):
            yield partial(_router_at, index=index, position=position), slice(begin + nth, end, len(positions))
        begin = end
    if model.mtp is not None and isinstance(model.mtp.depth.block.mlp, Experts):
        yield _mtp_router, slice(begin, None)


def _router_at(model: Decoder, *, index: int, position: int) -> Router:
    return cast(Experts, model.scanned_layers[index].unit[position].mlp).router


def _mtp_router(model: Decoder) -> Router:
    assert model.mtp is not None
    return cast(Experts, model.mtp.depth.block.mlp).router


def _updated(bias: Array, counts: Array, rate: float | Array) -> Float[Array, "layers experts"]:
    update = rate * jnp.sign(jnp.mean(counts, axis=-1, keepdims=True) - counts)
    return bias + update.astype(bias.dtype)
