"""Blocks and settings that several Gemma families share."""

import re
from collections.abc import Iterable
from typing import Any

from eqx_decoders.families.common import (
    LAYER,
    LAYER_TYPES,
    DecoderSizes,
    NormPlaces,
    attentions,
    cycle_masks,
    decoder_sizes,
)
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Check, Group, Integer, Number, Values
from eqx_decoders.families.weight_rows import Weight, norm_weights
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


IGNORED_ACTIVATION_KEY = {"hidden_act": "transformers reads hidden_activation"}


def gemma_decoder(
    shape: DecoderSizes, mixers: Iterable[AttentionConfig], logit_cap: float | None, norms: NormPlaces = "sandwich"
) -> DecoderConfig:
    """Return a decoder with norms around both layers of a block, which store w - 1, and scaled embeddings."""
    norm = RMSNormConfig(eps=shape.eps, offset=1.0)
    blocks = (shape.block(mixer, norm=norm, norms=norms) for mixer in mixers)
    return shape.decoder(blocks, norm, embedding_scale=shape.embed_dim**0.5, logit_soft_cap=logit_cap)


def gemma2(
    shape: DecoderSizes,
    *,
    masks: tuple[Mask, ...],
    query_scalar: int = 256,
    rope: Rope = Rope(),
    attention_cap: float | None = 50.0,
    logit_cap: float | None = 30.0,
    norms: NormPlaces = "sandwich",
) -> DecoderConfig:
    """Return a decoder of Gemma 2 blocks; queries are multiplied by `query_scalar ** -0.5`."""
    options: dict[str, Any] = dict(rope=rope, query_scale=query_scalar**-0.5, soft_cap=attention_cap)
    return gemma_decoder(shape, (shape.attention(mask=mask, **options) for mask in masks), logit_cap, norms)


def _query_scalar(config: DecoderConfig) -> int:
    mixer = attentions(config)[0]
    return round((mixer.head_dim**-0.5 if mixer.query_scale is None else mixer.query_scale) ** -2)


def gemma_sizes(**options: Any) -> Group:
    """Return the rows of the sizes of Gemma 2, 3 and 4."""
    activation = "gelu_pytorch_tanh"
    return decoder_sizes(
        num_kv_heads=4,
        head_dim=256,
        tied=True,
        activation=activation,
        keys={"hidden_act": "hidden_activation"},
        **options,
    )


# of Gemma 2 and 3
GEMMA_SETTINGS = (
    gemma_sizes(),
    Integer("query_pre_attn_scalar", _query_scalar, 256, name="query_scalar"),
)
GEMMA2_SETTINGS = (
    *GEMMA_SETTINGS,
    cycle_masks(2, default=4096),
    rope_settings(),
    Number("attn_logit_softcapping", "attention.soft_cap", 50.0, null=None, name="attention_cap"),
    Number("final_logit_softcapping", "logit_soft_cap", 30.0, null=None, name="logit_cap"),
)


def unused_kv_tensors(config: DecoderConfig, prefix: str = "model.") -> str:
    """Return a pattern of unused tensors: keys and values of layers that share those of earlier ones."""
    layers = "|".join(str(index) for index, mixer in enumerate(attentions(config)) if mixer.kv_shared_from is not None)
    return rf"{re.escape(prefix)}layers\.({layers})\.self_attn\.[kv]_(proj|norm)\.(weight|bias)"


def share_keys(masks: tuple[Mask, ...], num_shared: int) -> list[tuple[str | None, str | None]]:
    """Return the names under which each layer shares its keys and values, and reads those of an earlier one.

    The last `num_shared` layers read those of the last layer before them that has their mask.
    """
    types, first = [LAYER_TYPES[type(mask)] for mask in masks], len(masks) - num_shared
    last = {kind: layer for layer, kind in enumerate(types[:first])}
    sources = {last[kind] for kind in types[first:] if kind in last}
    return [(kind if i in sources else None, kind if i >= first else None) for i, kind in enumerate(types)]


def num_shared(config: DecoderConfig) -> int:
    """Return the number of layers that read keys and values of earlier ones."""
    return sum(mixer.kv_shared_from is not None for mixer in attentions(config))


def _has_own_keys(values: Values) -> bool:
    masks, shared = values["masks"], values["num_kv_shared_layers"]
    return {type(mask) for mask in masks} == {type(mask) for mask in masks[: max(0, len(masks) - shared)]}


def shared_key_settings(default: int) -> tuple[Integer, Check]:
    """Return the rows of `num_kv_shared_layers`, behind those of the masks."""
    key = "num_kv_shared_layers"
    rule = "num_kv_shared_layers={num_kv_shared_layers} leaves no layer of each type with keys of its own."
    return Integer(key, num_shared, default, least=0, name=key), Check(_has_own_keys, rule)


# of embeddings of each layer's own
PER_LAYER_WEIGHTS = (
    *norm_weights(LAYER, **{"post_layers.0.post_norm": "post_per_layer_input_norm"}),
    Weight(
        LAYER + "per_layer_input_gate.weight",
        "post_layers.0.layer.gate",
        "per_layer_input embed -> embed per_layer_input",
    ),
    Weight(
        LAYER + "per_layer_projection.weight",
        "post_layers.0.layer.out",
        "embed per_layer_input -> per_layer_input embed",
    ),
    Weight(
        "model.embed_tokens_per_layer.weight",
        "per_layer_embedding.table",
        "rows (per_layer row_dim) -> rows per_layer row_dim",
    ),
    Weight(
        "model.per_layer_model_projection.weight",
        "per_layer_embedding.projection",
        "(per_layer per_layer_input) embed -> embed per_layer per_layer_input",
    ),
    Weight("model.per_layer_projection_norm.weight", "per_layer_embedding.norm.scale", "norm -> norm"),
)
