"""What configurations mean where they leave something out: a changed default would change all who rely on it."""

import dataclasses
import importlib
import inspect
import math
import pkgutil

import equinox as eqx

from eqx_decoders import layers
from eqx_decoders.blocks.residual.residual import Sequential
from eqx_decoders.core.sampling import GenerationConfig
from eqx_decoders.layers.attention.kernels.registry import no_gradients, no_refusal
from eqx_decoders.layers.mask import Bidirectional, Causal, Chunked, SlidingWindow
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import LayerNormConfig, RMSNormConfig
from eqx_decoders.layers.rope import Rope


ROPE = dict(theta=10_000.0, fraction=1.0, pairing="half", sections=(), interleaved_sections=True)
# Of each class the defaults that are not None, False or 0.
DEFAULTS = {
    "QKNorm": dict(norm=RMSNormConfig(), over="head", when="before_rope"),
    "QueryTemperature": dict(scale=0.1, length=8192, offset=1),
    "Alibi": dict(max_exponent=8.0, scale=1.0),
    "AttentionConfig": dict(mask=Causal(), rope=Rope(), key_scale=1.0, value_scale=1.0),
    "CompressedAttentionConfig": dict(rope=Rope(pairing="interleaved"), norm=RMSNormConfig()),
    "CompressedIndexerConfig": dict(num_heads=64, head_dim=128, top_k=512),
    "CompressionConfig": dict(norm=RMSNormConfig()),
    "KVShape": dict(values=True),
    "CacheFormat": dict(dtype="bfloat16", scale_over="head_dim"),
    "PageConfig": dict(page_size=64),
    "ExternalCall": dict(writes=True),
    "SinusoidalPositions": dict(max_timescale=10_000.0),
    "EngramConfig": dict(
        streams=1, num_heads=8, head_dim=1280, vocab_bases=(226_240, 226_240), taps=4, eps=1e-6, hash_bits=31,
        bias=True, row_multiple=1,
    ),
    "PerLayerEmbeddingConfig": dict(norm=RMSNormConfig(), init_std=0.02),
    "PerLayerInputConfig": dict(activation="gelu_tanh"),
    "AltUp": dict(streams=4, inner=Sequential(), norm=RMSNormConfig(), read_scale=True),
    "Laurel": dict(rank=64, norm=RMSNormConfig()),
    "HyperConnections": dict(streams=4, mixing="sinkhorn", iterations=20, norm=RMSNormConfig(), eps=1e-6),
    "ExpertsConfig": dict(router=RouterConfig(), activation="silu", activation_scale=1.0, gated=True),
    "Kernel": dict(
        masks=(Causal, SlidingWindow, Chunked, Bidirectional), soft_cap=True, segments=True, spans=True,
        selection=True, unequal_value_dim=True, float16=True, platforms=("cpu", "gpu", "tpu"),
        lse=True, gradients=no_gradients, refusal=no_refusal,
    ),
    "AttentionCall": dict(platform="cpu", needs_lse=True),
    "AttentionOptions": dict(platform="cpu", needs_lse=True),
    "GatedDeltaNetConfig": dict(taps=4, norm=RMSNormConfig(), gate_activation="silu"),
    "Mamba1Config": dict(taps=4, taps_bias=True),
    "DifferentialAttentionConfig": dict(norm=RMSNormConfig(scale=False)),
    "DynamicMaskConfig": dict(top_k=2048),
    "LightningAttentionConfig": dict(norm=RMSNormConfig(), rate_layers=1),
    "MLSTMConfig": dict(gate_cap=15.0, eps=1e-6, norm_eps=1e-6),
    "RGLRUConfig": dict(taps=4, activation="gelu_tanh"),
    "Mamba2Config": dict(taps=4, taps_bias=True, norm="after_gate", eps=1e-5, in_scales=(1.0,) * 5),
    "SharedTransformerConfig": dict(norm=RMSNormConfig(), count=1),
    "AidedMixerConfig": dict(norm=RMSNormConfig()),
    "NamedMixer": dict(input_scale=1.0, output_scale=1.0),
    "GatedConvolutionConfig": dict(taps=3),
    "KimiDeltaAttentionConfig": dict(taps=4, norm=RMSNormConfig()),
    "LocalAttentionConfig": dict(chunk=12, left=13, soft_cap=50.0, distances="shifted")
    | dict(key_scale=math.log2(1 + math.e)),
    "LightConvolutionConfig": dict(taps=5, activation="silu", gate="sigmoid", norm=RMSNormConfig()),
    "RelativeAttentionConfig": dict(distances=1000, reach=500),
    "BlockSelection": dict(size=1024, top_k=8, local_blocks=1),
    "BlockIndexerConfig": dict(
        size=1024, top_k=8, local_blocks=1, num_heads=4, head_dim=128, norm=RMSNormConfig(),
    ),
    "PooledIndexerConfig": dict(
        size=1024, top_k=8, local_blocks=1, num_heads=4, head_dim=128, norm=RMSNormConfig(),
    ),
    "IndexerConfig": dict(num_heads=64, head_dim=128, top_k=2048, norm=LayerNormConfig(eps=1e-6), pairing="half"),
    "LatentAttentionConfig": dict(mask=Causal(), rope=Rope(), norm=RMSNormConfig(), kv_scale=1.0),
    "MLPConfig": dict(activation="silu", activation_scale=1.0, gated=True, gate_scale=1.0, out_scale=1.0),
    "RMSNormConfig": dict(eps=1e-6, scale=True),
    "LayerScaleConfig": dict(start=1.0),
    "LayerNormConfig": dict(eps=1e-5, scale=True, bias=True),
    "Rope": ROPE,
    "LinearRope": ROPE,
    "LongRope": ROPE | dict(factor=1.0),
    "NTKRope": ROPE,
    "DynamicRope": ROPE,
    "AxialRope": ROPE,
    "ProportionalRope": ROPE | dict(factor=1.0),
    "Llama3Rope": ROPE
    | dict(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192),
    "YarnRope": ROPE | dict(beta_fast=32.0, beta_slow=1.0, truncate=True),
    "RouterConfig": dict(
        score="softmax", order="select_first", num_groups=1, groups_per_token=1, group_score="max", scaling_factor=1.0,
        balance_form="switch",
    ),
    "ExtraLayerConfig": dict(scale=1.0),
    "BlockConfig": dict(residual=Sequential(), pre_layers=(), post_layers=()),
    "Sequential": dict(residual_scale=1.0),
    "PostNorm": dict(norm=LayerNormConfig()),
    "HeadTransformConfig": dict(activation="gelu"),
    "Weighted": dict(keep=(), add=()),
    "DecoderConfig": dict(embedding_scale=1.0, logit_divisor=1.0, init_std=0.02),
    "Provenance": dict(settings="{}", generation=GenerationConfig()),
    "GenerationConfig": dict(stop_ids=()),
    "Sample": dict(temperature=1.0),
    "StepConfig": dict(gradient_accumulation_steps=1, fused_loss=True),
    "OptimizerConfig": dict(
        name="adamw", learning_rate=3e-4, schedule="cosine", decay_fraction=0.2, min_lr_ratio=0.1, weight_decay=0.1,
        trainable=("*",),
        no_decay=("*norm*", "*bias*", "*sink", "*scale", "embedding.*", "positions.*", "*.table", "*.a_log", "*.skip",
            "*.decay", "*.bonus", "*_mix", "*.alpha_?", "*.lora_magnitude"),
       
        beta1=0.9,
        beta2=0.95, eps=1e-8, momentum=0.95, max_grad_norm=1.0, lr_multipliers=(), moments_dtype="float32",
    ),
}  # fmt: skip


def test_every_default_is_the_one_that_is_written_down():
    modules = [module.name for module in pkgutil.walk_packages(layers.__path__, "eqx_decoders.layers.")]
    modules += [
        f"eqx_decoders.{name}"
        for name in (
            "blocks.residual.residual",
            "blocks.residual.hyper_connections",
            "blocks.residual.altup",
            "blocks.residual.laurel",
            "blocks.block",
            "model.decoder_config",
            "model.provenance",
            "core.sampling",
            "training.step.step_config",
            "training.optimizer.optimizer",
        )
    ]
    found = {}
    for module in map(importlib.import_module, modules):
        for name, kind in inspect.getmembers(module, inspect.isclass):
            own = kind.__module__ == module.__name__ and not name.startswith("_")
            if own and dataclasses.is_dataclass(kind) and not issubclass(kind, eqx.Module):
                found[name] = {field.name: field.default for field in dataclasses.fields(kind)}
    for name, defaults in found.items():
        defaults = {field: value for field, value in defaults.items() if value is not dataclasses.MISSING}
        assert {field: value for field, value in defaults.items() if value or value == ()} == DEFAULTS.get(name, {}), (
            name
        )
    assert DEFAULTS.keys() <= found.keys()
