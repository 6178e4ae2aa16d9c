"""The experts that tokens were sent to, as one program reports them and another replays them."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Integer

from eqx_decoders.context import Inputs
from eqx_decoders.errors import check
from eqx_decoders.layers.moe.experts import CHOICES, ExpertsConfig
from eqx_decoders.model.decoder_config import DecoderConfig


def expert_layers(config: DecoderConfig) -> list[ExpertsConfig]:
    """Return the layers with experts, in their order."""
    return [block.mlp for block in config.blocks if isinstance(block.mlp, ExpertsConfig)]


def check_choices(config: DecoderConfig, name: str) -> None:
    """Raise ConfigError for a model without experts; `name`: the setting that asks for their choice."""
    check(len(expert_layers(config)) > 0, f"{name} needs a model with experts: this one has none. Leave it out.")


def choices_of(config: DecoderConfig) -> tuple[int, int]:
    """Return the number of layers with experts, and the largest number of experts of a token."""
    layers = expert_layers(config)
    return len(layers), max(layer.num_experts_per_token for layer in layers)


def with_choices(inputs: Inputs | None, experts: Integer[Array, "batch length layers choices"]) -> Inputs:
    """Return the inputs of a model whose layers send tokens to these experts; -1: to the best ones of their router."""
    inputs = Inputs() if inputs is None else inputs
    return dataclasses.replace(inputs, by_layer=inputs.by_layer | {CHOICES: jnp.moveaxis(experts, 2, 0)})
