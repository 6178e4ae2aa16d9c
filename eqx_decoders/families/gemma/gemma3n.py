"""Gemma 3n, text (Gemma Team 2025): several residual streams, gates of few features, embeddings for each layer.

Its layers alternate like Gemma 3's, and the last ones share the keys and values of earlier ones.
"""

import dataclasses
import functools
from typing import Any

from eqx_decoders.blocks.block import BlockConfig, ExtraLayerConfig
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.common import LAYER, DecoderSizes, cycle_masks, llama_weights
from eqx_decoders.families.gemma.altup import AltUp, Laurel
from eqx_decoders.families.gemma.text import (
    IGNORED_ACTIVATION_KEY,
    PER_LAYER_WEIGHTS,
    gemma_sizes,
    share_keys,
    shared_key_settings,
    unused_kv_tensors,
)
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import RopesByLayer
from eqx_decoders.families.settings_table import Check, Flag, Group, Integer, Number, Only, Rule, Values
from eqx_decoders.families.weight_rows import Weight, norm
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.embedding.per_layer_embedding import PerLayerEmbeddingConfig, PerLayerInputConfig
from eqx_decoders.layers.mask import Mask, SlidingWindow
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


_MOST_STREAMS = 16


def gemma3n(
    shape: DecoderSizes,
    *,
    masks: tuple[Mask, ...],
    residual: AltUp,
    per_layer: PerLayerEmbeddingConfig,
    num_kv_shared_layers: int,
    sparsity: tuple[float, ...],
    mlp_dims: tuple[int, ...] | None = None,
    rope: Rope = Rope(theta=1e6),
    local_rope: Rope = Rope(theta=10_000.0),
    logit_cap: float | None = 30.0,
) -> DecoderConfig:
    """Return a decoder of Gemma 3n blocks.

    **Arguments:**

    - `shape`: sizes of all layers.
    - `masks`, `sparsity`, `mlp_dims`: of each layer: its mask, the fraction of its gate that is cut off, and its MLP's
        features, by default those of `shape`.
    - `residual`, `per_layer`: `residual_of` and `per_layer_of` make them.
    - `num_kv_shared_layers`: number of last layers that read the keys and values of an earlier layer of their type.
    - `rope`, `local_rope`: rotary embeddings of layers without a window, and with one.
    - `logit_cap`: soft cap of the logits.
    """
    sharing, norm = share_keys(masks, num_kv_shared_layers), shape.norm
    taker = PerLayerInputConfig(features=per_layer.features, activation=shape.activation)

    def mixer(mask: Mask, shared_from: str | None) -> AttentionConfig:
        return shape.attention(
            mask=mask,
            rope=local_rope if isinstance(mask, SlidingWindow) else rope,
            query_scale=1.0,
            qk_norm=QKNorm(norm=norm),
            value_norm=None if shared_from else RMSNormConfig(eps=shape.eps, scale=False),
            kv_shared_from=shared_from,
        )

    def block(layer: int) -> BlockConfig:
        shared_as, shared_from = sharing[layer]
        sizes = shape if mlp_dims is None else dataclasses.replace(shape, mlp_dim=mlp_dims[layer])
        return sizes.block(
            mixer(masks[layer], shared_from),
            sizes.mlp(gate_sparsity=sparsity[layer]),
            norms="sandwich",
            residual=residual,
            post_layers=(ExtraLayerConfig(layer=taker, post_norm=norm),),
            shares_kv_as=shared_as,
        )

    options: dict[str, Any] = dict(embedding_scale=shape.embed_dim**0.5, logit_soft_cap=logit_cap)
    return shape.decoder(map(block, range(len(masks))), per_layer_embedding=per_layer, **options)


def residual_of(shape: DecoderSizes, *, streams: int = 4, rank: int = 64, read_scale: bool = True) -> AltUp:
    """Return the residual connection, of so many streams, with Laurel branches of this rank."""
    inner = Laurel(rank=rank, norm=shape.norm)
    return AltUp(streams=streams, inner=inner, norm=shape.norm, read_scale=read_scale)


def per_layer_of(shape: DecoderSizes, *, features: int = 256, vocab_size: int = 262_144) -> PerLayerEmbeddingConfig:
    """Return the embeddings for each layer; tokens that they lack count as the first."""
    options: dict[str, Any] = dict(unknown_token=0, norm=shape.norm, init_std=shape.init_std)
    return PerLayerEmbeddingConfig(features=features, vocab_size=vocab_size, **options)


# --- config.json ---


def _read_mlp_dims(fields: Fields, values: Values) -> Any:
    """Read the features of all MLPs, a number or a list, and leave the first one for the row of the sizes."""
    dims = fields.content.get("intermediate_size")
    if not isinstance(dims, list):
        return None
    dims = fields.numbers("intermediate_size")
    if not dims or min(dims) < 1:
        raise fields.error("intermediate_size must have a number above 0 for each layer.")
    fields.content["intermediate_size"] = dims[0]
    return tuple(dims)


def _same_mlp_dims(fields: Fields, values: Values) -> tuple[int, ...]:
    shape, dims = values["shape"], values["_mlp_dims"]
    return (shape.mlp_dim,) * shape.num_layers if dims is None else dims


def _read_sparsity(fields: Fields, values: Values) -> tuple[float, ...]:
    layers = values["shape"].num_layers
    default = [0.95 if layers > 10 and index < 10 else 0.0 for index in range(layers)]
    pattern = fields.take("activation_sparsity_pattern", default)
    good = isinstance(pattern, list) and all(isinstance(x, int | float) and 0 <= x < 1 for x in pattern)
    if not good or len(pattern) != layers:
        rule = f"must be a list of {layers} numbers of at least 0 and below 1, one for each layer"
        raise fields.error(f"activation_sparsity_pattern {rule}.")
    return tuple(map(float, pattern))


def _write_sparsity(config: DecoderConfig) -> dict[str, Any]:
    return {"activation_sparsity_pattern": [getattr(block.mlp, "gate_sparsity", 0.0) for block in config.blocks]}


def _write_mlp_dims(config: DecoderConfig) -> dict[str, Any]:
    return {"intermediate_size": [getattr(block.mlp, "mlp_dim", None) for block in config.blocks]}


def _maps(name: str, path: str) -> tuple[Weight, ...]:
    return tuple(
        Weight(f"model.{name}.{k}.weight", f"streams.{path}.{k}.kernel", "outer embed -> embed outer")
        for k in range(_MOST_STREAMS - 1)
    )


_PER_LAYER = (
    Integer("hidden_size_per_layer_input", "features", 256),
    Integer("vocab_size_per_layer_input", "vocab_size", 262_144),
)
_RESIDUAL = (
    Integer("altup_num_inputs", "streams", 4, least=2),
    Only("altup_active_idx", 0, written=True),
    Flag("altup_correct_scale", "read_scale", True),
    Integer("laurel_rank", "inner.rank", 64),
)
_ALTUP, _LAUREL = LAYER + "altup.", LAYER + "laurel."
FAMILY = Family(
    model_type="gemma3n_text",
    architecture="Gemma3nForCausalLM",
    settings=(
        Rule("_mlp_dims", _read_mlp_dims),
        gemma_sizes(),
        Rule("mlp_dims", _same_mlp_dims, _write_mlp_dims),
        Check(
            lambda values: len(values["mlp_dims"]) == values["shape"].num_layers,
            "intermediate_size must have a number for each layer.",
        ),
        Rule("sparsity", _read_sparsity, _write_sparsity),
        RopesByLayer(theta=1e6, local_theta=10_000.0, local_key="rope_local_base_freq"),
        cycle_masks(5, window=512, default=512),
        *shared_key_settings(15),
        Group("per_layer", per_layer_of, _PER_LAYER, uses=("shape",), path="per_layer_embedding"),
        Group("residual", residual_of, _RESIDUAL, uses=("shape",), path="residual"),
        Check(
            lambda values: values["residual"].streams <= _MOST_STREAMS,
            f"altup_num_inputs={{residual.streams}} must be at most {_MOST_STREAMS}.",
        ),
        Number("final_logit_softcapping", "logit_soft_cap", 30.0, null=None, name="logit_cap"),
    ),
    build=gemma3n,
    weights=(
        *llama_weights(norms="sandwich"),
        *PER_LAYER_WEIGHTS,
        *_maps("altup_projections", "first"),
        *_maps("altup_unembed_projections", "last"),
        *norm(_ALTUP + "router_norm", "residual.norm"),
        Weight(_ALTUP + "modality_router.weight", "residual.router", "streams embed -> streams embed"),
        Weight(_ALTUP + "prediction_coefs.weight", "residual.predict", "stream_pairs streams -> stream_pairs streams"),
        Weight(_ALTUP + "correction_coefs.weight", "residual.correct", "coefficients streams -> coefficients streams"),
        Weight(_ALTUP + "correct_output_scale", "residual.scale", "embed -> embed"),
        Weight(_LAUREL + "linear_left.weight", "residual.inner.left", "latent embed -> embed latent"),
        Weight(_LAUREL + "linear_right.weight", "residual.inner.right", "embed latent -> latent embed"),
        *norm(_LAUREL + "post_laurel_norm", "residual.inner.norm"),
    ),
    ignored_keys=IGNORED_ACTIVATION_KEY
    | {
        "altup_coef_clip": "bounds weights in training only",
        "altup_lr_multiplier": "of a rate of learning",
        "query_pre_attn_scalar": "transformers has the key in old files and never applies it",
    },
    ignored_tensors=unused_kv_tensors,
)

_shape = functools.partial(
    DecoderSizes, vocab_size=262_400, embed_dim=2048, num_heads=8, num_kv_heads=2, head_dim=256, tied=True,
    activation="gelu_tanh",
)  # fmt: skip
_E2B, _E4B = _shape(num_layers=30, mlp_dim=8192), _shape(num_layers=35, mlp_dim=16_384)


def _model(shape: DecoderSizes, num_kv_shared_layers: int) -> DecoderConfig:
    return gemma3n(
        shape,
        masks=shape.cycle_masks(512, 5),
        residual=residual_of(shape),
        per_layer=per_layer_of(shape),
        num_kv_shared_layers=num_kv_shared_layers,
        sparsity=tuple(0.95 if layer < 10 else 0.0 for layer in range(shape.num_layers)),
    )


MODELS = {"gemma3n-e2b": lambda: _model(_E2B, 10), "gemma3n-e4b": lambda: _model(_E4B, 15)}
