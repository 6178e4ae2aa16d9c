"""A block's call inside `jax.checkpoint`: `Execution.remat` says which of its intermediate values are saved."""

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

    - `call`: `Block.__call__`, or another function with its arguments.
    - `prevent_cse`: keep XLA from merging the backward pass's computations with those of the forward pass.
    - `ordered`: for several blocks in the body of a loop, whose weights nothing else orders. The backward pass returns
        the gradient of `x` only once those of the weights are there, added up over devices: they might be left to the
        end of the loop, with what they are computed from for all blocks at once (gemma3-12b, six blocks: 38 instead of
        22 GB). On a mesh, weights are used once `x` is there: those of all blocks might be gathered at the beginning,
        one after the other with no product beside them. Not without remat, which would keep a copy of them.
    """
    remat, layout = get_remat(ctx.execution.remat), ctx.execution.layout
    together = _gradients_together if remat is None or layout.single else jax.lax.optimization_barrier

    def run(block, x, ctx, past, key):
        # inside of the checkpoint, so that the backward pass fetches the host's weights again
        block = to_device(block)
        if ordered:
            weights, rest = eqx.partition(block, eqx.is_inexact_array)
            weights, x = together((weights, x))
            block = eqx.combine(weights, rest)
        return call(block, x, ctx, past, key=key)

    if remat is None:
        return run
    # inside a scan nothing can be shared between the forward and the backward loop, so XLA need not be kept from it
    return eqx.filter_checkpoint(run, policy=remat.policy(), prevent_cse=prevent_cse)


@jax.custom_vjp
def _gradients_together(tree: Any) -> Any:
    return tree


_gradients_together.defvjp(lambda tree: (tree, None), lambda _, gradients: (jax.lax.optimization_barrier(gradients),))
