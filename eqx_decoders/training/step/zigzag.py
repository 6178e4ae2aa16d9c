"""Zigzag order of the tokens of a sequence, which balances the work of context-parallel devices."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, Shaped

from eqx_decoders.context import Execution
from eqx_decoders.data.batch import Batch
from eqx_decoders.errors import check
from eqx_decoders.layers.attention.context_parallel import context_parts, zigzag
from eqx_decoders.layers.base import LayerConfig
from eqx_decoders.layers.embedding.embedding import document_positions
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.sharding.layout import Layout


def in_context_order(
    config: DecoderConfig,
    execution: Execution,
    batch: Batch,
    *others: PyTree[Shaped[Array, "batch length ..."] | None],
) -> tuple[Any, ...]:
    """Return a batch without its signals, and other arrays of its tokens, in the order of `Execution.context_order`.

    Positions and targets are computed first, so layers that depend only on positions, and sums over targets, do not
    change. Raises ConfigError for a model with other layers, and for spans and images, which depend on the order.
    """
    if execution.context_order == "plain":
        return dataclasses.replace(batch, signals=None), *others
    ordered = next(_order_dependent_layers(config, execution), None)
    check(
        ordered is None,
        f"Execution.context_order='zigzag' needs layers that depend only on positions, but {ordered} depends on the "
        "order of tokens.",
    )
    check(batch.spans is None, "Execution.context_order='zigzag' does not support Batch.spans: set it to None.")
    check(batch.media is None, "Execution.context_order='zigzag' does not support Batch.media: set it to None.")
    order = row_order(execution, batch.tokens.shape[1])
    if order is None:
        return dataclasses.replace(batch, signals=None), *others
    tokens, segments, positions = (
        None if x is None else jnp.asarray(x) for x in (batch.tokens, batch.segment_ids, batch.positions)
    )
    positions, segments = document_positions(positions, segments, batch.tokens.shape)

    def reordered(x: Any) -> Any:
        return None if x is None else constrain_rows(x[:, order], execution.layout)

    batch = Batch(tokens=reordered(tokens), segment_ids=reordered(segments), positions=reordered(positions))
    return batch, *jax.tree.map(reordered, others)


def constrain_rows(x: Shaped[Array, "batch length *rest"], layout: Layout) -> Shaped[Array, "batch length *rest"]:
    """Constrain the sharding of values of tokens. Trailing axes are not split."""
    if x.ndim == 2:
        return layout.constrain(x, "batch length")
    flat = x.reshape(*x.shape[:2], -1)  # trailing axes have no name
    return jax.vmap(lambda values: layout.constrain(values, "batch length"), in_axes=2, out_axes=2)(flat).reshape(
        x.shape
    )


def row_order(execution: Execution, length: int) -> np.ndarray | None:
    """Return the index of the token at each position of a row; None: the order is unchanged."""
    parts = 1 if execution.context_order == "plain" else context_parts(execution.layout)
    return None if parts == 1 else zigzag(length, parts)


def _order_dependent_layers(config: DecoderConfig, execution: Execution) -> Iterator[str]:
    """Yield the layers whose output depends on the order of tokens, even if their positions are given."""
    blocks = {f"DecoderConfig.blocks[{index}]": block for index, block in enumerate(config.blocks)}
    if config.mtp is not None:
        blocks["DecoderConfig.mtp.block"] = config.mtp.block
    for place, block in blocks.items():
        for name, layer in block.branches().items():
            if _needs_order(layer, execution):
                yield f"{place}.{name} ({type(layer).__name__})"


def _needs_order(layer: LayerConfig, execution: Execution) -> bool:
    if isinstance(layer, ExpertsConfig):  # with a capacity, experts drop the last tokens of a sequence
        return layer.capacity_factor is not None and execution.experts in ("auto", "capacity")
    return layer.depends_on_token_order
