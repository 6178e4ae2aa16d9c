"""Settings and tensors of routers and experts."""

from collections.abc import Mapping
from typing import Any

from eqx_decoders.errors import ConversionError
from eqx_decoders.families.config_reader import Fields, activation_name
from eqx_decoders.families.weight_rows import Weight, sharing
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.model.decoder_config import DecoderConfig


IGNORED_ROUTER_KEYS: dict[str, str] = dict.fromkeys(
    ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha", "seq_aux"),
    "routers are trained with it; it changes no output",
)


def experts_of(config: DecoderConfig) -> ExpertsConfig:
    """Return the experts of the first layer that has any; ConversionError where none has."""
    experts = next((block.mlp for block in config.blocks if isinstance(block.mlp, ExpertsConfig)), None)
    if experts is None:
        raise ConversionError("DecoderConfig.blocks: no layer has experts.")
    return experts


def dense_dim(config: DecoderConfig, default: int) -> int:
    """Return the width of the MLP in layers without experts; `default` where all have them."""
    return next((block.mlp.mlp_dim for block in config.blocks if isinstance(block.mlp, MLPConfig)), default)


def need_experts(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    """Return the configuration; raise ConversionError where no layer has experts."""
    if not sparse_layers(config):
        raise fields.error("no layer has experts: check the settings that say which layers do.")
    return config


def sparse_layers(config: DecoderConfig) -> list[int]:
    """Return the layers that have experts, counted from 0."""
    return [index for index, block in enumerate(config.blocks) if isinstance(block.mlp, ExpertsConfig)]


def separate_experts(
    prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Weight, ...]:
    """Return the rows of a router, and of experts that are stored one by one as matrices `[out, in]`."""
    expert = prefix + "experts.{expert}."
    return (
        Weight(prefix + "gate.weight", "mlp.router.kernel", "experts embed -> embed experts"),
        Weight(expert + f"{gate}.weight", "mlp.gate", "mlp embed -> embed mlp"),
        Weight(expert + f"{up}.weight", "mlp.up", "mlp embed -> embed mlp"),
        Weight(expert + f"{down}.weight", "mlp.down", "embed mlp -> mlp embed"),
    )


def fused_experts(
    prefix: str,
    router: str = "gate",
    gate_up: str = "experts mlp embed",
    down: str = "experts embed mlp",
    within: str | None = None,
) -> tuple[Weight, ...]:
    """Return the rows of a router, and of experts that share tensors with these dimensions.

    Gates and up projections are halves of `mlp` or, with `within="mlp"`, alternate.
    """
    pattern, axis = f"{gate_up} -> experts embed mlp", gate_up.split().index("mlp")
    return (
        Weight(prefix + f"{router}.weight", "mlp.router.kernel", "experts embed -> embed experts"),
        *sharing(prefix + "experts.gate_up_proj", ("mlp.gate", pattern), ("mlp.up", pattern), axis=axis, within=within),
        Weight(prefix + "experts.down_proj", "mlp.down", f"{down} -> experts mlp embed"),
    )


def are_transposed(tensors: Mapping[str, Any]) -> bool:
    """Return True if fused experts are stored as matrices `[in, out]`, not `[out, in]`, by their shapes."""
    for name, down in tensors.items():
        gate_up = tensors.get(name.removesuffix("down_proj") + "gate_up_proj")
        if gate_up is not None and len(down.shape) == 3:
            return gate_up.shape[1:] == (down.shape[2], 2 * down.shape[1])
    return False


def write_experts(config: DecoderConfig, *, count: str, width: str) -> dict[str, Any]:
    """Return the number, width and activation of experts, and how many a token uses, under transformers' keys."""
    experts = experts_of(config)
    return {
        count: experts.num_experts,
        width: experts.mlp_dim,
        "num_experts_per_tok": experts.num_experts_per_token,
        "hidden_act": activation_name(experts.activation),
    }
