"""Balance of experts: losses and metrics of routing."""

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.moe.router import RoutingStats, load_balance_loss, router_z_loss
from eqx_decoders.model.decoder_config import DecoderConfig


def expert_configs(config: DecoderConfig) -> tuple[ExpertsConfig, ...]:
    """Return the configurations of the layers that have experts, in the order of `BlockStats.routing`.

    Layers of multi-token prediction come last. The statistics of a call without multi-token prediction omit them.
    """
    mtp_blocks = () if config.mtp is None else (config.mtp.block,) * config.mtp.num_depths
    return tuple(block.mlp for block in (*config.blocks, *mtp_blocks) if isinstance(block.mlp, ExpertsConfig))


def _configs_of(config: DecoderConfig, stats: RoutingStats) -> tuple[ExpertsConfig, ...]:
    """Return the configurations of the layers in `stats`."""
    return expert_configs(config)[: stats.tokens.shape[0]]


def has_routing_loss(config: DecoderConfig) -> bool:
    """Return whether routing adds a term to the training loss."""
    return any(layer.router.balance_loss > 0 or layer.router.z_loss > 0 for layer in expert_configs(config))


def routing_loss(config: DecoderConfig, stats: RoutingStats) -> Float32[Array, ""]:
    """Compute `balance_loss * load_balance_loss + z_loss * router_z_loss`, the mean over the layers with experts.

    The weights and the form of the balance loss are those of the `RouterConfig` of each layer.
    """
    routers = [layer.router for layer in _configs_of(config, stats)]
    balance = _per_layer(router.balance_loss for router in routers) * _balance_loss(config, stats)
    return jnp.mean(balance + _per_layer(router.z_loss for router in routers) * router_z_loss(stats))


def routing_report(config: DecoderConfig, stats: RoutingStats) -> dict[str, Float[Array, "layers"]]:
    """Compute the routing metrics of each layer with experts.

    `load` is the largest load divided by the mean load; 1 means balanced. `dropped` is the share of dropped choices.
    `balance_loss` (in the form of the router) and `router_z_loss` are not multiplied by their weights.
    `router_entropy` is in nats.
    """
    routed = jnp.maximum(jnp.sum(stats.counts, axis=-1), 1.0)
    sizes = _per_layer(layer.num_choices for layer in _configs_of(config, stats))
    return {
        "load": jnp.max(stats.counts, axis=-1) * sizes / routed,
        "dropped": stats.dropped / routed,
        "balance_loss": _balance_loss(config, stats),
        "router_z_loss": router_z_loss(stats),
        "router_entropy": stats.entropy / jnp.maximum(stats.tokens, 1.0),
    }


def relative_loads(config: DecoderConfig, counts: np.ndarray) -> dict[str, np.ndarray]:
    """Return the load of each expert divided by the mean load of its layer, by the index of the layer.

    `counts`: counts of `RoutingStats`, or their sum over steps. Layers of multi-token prediction are called `ahead 1`,
    `ahead 2`, ….
    """
    names = [str(index) for index, block in enumerate(config.blocks) if isinstance(block.mlp, ExpertsConfig)]
    names += [f"ahead {depth + 1}" for depth in range(len(expert_configs(config)) - len(names))]
    sizes = [layer.num_choices for layer in expert_configs(config)]
    rows = [np.asarray(row[:size], np.float64) for row, size in zip(counts, sizes, strict=False)]
    return {name: row / max(float(row.mean()), 1e-9) for name, row in zip(names, rows, strict=False)}


def _balance_loss(config: DecoderConfig, stats: RoutingStats) -> Float32[Array, "layers"]:
    """Compute the balance loss of each layer in the form of its router."""
    megatron = _per_layer(layer.router.balance_form == "megatron" for layer in _configs_of(config, stats))
    return jnp.where(megatron > 0, load_balance_loss(stats, "megatron"), load_balance_loss(stats))


def _per_layer(values: Iterable[float]) -> Float32[Array, "layers"]:
    return jnp.asarray(np.fromiter(values, np.float32))
