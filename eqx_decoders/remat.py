"""Rematerialization: the intermediate values of a block that are saved for its gradient, as data.

A block runs inside `jax.checkpoint`. Its layers name values that may be saved with `save(x, "query_proj")`; a `Remat`
lists the names that stay on the device and those that are sent to the host. All else is computed again in the backward
pass.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Literal

from jax import checkpoint_policies
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from eqx_decoders.errors import CheckedFields, OneOf, check, check_word


NAMES: dict[str, str] = {
    "decoder_layer_input": "the residual stream that enters a block",
    "query_proj": "queries, ready for the kernel (normalised, rotated, scaled)",
    "key_proj": "keys, ready for the kernel",
    "value_proj": "values",
    "qkv_proj": "output of a fused query-key-value projection",
    "query_wa_proj": "projection into the latent of queries, before its norm",
    "mla_q": "latent of queries, normalised",
    "kv_wa_proj": "projection into the latent and the rotary key of keys and values",
    "mla_kv": "latent of keys and values, normalised",
    "context": "output and log-sum-exp inside an attention kernel",
    "attention_out": "output of the attention, before gate and output projection",
    "out_proj": "output of the attention's output projection",
    "mlpwi": "input projection of a plain or fused MLP, before the activation",
    "mlpwi_0": "gate projection of an MLP, before the activation",
    "mlpwi_1": "up projection of an MLP",
    "mlpwo": "down projection of an MLP",
    "moe_routing_maps": "where each token's rows go when they are sorted by expert",
    "moe_x_sorted": "tokens sorted by expert",
    "moe_mlpwi_0": "gate projection of experts, before the activation; it is called mlpwi_0, too",
    "moe_mlpwi_1": "up projection of experts; it is called mlpwi_1, too",
    "moe_mlpwo": "down projection of experts, not yet added up; it is called mlpwo, too",
    "quantization": "a weight rounded to 8 bits for its product, and its scales (`LowPrecision`)",
    "cast_weight": "a weight cast to the compute dtype; saving it keeps a copy of the weight for the backward pass",
}


def save(x: Array, name: str) -> Array:
    """Return `x` under a name that a `Remat` can list."""
    return checkpoint_name(x, check_word("save: name", name, NAMES))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remat(CheckedFields):
    """Intermediate values of a block that are saved for its gradient; all others are computed again.

    **Arguments:**

    - `save`: values saved on the device.
    - `offload`: values saved in the host's memory.
    """

    save: tuple[Annotated[str, OneOf(tuple(NAMES))], ...] = ()
    offload: tuple[Annotated[str, OneOf(tuple(NAMES))], ...] = ()

    def __post_init__(self):
        super().__post_init__()
        both = sorted(set(self.save) & set(self.offload))
        check(not both, f"Remat: {', '.join(both)} can't be both saved and offloaded. Name each once.")

    def policy(self) -> Callable[..., bool]:
        """Return the `jax.checkpoint` policy."""
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

# MaxText's policies under their names there; None is no checkpoint at all.
POLICIES: dict[str, Remat | None] = {
    "none": None,
    "full": Remat(),
    "minimal": Remat(save=_MINIMAL),
    "minimal_with_context": Remat(save=(*_MINIMAL, "context")),
    "minimal_flash": Remat(save=(*_MINIMAL, "context")),
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
    "minimal_flash",
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
    """Return the `Remat` of a name; other values (MaxText's `custom`, None) pass through."""
    if isinstance(policy, str):
        return POLICIES[check_word("remat", policy, POLICIES)]
    return policy
