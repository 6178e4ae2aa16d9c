"""Conversion between residual streams on a separate axis, concatenated streams, and a single stream."""

from jaxtyping import Array, Float

from eqx_decoders.blocks.residual.base import Residual, StreamMapping
from eqx_decoders.context import ForwardContext


def flat_streams(x: Float[Array, "batch length streams embed"]) -> Float[Array, "batch length stream_embed"]:
    """Concatenate the residual streams along the last axis."""
    return x.reshape(*x.shape[:2], -1)


def split_streams(
    x: Float[Array, "batch length stream_embed"], embed_dim: int
) -> Float[Array, "batch length streams embed"]:
    """Return concatenated residual streams on a separate axis (the inverse of `flat_streams`)."""
    return x.reshape(*x.shape[:2], -1, embed_dim)


def reduce_streams(residual: Residual, streams: StreamMapping | None, x: Array, ctx: ForwardContext) -> Array:
    """Reduce the residual streams to one stream, with the weights of `streams` unless these are None.

    The streams of `x` are on a separate axis, or concatenated as in `flat_streams`.
    """
    if residual.streams > 1 and x.ndim == 3:
        x = split_streams(x, x.shape[2] // residual.streams)
    return residual.reduce(x) if streams is None else streams.reduce(x, ctx)
