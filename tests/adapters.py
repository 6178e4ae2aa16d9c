"""Models with low-rank pairs, for tests."""

import functools

import jax
import numpy as np

import eqx_decoders as ed
from eqx_decoders.sharding.axes import named_leaves, replaced
from eqx_decoders.training.lora import add_lora
from eqx_decoders.training.settings.lora import LoRAConfig
from tests.models import rich_decoder


EVERYWHERE = ("*.query", "*.key", "*.value", "*.qkv", "*.out", "*.gate", "*.up", "*.gate_up", "*.down")
CONFIG = LoRAConfig(rank=4, alpha=6.0, targets=EVERYWHERE)
RICH = rich_decoder(4)


@functools.cache
def shapes(lora: LoRAConfig = CONFIG, config: ed.DecoderConfig = RICH, **placed) -> ed.Decoder:
    """A model with pairs, of shapes alone: nothing to compile."""
    return add_lora(ed.abstract(config, **placed), lora, key=jax.random.key(0))


def pairs(tree) -> dict[str, jax.Array]:
    """The factors of all pairs by path."""
    return {name: leaf for name, leaf in named_leaves(tree).items() if name.endswith((".lora_a", ".lora_b"))}


def trained(model: ed.Decoder, lora: LoRAConfig = CONFIG) -> ed.Decoder:
    """The model with pairs that are not zero, the same on every mesh."""
    generator, target = np.random.default_rng(7), shapes(lora, model.config, layout=model.execution.layout)
    leaves = {
        name: jax.device_put(generator.normal(0.0, 0.3, leaf.shape).astype(leaf.dtype), leaf.sharding)
        for name, leaf in pairs(target).items()
    }
    own = named_leaves(model)
    return replaced(target, {name: own.get(name.removesuffix(".base")) for name in named_leaves(target)} | leaves)
