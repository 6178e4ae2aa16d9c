"""Routing replay: pass the experts that one program selected for each token to the layers of another program."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Integer

from eqx_decoders.context import Inputs
from eqx_decoders.errors import check
from eqx_decoders.layers.moe.experts import CHOICES, ExpertsConfig
from eqx_decoders.model.decoder_config import DecoderConfig


def expert_layers(config: DecoderConfig) -> list[ExpertsConfig]:
    """Return the configurations of the layers with experts, in the order of the layers."""
    return [block.mlp for block in config.blocks if isinstance(block.mlp, ExpertsConfig)]


def check_choices(config: DecoderConfig, name: str) -> None:
    """Raise ConfigError for a model without experts; `name` is the setting that needs routing decisions."""
    check(
        len(expert_layers(config)) > 0,
        f"{name} needs a mixture-of-experts model, but this model has no experts. Leave {name} out.",
    )


def choices_shape(config: DecoderConfig) -> tuple[int, int]:
    """Return the number of layers with experts, and the maximum over these layers of the experts per token."""
    layers = expert_layers(config)
    return len(layers), max(layer.num_experts_per_token for layer in layers)


def with_choices(inputs: Inputs | None, experts: Integer[Array, "batch length layers choices"]) -> Inputs:
    """Return inputs that make layers send each token to these experts; -1: to the experts that the router selects."""
    inputs = Inputs() if inputs is None else inputs
    return dataclasses.replace(inputs, by_layer=inputs.by_layer | {CHOICES: jnp.moveaxis(experts, 2, 0)})
