"""Attention with the kernel and on the mesh of a forward pass."""

import dataclasses
from typing import Literal

from eqx_decoders.context import Execution
from eqx_decoders.layers.attention.context_parallel import attend_on_mesh
from eqx_decoders.layers.attention.kernels.call import AttentionInputs, AttentionOptions
from eqx_decoders.layers.attention.kernels.common import Result
from eqx_decoders.layers.attention.kernels.registry import run_kernel
from eqx_decoders.sharding.chips import compute_capability


def run_attention(
    inputs: AttentionInputs,
    options: AttentionOptions,
    execution: Execution,
    *,
    key_axis: Literal["length", "slots"] = "length",
    contiguous: bool = False,
) -> Result:
    """Compute attention with the kernel and on the mesh of `execution`.

    **Arguments:**

    - `inputs`: arrays of the call, sharded over the mesh. Only the slots of a cache may have scales.
    - `options`: static options; platform and compute capability are filled in here.
    - `execution`: mesh, kernel, and form of context parallelism.
    - `key_axis`: `"length"` if keys are sharded like the tokens of a call; `"slots"` if they are sharded like the slots
        of a cache, which are not gathered.
    - `contiguous`: see `ForwardContext.documents_are_contiguous`. Without it, keys travel around the complete ring
        however small the window of the mask is.
    """
    layout = execution.layout
    options = dataclasses.replace(
        options,
        platform=layout.platform,
        compute_capability=compute_capability(layout.device),
        local=True,
    )
    if layout.single:
        return run_kernel(inputs, options, execution.attention)
    return attend_on_mesh(inputs, options, execution, key_axis=key_axis, contiguous=contiguous)
