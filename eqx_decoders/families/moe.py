"""What the sparse families share: settings and names of routers and experts."""

from typing import Any

from eqx_decoders.block import BlockConfig
from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.errors import ConversionError
from eqx_decoders.families.family import Weight
from eqx_decoders.families.fields import Fields
from eqx_decoders.layers.experts import ExpertsConfig
from eqx_decoders.layers.mlp import MLPConfig


HARMLESS: dict[str, str] = dict.fromkeys(
    ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha", "seq_aux"),
    "routers are trained with it; it changes no output",
)


def experts_of(config: DecoderConfig) -> ExpertsConfig:
    """The experts of the first layer that has any; ConversionError where none has."""
    found = next((block.mlp for block in config.blocks if isinstance(block.mlp, ExpertsConfig)), None)
    if found is None:
        raise ConversionError("DecoderConfig.blocks: no layer has experts.")
    return found


def dense_of(config: DecoderConfig) -> MLPConfig | None:
    """The MLP of the first layer without experts; None where all have them."""
    return next((block.mlp for block in config.blocks if isinstance(block.mlp, MLPConfig)), None)


def need_experts(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    """The configuration, if any layer has experts: else it belongs to a family without them."""
    if not any(is_sparse(block) for block in config.blocks):
        raise fields.error("no layer has experts: check the settings that say which layers do.")
    return config


def is_sparse(block: BlockConfig) -> bool:
    """Whether a layer has experts."""
    return isinstance(block.mlp, ExpertsConfig)


def separate_experts(prefix: str, gate: str, up: str, down: str, router: str) -> tuple[Weight, ...]:
    """Rows of experts that are stored one by one, as matrices `[out, in]`."""
    own = prefix + "experts.{expert}."
    return (
        Weight(prefix + f"{router}.weight", "mlp.router.kernel", "experts embed -> embed experts"),
        Weight(own + f"{gate}.weight", "mlp.gate", "mlp embed -> embed mlp"),
        Weight(own + f"{up}.weight", "mlp.up", "mlp embed -> embed mlp"),
        Weight(own + f"{down}.weight", "mlp.down", "embed mlp -> mlp embed"),
    )


def fused_experts(prefix: str) -> tuple[Weight, ...]:
    """Rows of the same experts in one tensor, as transformers holds them and can store them."""
    both = "experts (part mlp) embed -> part experts embed mlp"
    return (
        Weight(prefix + "gate.weight", "mlp.router.kernel", "experts embed -> embed experts"),
        Weight(prefix + "experts.gate_up_proj", "mlp.gate", both, part=(0, 2)),
        Weight(prefix + "experts.gate_up_proj", "mlp.up", both, part=(1, 2)),
        Weight(prefix + "experts.down_proj", "mlp.down", "experts embed mlp -> experts mlp embed"),
    )


def shared_mlp(prefix: str) -> tuple[Weight, ...]:
    """Rows of the MLP that all tokens use."""
    return (
        Weight(prefix + "gate_proj.weight", "mlp.shared.gate", "mlp embed -> embed mlp"),
        Weight(prefix + "gate_proj.bias", "mlp.shared.gate_bias", "mlp -> mlp"),
        Weight(prefix + "up_proj.weight", "mlp.shared.up", "mlp embed -> embed mlp"),
        Weight(prefix + "up_proj.bias", "mlp.shared.up_bias", "mlp -> mlp"),
        Weight(prefix + "down_proj.weight", "mlp.shared.down", "embed mlp -> mlp embed"),
        Weight(prefix + "down_proj.bias", "mlp.shared.down_bias", "embed -> embed"),
    )


def write_experts(experts: ExpertsConfig, count: str) -> dict[str, Any]:
    """How many experts there are, and how many a token uses."""
    return {count: experts.num_experts, "num_experts_per_tok": experts.num_experts_per_token}
