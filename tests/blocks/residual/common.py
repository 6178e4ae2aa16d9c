"""A residual connection around layers that are plain functions."""

from eqx_decoders.blocks.residual.base import BlockLayer


def run_residual(residual, x, layers: list[BlockLayer], drop=lambda x: x, ctx=None):
    """Run a residual connection as a block does, with layers whose `layer` is a function of their input."""
    state = residual.begin(x)
    position = 0
    for layer in layers:
        y, coefficients = residual.read(state, layer._replace(position=position), ctx)
        state = residual.write(state, layer.layer(y), coefficients)
        position += not layer.reads_streams
    return residual.end(state, drop, ctx)
