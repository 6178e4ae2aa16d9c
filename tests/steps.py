"""What a training step computes, for laws about how it is run: gradients, loss and statistics, and small blocks."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp

import eqx_decoders as ed
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.step_config import StepConfig
from tests.models import EMBED, VOCAB


NORM = RMSNormConfig()
ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope())
ROUTED = ExpertsConfig(
    num_experts=4,
    num_experts_per_token=2,
    mlp_dim=8,
    router=RouterConfig(score="sigmoid", order="score_first", selection_bias=True, balance_loss=0.1, z_loss=0.01),
)
SPARSE = ed.BlockConfig(mixer=ATTENTION, mlp=ROUTED, pre_mixer_norm=NORM, pre_mlp_norm=NORM)
DENSE = dataclasses.replace(SPARSE, mlp=MLPConfig(mlp_dim=24))


def decoder(*blocks: ed.BlockConfig, **changes) -> ed.DecoderConfig:
    return ed.DecoderConfig(vocab_size=VOCAB, embed_dim=EMBED, blocks=blocks, final_norm=NORM, **changes)


@eqx.filter_jit
def copied(tree):
    """Arrays for a step to take, by one program for all of them."""
    return jax.tree.map(jnp.copy, tree)


@eqx.filter_jit
def _step_of(trainer: Trainer, model: ed.Decoder, batch: ed.Batch, key):
    return trainer._gradient(model, batch, key)


def results(model: ed.Decoder, batch: ed.Batch, key=None, **step):
    """Gradients, loss and statistics of a training step."""
    trainer = Trainer.create(OptimizerConfig(), model, steps=1, config=StepConfig(**step))
    return _step_of(trainer, model, batch, key)
