"""Selection biases of routers, which move against the load of each expert at every step."""

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
    """Move the selection biases of the model by `rate * sign(mean count - count)` (Wang et al. 2024).

    They rise where an expert had too few tokens. With exactly the mean load, or if nothing was routed, they stay.

    **Arguments:**

    - `model`: a decoder.
    - `stats`: `Output.stats`, or the sum of its `routing` over the microbatches of a step: one sign for all of them.
    - `rate`: size of the move; None for each router's own `bias_update_rate`.
    """
    layout, routing = model.execution.layout, stats.routing if isinstance(stats, BlockStats) else stats
    check(routing is not None, "update_router_bias needs the routing statistics of a model with experts.")
    assert routing is not None
    for find, rows in _routers(model):
        router, counts = find(model), routing.counts[rows]
        if router.selection_bias is not None and counts.shape[0] > 0:
            step = router.config.bias_update_rate if rate is None else rate
            moved = _moved(router.selection_bias, counts[:, : router.selection_bias.shape[-1]], step)
            moved = layout.constrain_weight(moved, "layers experts")
            model = eqx.tree_at(lambda m, find=find: find(m).selection_bias, model, moved)
    return model


def _routers(model: Decoder) -> Iterator[tuple[Callable[[Decoder], Router], slice]]:
    """Yield a function that finds each stack of routers in the model, and the rows of the statistics of its layers."""
    begin = 0
    for index, layers in enumerate(model.scanned_layers):
        positions = [i for i, block in enumerate(layers.unit) if isinstance(block.mlp, Experts)]
        end = begin + layers.repeats * len(positions)
        for nth, position in enumerate(positions):
            yield partial(_router_at, index=index, position=position), slice(begin + nth, end, len(positions))
        begin = end
    if model.mtp is not None and isinstance(model.mtp.depth.block.mlp, Experts):
        yield _router_ahead, slice(begin, None)


def _router_at(model: Decoder, *, index: int, position: int) -> Router:
    return cast(Experts, model.scanned_layers[index].unit[position].mlp).router


def _router_ahead(model: Decoder) -> Router:
    assert model.mtp is not None
    return cast(Experts, model.mtp.depth.block.mlp).router


def _moved(bias: Array, counts: Array, rate: float | Array) -> Float[Array, "layers experts"]:
    move = rate * jnp.sign(jnp.mean(counts, axis=-1, keepdims=True) - counts)
    return bias + move.astype(bias.dtype)
