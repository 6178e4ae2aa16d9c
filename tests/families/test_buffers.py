"""Buffers of published models are not trained.

The list has the `nn.Buffer`s of transformers 5.23 that its checkpoints contain. Other buffers are computed from the
configuration.
"""

import jax
import pytest

from eqx_decoders.encoders.projector import ProjectionConfig, ProjectorConfig
from eqx_decoders.errors import ConfigError
from eqx_decoders.io.huggingface.load import abstract_hf
from eqx_decoders.sharding.axes import axes, buffers, frozen
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.step import Trainer
from tests.errors import refused
from tests.families.samples import FIXTURES


LAYER_SCALAR = {"residual.scale"}  # `layer_scalar`
CORRECTION_BIAS = {"router.selection_bias"}  # `e_score_correction_bias`, which is updated by its own rule
# indexers without a training loss
BLOCK_INDEXER = {"indexer.query", "indexer.key", "query_norm.scale", "key_norm.scale"}
COMPRESSED_INDEXER = {"indexer.query", "indexer.head_weight", "norm.scale"}
COMPRESSED_INDEXER |= {f"compressor.{part}" for part in ("key", "gate", "bias")}
CLIPS = {f"{side}_{end}" for side in ("input", "output") for end in ("min", "max")}
PUBLISHED = {
    **dict.fromkeys(("gemma4_dense", "gemma4_moe", "gemma4_small"), LAYER_SCALAR),
    "gemma4_audio": LAYER_SCALAR | CLIPS,
    "minimax": {"mixer.rates"},  # `slope_rate`
    "apertus": {"xielu.beta", "xielu.eps"},
    "diffllama": {"mixer.layer_number"},  # is computed
    **dict.fromkeys(("minimax_m2", "longcat_flash", "mimo_v2_flash"), CORRECTION_BIAS),
    "minimax_m3": CORRECTION_BIAS | BLOCK_INDEXER,
    "deepseek_v4": CORRECTION_BIAS | {"router.table"} | COMPRESSED_INDEXER,
    **dict.fromkeys(("deepseek3_groups", "deepseek_v32", "kimi_linear", "nemotron_h"), CORRECTION_BIAS),
    "nemotron_h_latent": CORRECTION_BIAS,
    **dict.fromkeys(
        ("dots1", "glm4_moe", "glm4v_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v3", "lfm2_moe", "solar_open"),
        CORRECTION_BIAS,
    ),
    **dict.fromkeys(
        ("afmoe", "ernie4_5_moe", "ernie4_5_moe_bias"), CORRECTION_BIAS
    ),  # a parameter without a gradient in transformers
}
DIRECTORIES = sorted(file.parent.name for file in FIXTURES.glob("*/config.json") if "fp8" not in file.parent.name)


def ending(path: str) -> str:
    last = path.split(".")[-1]
    return last if last in CLIPS else ".".join(path.split(".")[-2:])


@pytest.mark.slow(fast=("afmoe",))
@pytest.mark.parametrize("name", DIRECTORIES)
def test_buffers_are_not_trained_unless_named_explicitly(name):
    model = abstract_hf(FIXTURES / name)
    kept = buffers(model) | frozen(model)
    assert {ending(path) for path in kept} == PUBLISHED.get(name, set())
    trainer = Trainer.create(OptimizerConfig(trainable=("*", "scanned_layers.*")), model, steps=9)
    assert trainer.trainable == axes(model).keys() - kept
    if LAYER_SCALAR & PUBLISHED.get(name, set()):
        named = Trainer.create(OptimizerConfig(trainable=("*.residual.scale",)), model, steps=9)
        assert named.trainable == buffers(model)
        both = Trainer.create(OptimizerConfig(trainable=("*", "*.residual.scale")), model, steps=9)
        assert both.trainable == axes(model).keys() - frozen(model)
    elif kept:
        with refused(ConfigError, "*.selection_bias"):
            Trainer.create(OptimizerConfig(trainable=("*.selection_bias",)), model, steps=9)


def test_standardization_of_patches_is_a_buffer():
    """Gemma 4's `std_bias` and `std_scale`."""
    config = ProjectorConfig(standardize=True, layers=(ProjectionConfig(dim=8),))
    projector = jax.eval_shape(lambda key: config.build(8, key=key), jax.random.key(0))
    assert buffers(projector) == {"bias", "scale"} and buffers(projector, ("*scale",)) == {"bias"}
