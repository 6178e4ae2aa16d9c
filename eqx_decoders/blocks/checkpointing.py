"""Rematerialization of a block with `jax.checkpoint`; `Execution.remat` selects the values that are saved."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from eqx_decoders.context import ForwardContext
from eqx_decoders.remat import get_remat
from eqx_decoders.sharding.offload import to_device


def checkpointed(call: Callable[..., Any], ctx: ForwardContext, *, prevent_cse: bool, ordered: bool = False) -> Any:
    """Return a function `(block, x, ctx, past, key)` that runs a block under the remat policy of `ctx`.

    **Arguments:**

    - `call`: `Block.__call__`, or another function with the same arguments.
    - `prevent_cse`: prevent XLA from undoing remat by common-subexpression elimination between the forward and the
        backward pass. Not needed in a scan, because forward and backward pass are separate loops there.
    - `ordered`: make XLA process the blocks in order. Set it for several blocks in the body of one loop.

        Backward pass: the gradient of `x` is returned only after the reduced gradients of the weights. Otherwise XLA
        may postpone the weight gradients of all blocks to the end of the loop body, and keep the inputs of all of them
        (gemma3-12b, six blocks: 38 GB instead of 22 GB).

        Forward pass on a mesh with remat: weights are used only after `x` is computed. Otherwise XLA may all-gather the
        weights of all blocks first, not overlapped with any product. Without remat this barrier is left out, because it
        would keep a copy of the gathered weights.
    """
    remat = get_remat(ctx.execution.remat)
    layout = ctx.execution.layout
    barrier = _gradient_barrier if remat is None or layout.single else jax.lax.optimization_barrier

    def run(block, x, ctx, past, key):
        # inside the checkpoint, so that the backward pass transfers weights from the host again
        block = to_device(block)
        if ordered:
            weights, others = eqx.partition(block, eqx.is_inexact_array)
            weights, x = barrier((weights, x))
            block = eqx.combine(weights, others)
        return call(block, x, ctx, past, key=key)

    if remat is None:
        return run
    return eqx.filter_checkpoint(run, policy=remat.policy(), prevent_cse=prevent_cse)


@jax.custom_vjp
def _gradient_barrier(tree: Any) -> Any:
    """Return the tree unchanged; its gradients become available only all together."""
    return tree


_gradient_barrier.defvjp(lambda tree: (tree, None), lambda _, gradients: (jax.lax.optimization_barrier(gradients),))
