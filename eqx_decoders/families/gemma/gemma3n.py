"""The text decoder of Gemma 3n (Gemma Team 2025).

It has several residual streams (AltUp, Laurel), sparse MLP gates and per-layer embeddings. Layers with a sliding window
and layers with full attention alternate. The last layers read the keys and values of earlier layers.
"""

import dataclasses
import functools
from typing import Any

from eqx_decoders.blocks.block import BlockConfig, ExtraLayerConfig
from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.families.common import LAYER, DecoderSizes, cycle_mask_settings, llama_weights
from eqx_decoders.families.family import Family
from eqx_decoders.families.gemma.altup import AltUp, Laurel
from eqx_decoders.families.gemma.text import (
    IGNORED_ACTIVATION_KEY,
    PER_LAYER_WEIGHTS,
    gemma_sizes,
    share_keys,
    shared_key_settings,
    unused_kv_tensors,
)
from eqx_decoders.families.rope_config import RopesByLayer
from eqx_decoders.families.setting_rows import Check, Flag, Group, Integer, Number, Only, Rule, Values
from eqx_decoders.families.weight_rows import Weight, norm
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.embedding.per_layer_embedding import PerLayerEmbeddingConfig, PerLayerInputConfig
from eqx_decoders.layers.mask import Mask, SlidingWindow
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


_MAX_STREAMS = 16  # maximum number of residual streams whose tensors are mapped


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
    """Return the configuration of a decoder with Gemma 3n blocks.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `masks`: mask of each layer.
    - `residual`: residual streams; see `gemma3n_residual`.
    - `per_layer`: per-layer embeddings; see `gemma3n_per_layer_embedding`.
    - `num_kv_shared_layers`: number of layers at the end that read the keys and values of an earlier layer of the same
        type.
    - `sparsity`: for each layer, the fraction of the MLP gate's values that are set to zero.
    - `mlp_dims`: MLP width of each layer; None: `shape.mlp_dim`.
    - `rope`, `local_rope`: rotary embeddings of layers with full attention, and with a sliding window.
    - `logit_cap`: soft cap of the logits; None: no cap.
    """
    kv_sharing = share_keys(masks, num_kv_shared_layers)
    per_layer_input = PerLayerInputConfig(features=per_layer.features, activation=shape.activation)

    def attention(mask: Mask, shared_from: str | None) -> AttentionConfig:
        return shape.attention(
            mask=mask,
            rope=local_rope if isinstance(mask, SlidingWindow) else rope,
            query_scale=1.0,
            qk_norm=shape.qk_norm,
            value_norm=None if shared_from else RMSNormConfig(eps=shape.eps, scale=False),
            kv_shared_from=shared_from,
        )

    def block(layer: int) -> BlockConfig:
        shared_as, shared_from = kv_sharing[layer]
        sizes = shape if mlp_dims is None else dataclasses.replace(shape, mlp_dim=mlp_dims[layer])
        return sizes.block(
            attention(masks[layer], shared_from),
            sizes.mlp(gate_sparsity=sparsity[layer]),
            norms="sandwich",
            residual=residual,
            post_layers=(ExtraLayerConfig(layer=per_layer_input, post_norm=shape.norm),),
            shares_kv_as=shared_as,
        )

    return shape.decoder(
        map(block, range(len(masks))),
        per_layer_embedding=per_layer,
        embedding_scale=shape.embed_dim**0.5,
        logit_soft_cap=logit_cap,
    )


def gemma3n_residual(shape: DecoderSizes, *, streams: int = 4, rank: int = 64, read_scale: bool = True) -> AltUp:
    """Return the residual connection: AltUp, whose first stream has a Laurel branch.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `streams`: number of residual streams.
    - `rank`: rank of the Laurel branch.
    - `read_scale`: as in `AltUp`.
    """
    inner = Laurel(rank=rank, norm=shape.norm)
    return AltUp(streams=streams, inner=inner, norm=shape.norm, read_scale=read_scale)


def gemma3n_per_layer_embedding(
    shape: DecoderSizes, *, features: int = 256, vocab_size: int = 262_144
) -> PerLayerEmbeddingConfig:
    """Return the configuration of per-layer embeddings. Token ids outside of the table use the embedding of token 0."""
    return PerLayerEmbeddingConfig(
        features=features, vocab_size=vocab_size, unknown_token=0, norm=shape.norm, init_std=shape.init_std
    )


# --- config.json ---


def _read_mlp_dims(fields: Fields, values: Values) -> Any:
    """Return the MLP widths if `intermediate_size` is a list, or None if it is a number.

    A list is replaced by its first number, because the settings of the sizes read a number.
    """
    if not isinstance(fields.content.get("intermediate_size"), list):
        return None
    mlp_dims = fields.integers("intermediate_size")
    if not mlp_dims or min(mlp_dims) < 1:
        raise fields.error(
            f"intermediate_size={abbreviate(list(mlp_dims))} must be a number above 0, or a list with a number above 0 "
            "for each layer."
        )
    fields.content["intermediate_size"] = mlp_dims[0]
    return tuple(mlp_dims)


def _fill_mlp_dims(fields: Fields, values: Values) -> tuple[int, ...]:
    shape = values["shape"]
    mlp_dims = values["_mlp_dims"]
    return (shape.mlp_dim,) * shape.num_layers if mlp_dims is None else mlp_dims


def _read_sparsity(fields: Fields, values: Values) -> tuple[float, ...]:
    num_layers = values["shape"].num_layers
    default = [0.95 if num_layers > 10 and layer < 10 else 0.0 for layer in range(num_layers)]
    pattern = fields.take("activation_sparsity_pattern", default)
    is_valid = isinstance(pattern, list) and all(isinstance(x, int | float) and 0 <= x < 1 for x in pattern)
    if not is_valid or len(pattern) != num_layers:
        raise fields.error(
            f"activation_sparsity_pattern={abbreviate(pattern)} must be a list of {num_layers} numbers, one for each "
            "layer, at least 0 and below 1."
        )
    return tuple(map(float, pattern))


def _write_sparsity(config: DecoderConfig) -> dict[str, Any]:
    return {"activation_sparsity_pattern": [getattr(block.mlp, "gate_sparsity", 0.0) for block in config.blocks]}


def _write_mlp_dims(config: DecoderConfig) -> dict[str, Any]:
    return {"intermediate_size": [getattr(block.mlp, "mlp_dim", None) for block in config.blocks]}


def _stream_projections(name: str, path: str) -> tuple[Weight, ...]:
    return tuple(
        Weight(f"model.{name}.{stream}.weight", f"streams.{path}.{stream}.kernel", "outer embed -> embed outer")
        for stream in range(_MAX_STREAMS - 1)
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
_ALTUP = LAYER + "altup."
_LAUREL = LAYER + "laurel."
FAMILY = Family(
    model_type="gemma3n_text",
    architecture="Gemma3nForCausalLM",
    settings=(
        Rule("_mlp_dims", _read_mlp_dims),
        gemma_sizes(),
        Rule("mlp_dims", _fill_mlp_dims, _write_mlp_dims),
        Check(
            lambda values: len(values["mlp_dims"]) == values["shape"].num_layers,
            "intermediate_size must have as many numbers as num_hidden_layers={shape.num_layers}.",
        ),
        Rule("sparsity", _read_sparsity, _write_sparsity),
        RopesByLayer(theta=1e6, local_theta=10_000.0, local_key="rope_local_base_freq"),
        cycle_mask_settings(5, window=512, default=512),
        *shared_key_settings(15),
        Group("per_layer", gemma3n_per_layer_embedding, _PER_LAYER, uses=("shape",), path="per_layer_embedding"),
        Group("residual", gemma3n_residual, _RESIDUAL, uses=("shape",), path="residual"),
        Check(
            lambda values: values["residual"].streams <= _MAX_STREAMS,
            f"altup_num_inputs={{residual.streams}} must be at most {_MAX_STREAMS}, the largest number of residual "
            "streams that can be loaded.",
        ),
        Number("final_logit_softcapping", "logit_soft_cap", 30.0, null=None, name="logit_cap"),
    ),
    build=gemma3n,
    weights=(
        *llama_weights(norms="sandwich"),
        *PER_LAYER_WEIGHTS,
        *_stream_projections("altup_projections", "first"),
        *_stream_projections("altup_unembed_projections", "last"),
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
        "altup_coef_clip": "only clips weights during training",
        "altup_lr_multiplier": "only scales a learning rate",
        "query_pre_attn_scalar": "older configurations contain this key, but transformers does not use it",
    },
    ignored_tensors=unused_kv_tensors,
)

_shape = functools.partial(
    DecoderSizes, vocab_size=262_400, embed_dim=2048, num_heads=8, num_kv_heads=2, head_dim=256, tied=True,
    activation="gelu_tanh",
)  # fmt: skip
_E2B = _shape(num_layers=30, mlp_dim=8192)
_E4B = _shape(num_layers=35, mlp_dim=16_384)


def _model(shape: DecoderSizes, num_kv_shared_layers: int) -> DecoderConfig:
    return gemma3n(
        shape,
        masks=shape.cycle_masks(512, 5),
        residual=gemma3n_residual(shape),
        per_layer=gemma3n_per_layer_embedding(shape),
        num_kv_shared_layers=num_kv_shared_layers,
        sparsity=tuple(0.95 if layer < 10 else 0.0 for layer in range(shape.num_layers)),
    )


MODELS = {"gemma3n-e2b": lambda: _model(_E2B, 10), "gemma3n-e4b": lambda: _model(_E4B, 15)}
