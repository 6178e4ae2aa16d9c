"""Rematerialization (gradient checkpointing): which intermediate values of a block are saved for the backward pass.

A block runs inside `jax.checkpoint`. Its layers name the values that may be saved: `save(x, "query_proj")`. A `Remat`
lists the names of values that are saved on the device, and the names of values that are offloaded to the host. All
other values are recomputed in the backward pass.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Literal

from jax import checkpoint_policies
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from eqx_decoders.errors import CheckedFields, OneOf, check, check_option


NAMES: dict[str, str] = {
    "decoder_layer_input": "residual stream that enters a block",
    "query_proj": "queries after normalization, rotary embedding and scaling",
    "key_proj": "keys after normalization and rotary embedding",
    "value_proj": "values",
    "qkv_proj": "output of a fused query-key-value projection",
    "query_wa_proj": "MLA: down projection of queries, before the norm",
    "mla_q": "MLA: latent of queries, normalized",
    "kv_wa_proj": "MLA: down projection to the latent of keys and values and to the rotary key",
    "mla_kv": "MLA: latent of keys and values, normalized",
    "context": "output and log-sum-exp of the attention kernel",
    "attention_out": "output of attention, before the gate and the output projection",
    "out_proj": "output of the attention's output projection",
    "mlpwi": "input projection of a plain or fused MLP, before the activation",
    "mlpwi_0": "gate projection of an MLP, before the activation",
    "mlpwi_1": "up projection of an MLP",
    "mlpwo": "down projection of an MLP",
    "moe_routing_maps": "indices that sort tokens by expert, and their inverse",
    "moe_x_sorted": "tokens sorted by expert",
    "moe_mlpwi_0": "gate projection of experts, before the activation; the name mlpwi_0 includes it",
    "moe_mlpwi_1": "up projection of experts; the name mlpwi_1 includes it",
    "moe_mlpwo": "down projection of experts, before the sum over experts; the name mlpwo includes it",
    "quantization": "weight quantized to 8 bits for a matrix product, and its scales (`LowPrecision`)",
    "cast_weight": "weight cast to the compute dtype; saving it stores a copy of the weight for the backward pass",
}


def save(x: Array, name: str) -> Array:
    """Return `x`, named by `jax.ad_checkpoint.checkpoint_name` so that a `Remat` can list it.

    Raises ConfigError if the name is not in `NAMES`.
    """
    return checkpoint_name(x, check_option("save: name", name, NAMES))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remat(CheckedFields):
    """Intermediate values of a block that are saved for the backward pass. All other values are recomputed.

    **Arguments:**

    - `save`: names (see `NAMES`) of values that are saved on the device.
    - `offload`: names of values that are saved in host memory.
    """

    save: tuple[Annotated[str, OneOf(tuple(NAMES))], ...] = ()
    offload: tuple[Annotated[str, OneOf(tuple(NAMES))], ...] = ()

    def __post_init__(self):
        super().__post_init__()
        duplicates = sorted(set(self.save) & set(self.offload))
        check(
            not duplicates,
            f"Remat.save and Remat.offload must not share names, but both have {', '.join(duplicates)}. "
            "Remove each name from one of them.",
        )

    def policy(self) -> Callable[..., bool]:
        """Return a policy for `jax.checkpoint`."""
        if self.offload:
            return checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=self.save,
                names_which_can_be_offloaded=self.offload,
                offload_src="device",
                offload_dst="pinned_host",
            )
        return checkpoint_policies.save_only_these_names(*self.save)


_QKV = ("query_proj", "key_proj", "value_proj", "qkv_proj")
_WI = ("mlpwi_0", "mlpwi_1", "mlpwi")
_MINIMAL = (*_QKV, "out_proj", *_WI, "mlpwo")

# The names and contents are MaxText's `remat_policy` options, without `minimal_flash`, which is the same as
# `minimal_with_context`. None: no `jax.checkpoint`.
POLICIES: dict[str, Remat | None] = {
    "none": None,
    "full": Remat(),
    "minimal": Remat(save=_MINIMAL),
    "minimal_with_context": Remat(save=(*_MINIMAL, "context")),
    "minimal_with_quantization": Remat(save=(*_MINIMAL, "quantization")),
    "minimal_with_context_and_quantization": Remat(save=(*_MINIMAL, "context", "quantization")),
    "save_dot_with_context_except_mlp": Remat(save=(*_QKV, "out_proj", "context")),
    "save_dot_except_mlpwi": Remat(save=(*_QKV, "out_proj", "mlpwo")),
    "save_dot_except_mlp": Remat(save=(*_QKV, "out_proj")),
    "save_qkv_proj": Remat(save=_QKV),
    "qkv_proj_offloaded": Remat(offload=_QKV),
    "minimal_offloaded": Remat(offload=_MINIMAL),
    "save_out_proj": Remat(save=("out_proj",)),
}


RematName = Literal[
    "none",
    "full",
    "minimal",
    "minimal_with_context",
    "minimal_with_quantization",
    "minimal_with_context_and_quantization",
    "save_dot_with_context_except_mlp",
    "save_dot_except_mlpwi",
    "save_dot_except_mlp",
    "save_qkv_proj",
    "qkv_proj_offloaded",
    "minimal_offloaded",
    "save_out_proj",
]


def get_remat(policy: "str | Remat | None") -> Remat | None:
    """Return the `Remat` that a name of `POLICIES` stands for. A `Remat` (MaxText's `custom`) and None are returned.

    Raises ConfigError for an unknown name.
    """
    if isinstance(policy, str):
        return POLICIES[check_option("remat", policy, POLICIES)]
    return policy
