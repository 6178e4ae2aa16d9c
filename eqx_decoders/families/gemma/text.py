"""Gemma 1 to 3, text (Gemma Team 2024, 2025), and VaultGemma (Google 2025).

Norms that store w - 1, scaled embeddings, tanh-gelu, tied head. The first parts are shared with Gemma 3n and 4.
"""

import functools
import re
from collections.abc import Iterable
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.common import (
    LAYER,
    LAYER_TYPES,
    DecoderSizes,
    NormPlaces,
    attentions,
    cycle_masks,
    decoder_sizes,
    llama_weights,
)
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import RopesByLayer, rope_settings
from eqx_decoders.families.settings_table import Check, Group, Integer, Number, Only, Rule, Values
from eqx_decoders.families.weight_rows import Weight, norm_weights
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm
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
    """Return a pattern of unused tensors: projections of keys and values in layers that use those of earlier layers."""
    layers = "|".join(str(index) for index, mixer in enumerate(attentions(config)) if mixer.kv_shared_from is not None)
    return rf"{re.escape(prefix)}layers\.({layers})\.self_attn\.[kv]_(proj|norm)\.(weight|bias)"


def share_keys(masks: tuple[Mask, ...], num_shared: int) -> list[tuple[str | None, str | None]]:
    """Return two names per layer: under which it shares its keys and values, and of the shared ones that it uses.

    The last `num_shared` layers read those of the last layer before them that has their mask.
    """
    types, first = [LAYER_TYPES[type(mask)] for mask in masks], len(masks) - num_shared
    last = {kind: layer for layer, kind in enumerate(types[:first])}
    sources = {last[kind] for kind in types[first:] if kind in last}
    return [(kind if i in sources else None, kind if i >= first else None) for i, kind in enumerate(types)]


def num_shared(config: DecoderConfig) -> int:
    """Return the number of layers that use the keys and values of earlier layers."""
    return sum(mixer.kv_shared_from is not None for mixer in attentions(config))


def _has_own_keys(values: Values) -> bool:
    masks, shared = values["masks"], values["num_kv_shared_layers"]
    return {type(mask) for mask in masks} == {type(mask) for mask in masks[: max(0, len(masks) - shared)]}


def shared_key_settings(default: int) -> tuple[Integer, Check]:
    """Return the rows of `num_kv_shared_layers`; they must follow the rows of the masks."""
    key = "num_kv_shared_layers"
    rule = "num_kv_shared_layers={num_kv_shared_layers} leaves no layer of each type with keys of its own."
    return Integer(key, num_shared, default, least=0, name=key), Check(_has_own_keys, rule)


# per-layer embeddings
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


# --- Gemma ---


def gemma(shape: DecoderSizes, *, rope: Rope = Rope()) -> DecoderConfig:
    """Return a decoder of Gemma blocks."""
    norm = RMSNormConfig(eps=shape.eps, offset=1.0)
    block = shape.block(shape.attention(rope=rope), norm=norm)
    return shape.decoder(block, norm, embedding_scale=shape.embed_dim**0.5)


def _tanh(fields: Fields, values: Values) -> None:
    """Read "gelu" as its tanh approximation, as transformers does: the first files mean it."""
    if fields.content.get("hidden_act") == "gelu":
        fields.content["hidden_act"] = "gelu_pytorch_tanh"


GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    settings=(
        Rule("", _tanh),
        decoder_sizes(num_kv_heads=16, head_dim=256, tied=True, activation="gelu_pytorch_tanh"),
        rope_settings(),
    ),
    build=gemma,
    weights=llama_weights(),
    ignored_keys={"hidden_activation": "transformers reads hidden_act"},
)


_GEMMA_KEYS = dict(model_type="gemma", vocab_size=256_128)


# --- Gemma 2: norms around both layers, soft caps, and a window in every other layer ---


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    settings=GEMMA2_SETTINGS,
    build=gemma2,
    weights=llama_weights(norms="sandwich"),
    ignored_keys=IGNORED_ACTIVATION_KEY,
)


_GEMMA2_KEYS = dict(model_type="gemma2", vocab_size=256_128)


# --- VaultGemma, trained with differential privacy: Gemma 2 with norms before its layers only ---


_NORMS = norm_weights(LAYER, pre_mixer_norm="input_layernorm", pre_mlp_norm="pre_feedforward_layernorm")
VAULTGEMMA = Family(
    model_type="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    settings=GEMMA2_SETTINGS,
    build=functools.partial(gemma2, norms="pre"),
    weights=llama_weights(norms=_NORMS),
    ignored_keys=IGNORED_ACTIVATION_KEY,
)


# --- Gemma 3: five layers with a sliding window, then one without; the two kinds have different RoPE ---


def gemma3(
    shape: DecoderSizes,
    *,
    masks: tuple[Mask, ...],
    query_scalar: int = 256,
    rope: Rope = Rope(theta=1e6),
    local_rope: Rope = Rope(theta=10_000.0),
    logit_cap: float | None = None,
) -> DecoderConfig:
    """Return a decoder of Gemma 3 blocks; layers with a window have the rotary embedding `local_rope`."""
    qk_norm = QKNorm(norm=RMSNormConfig(eps=shape.eps, offset=1.0))
    mixers = shape.attention_by_mask(masks, rope, local_rope, query_scale=query_scalar**-0.5, qk_norm=qk_norm)
    return gemma_decoder(shape, mixers, logit_cap)


GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    settings=(
        *GEMMA_SETTINGS,
        Only("attn_logit_softcapping", written=True),  # transformers has the key and never applies it
        RopesByLayer(theta=1e6, local_theta=10_000.0, local_key="rope_local_base_freq"),
        cycle_masks(6, key="sliding_window_pattern", default=4096),
        Number("final_logit_softcapping", "logit_soft_cap", None, name="logit_cap"),
    ),
    build=gemma3,
    weights=llama_weights(norms="sandwich"),
    ignored_keys=IGNORED_ACTIVATION_KEY | {"_sliding_window_pattern": "layer_types says it"},
)


_GEMMA3_KEYS = dict(model_type="gemma3_text", vocab_size=262_144, sliding_window=1024)


FAMILIES = (GEMMA, GEMMA2, VAULTGEMMA, GEMMA3)

MODELS = {
    "gemma-2b": _GEMMA_KEYS | dict(
        hidden_size=2048, num_hidden_layers=18, num_attention_heads=8, num_key_value_heads=1, intermediate_size=16_384,
    ),
    "gemma-7b": _GEMMA_KEYS | dict(
        hidden_size=3072, num_hidden_layers=28, num_attention_heads=16, intermediate_size=24_576,
    ),
    "gemma2-2b": _GEMMA2_KEYS | dict(
        hidden_size=2304, num_hidden_layers=26, num_attention_heads=8, intermediate_size=9216,
    ),
    "gemma2-9b": _GEMMA2_KEYS | dict(
        hidden_size=3584, num_hidden_layers=42, num_attention_heads=16, num_key_value_heads=8, intermediate_size=14_336,
    ),
    "gemma2-27b": _GEMMA2_KEYS | dict(
        hidden_size=4608, num_hidden_layers=46, num_attention_heads=32, num_key_value_heads=16, head_dim=128,
        intermediate_size=36_864, query_pre_attn_scalar=144,
    ),
    "vaultgemma-1b": dict(
        model_type="vaultgemma", vocab_size=256_000, hidden_size=1152, num_hidden_layers=26, num_attention_heads=4,
        intermediate_size=6912, sliding_window=512,
    ),
    "gemma3-1b": _GEMMA3_KEYS | dict(
        hidden_size=1152, num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1, intermediate_size=6912,
        sliding_window=512,
    ),
    "gemma3-4b": _GEMMA3_KEYS | dict(
        hidden_size=2560, num_hidden_layers=34, num_attention_heads=8, intermediate_size=10_240,
        rope_parameters=dict(full_attention=dict(factor=8.0, rope_type="linear")),
    ),
    "gemma3-12b": _GEMMA3_KEYS | dict(
        hidden_size=3840, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=8, intermediate_size=15_360,
        rope_parameters=dict(full_attention=dict(factor=8.0, rope_type="linear")),
    ),
    "gemma3-27b": _GEMMA3_KEYS | dict(
        hidden_size=5376, num_hidden_layers=62, num_attention_heads=32, num_key_value_heads=16, head_dim=128,
        intermediate_size=21_504, query_pre_attn_scalar=168,
        rope_parameters=dict(full_attention=dict(factor=8.0, rope_type="linear")),
    ),
}  # fmt: skip
