"""Text decoders of Gemma 1, 2 and 3 (Gemma Team 2024, 2025), and VaultGemma (Google 2025).

RMSNorm stores `scale - 1`, embeddings are multiplied by `sqrt(embed_dim)`, MLPs use the tanh approximation of GELU, and
the output head is tied to the embeddings. Gemma 3n and Gemma 4 use the definitions before the section "Gemma".
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
    cycle_mask_settings,
    decoder_sizes,
    llama_weights,
)
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import RopesByLayer, rope_settings
from eqx_decoders.families.setting_rows import Check, Group, Integer, Number, Only, Rule, Values
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
    """Return the configuration of a decoder with Gemma norms and scaled embeddings.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `mixers`: attention of each layer.
    - `logit_cap`: soft cap of the logits; None: no cap.
    - `norms`: positions of the norms of a block: before, after, or before and after attention and MLP.
    """
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
    """Return the configuration of a decoder with Gemma 2 blocks.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `masks`: mask of each layer.
    - `query_scalar`: queries are multiplied by `query_scalar ** -0.5`.
    - `rope`: rotary embedding.
    - `attention_cap`, `logit_cap`: soft caps of attention scores and of logits; None: no cap.
    - `norms`: positions of the norms of a block.
    """
    mixers = (
        shape.attention(mask=mask, rope=rope, query_scale=query_scalar**-0.5, soft_cap=attention_cap) for mask in masks
    )
    return gemma_decoder(shape, mixers, logit_cap, norms)


def _query_scalar(config: DecoderConfig) -> int:
    mixer = attentions(config)[0]
    query_scale = mixer.head_dim**-0.5 if mixer.query_scale is None else mixer.query_scale
    return round(query_scale**-2)


def gemma_sizes(**options: Any) -> Group:
    """Return the settings of the sizes of Gemma 2, 3, 3n and 4. `options` are further arguments of `decoder_sizes`."""
    return decoder_sizes(
        num_kv_heads=4,
        head_dim=256,
        tied=True,
        activation="gelu_pytorch_tanh",
        keys={"hidden_act": "hidden_activation"},
        **options,
    )


# Settings of Gemma 2 and Gemma 3.
_SHARED_SETTINGS = (
    gemma_sizes(),
    Integer("query_pre_attn_scalar", _query_scalar, 256, name="query_scalar"),
)
_GEMMA2_SETTINGS = (
    *_SHARED_SETTINGS,
    cycle_mask_settings(2, default=4096),
    rope_settings(),
    Number("attn_logit_softcapping", "attention.soft_cap", 50.0, null=None, name="attention_cap"),
    Number("final_logit_softcapping", "logit_soft_cap", 30.0, null=None, name="logit_cap"),
)


def unused_kv_tensors(config: DecoderConfig, prefix: str = "model.") -> str:
    """Return a regular expression of unused tensors.

    These are the key and value projections and norms of layers that read the keys and values of an earlier layer.
    `prefix` is the prefix of the decoder's tensor names.
    """
    layers = "|".join(str(layer) for layer, mixer in enumerate(attentions(config)) if mixer.kv_shared_from is not None)
    return rf"{re.escape(prefix)}layers\.({layers})\.self_attn\.[kv]_(proj|norm)\.(weight|bias)"


def share_keys(masks: tuple[Mask, ...], num_shared: int) -> list[tuple[str | None, str | None]]:
    """Return `(shares_kv_as, kv_shared_from)` for each layer.

    The last `num_shared` layers do not compute keys and values. Each of them reads the keys and values of the last
    other layer with the same type of mask. Shared keys and values are named after the type of the layer.
    """
    layer_types = [LAYER_TYPES[type(mask)] for mask in masks]
    first_shared = len(masks) - num_shared
    last_by_type = {layer_type: layer for layer, layer_type in enumerate(layer_types[:first_shared])}
    sources = {last_by_type[layer_type] for layer_type in layer_types[first_shared:] if layer_type in last_by_type}
    return [
        (layer_type if layer in sources else None, layer_type if layer >= first_shared else None)
        for layer, layer_type in enumerate(layer_types)
    ]


def count_kv_shared_layers(config: DecoderConfig) -> int:
    """Return the number of layers that read the keys and values of an earlier layer."""
    return sum(mixer.kv_shared_from is not None for mixer in attentions(config))


def _all_types_have_keys(values: Values) -> bool:
    mask_types = [type(mask) for mask in values["masks"]]
    num_unshared = max(0, len(mask_types) - values["num_kv_shared_layers"])
    return set(mask_types) == set(mask_types[:num_unshared])


def shared_key_settings(default: int) -> tuple[Integer, Check]:
    """Return the settings of `num_kv_shared_layers`. They must follow the settings of the masks."""
    key = "num_kv_shared_layers"
    return (
        Integer(key, count_kv_shared_layers, default, least=0, name=key),
        Check(
            _all_types_have_keys,
            "num_kv_shared_layers={num_kv_shared_layers} is too large: at least one layer of each type in layer_types "
            "must compute its own keys and values. Reduce num_kv_shared_layers.",
        ),
    )


# Weight rows of per-layer embeddings.
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
    """Return the configuration of a decoder with Gemma blocks."""
    norm = RMSNormConfig(eps=shape.eps, offset=1.0)
    block = shape.block(shape.attention(rope=rope), norm=norm)
    return shape.decoder(block, norm, embedding_scale=shape.embed_dim**0.5)


def _replace_gelu(fields: Fields, values: Values) -> None:
    """Replace "gelu" by the tanh approximation, as transformers does.

    The first published checkpoints say "gelu", but were trained with the tanh approximation.
    """
    if fields.content.get("hidden_act") == "gelu":
        fields.content["hidden_act"] = "gelu_pytorch_tanh"


GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    settings=(
        Rule("", _replace_gelu),
        decoder_sizes(num_kv_heads=16, head_dim=256, tied=True, activation="gelu_pytorch_tanh"),
        rope_settings(),
    ),
    build=gemma,
    weights=llama_weights(),
    ignored_keys={"hidden_activation": "transformers reads hidden_act"},
)


_GEMMA_BASE = dict(model_type="gemma", vocab_size=256_128)


# --- Gemma 2: norms before and after attention and MLP, soft caps, and a window in every other layer ---


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    settings=_GEMMA2_SETTINGS,
    build=gemma2,
    weights=llama_weights(norms="sandwich"),
    ignored_keys=IGNORED_ACTIVATION_KEY,
)


_GEMMA2_BASE = dict(model_type="gemma2", vocab_size=256_128)


# --- VaultGemma, trained with differential privacy: Gemma 2 with norms only before attention and MLP ---


_PRE_NORMS = norm_weights(LAYER, pre_mixer_norm="input_layernorm", pre_mlp_norm="pre_feedforward_layernorm")
VAULTGEMMA = Family(
    model_type="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    settings=_GEMMA2_SETTINGS,
    build=functools.partial(gemma2, norms="pre"),
    weights=llama_weights(norms=_PRE_NORMS),
    ignored_keys=IGNORED_ACTIVATION_KEY,
)


# --- Gemma 3: five layers with a sliding window, then one with full attention; the two types have different RoPE ---


def gemma3(
    shape: DecoderSizes,
    *,
    masks: tuple[Mask, ...],
    query_scalar: int = 256,
    rope: Rope = Rope(theta=1e6),
    local_rope: Rope = Rope(theta=10_000.0),
    logit_cap: float | None = None,
) -> DecoderConfig:
    """Return the configuration of a decoder with Gemma 3 blocks.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `masks`: mask of each layer.
    - `query_scalar`: queries are multiplied by `query_scalar ** -0.5`.
    - `rope`, `local_rope`: rotary embeddings of layers with full attention, and with a sliding window.
    - `logit_cap`: soft cap of the logits; None: no cap.
    """
    qk_norm = QKNorm(norm=RMSNormConfig(eps=shape.eps, offset=1.0))
    mixers = shape.attention_by_mask(masks, rope, local_rope, query_scale=query_scalar**-0.5, qk_norm=qk_norm)
    return gemma_decoder(shape, mixers, logit_cap)


GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    settings=(
        *_SHARED_SETTINGS,
        Only("attn_logit_softcapping", written=True),  # transformers writes this key, but does not use it
        RopesByLayer(theta=1e6, local_theta=10_000.0, local_key="rope_local_base_freq"),
        cycle_mask_settings(6, key="sliding_window_pattern", default=4096),
        Number("final_logit_softcapping", "logit_soft_cap", None, name="logit_cap"),
    ),
    build=gemma3,
    weights=llama_weights(norms="sandwich"),
    ignored_keys=IGNORED_ACTIVATION_KEY | {"_sliding_window_pattern": "layer_types determines the masks"},
)


_GEMMA3_BASE = dict(model_type="gemma3_text", vocab_size=262_144, sliding_window=1024)


FAMILIES = (GEMMA, GEMMA2, VAULTGEMMA, GEMMA3)

MODELS = {
    "gemma-2b": _GEMMA_BASE | dict(
        hidden_size=2048, num_hidden_layers=18, num_attention_heads=8, num_key_value_heads=1, intermediate_size=16_384,
    ),
    "gemma-7b": _GEMMA_BASE | dict(
        hidden_size=3072, num_hidden_layers=28, num_attention_heads=16, intermediate_size=24_576,
    ),
    "gemma2-2b": _GEMMA2_BASE | dict(
        hidden_size=2304, num_hidden_layers=26, num_attention_heads=8, intermediate_size=9216,
    ),
    "gemma2-9b": _GEMMA2_BASE | dict(
        hidden_size=3584, num_hidden_layers=42, num_attention_heads=16, num_key_value_heads=8, intermediate_size=14_336,
    ),
    "gemma2-27b": _GEMMA2_BASE | dict(
        hidden_size=4608, num_hidden_layers=46, num_attention_heads=32, num_key_value_heads=16, head_dim=128,
        intermediate_size=36_864, query_pre_attn_scalar=144,
    ),
    "vaultgemma-1b": dict(
        model_type="vaultgemma", vocab_size=256_000, hidden_size=1152, num_hidden_layers=26, num_attention_heads=4,
        intermediate_size=6912, sliding_window=512,
    ),
    "gemma3-1b": _GEMMA3_BASE | dict(
        hidden_size=1152, num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1, intermediate_size=6912,
        sliding_window=512,
    ),
    "gemma3-4b": _GEMMA3_BASE | dict(
        hidden_size=2560, num_hidden_layers=34, num_attention_heads=8, intermediate_size=10_240,
        rope_parameters=dict(full_attention=dict(factor=8.0, rope_type="linear")),
    ),
    "gemma3-12b": _GEMMA3_BASE | dict(
        hidden_size=3840, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=8, intermediate_size=15_360,
        rope_parameters=dict(full_attention=dict(factor=8.0, rope_type="linear")),
    ),
    "gemma3-27b": _GEMMA3_BASE | dict(
        hidden_size=5376, num_hidden_layers=62, num_attention_heads=32, num_key_value_heads=16, head_dim=128,
        intermediate_size=21_504, query_pre_attn_scalar=168,
        rope_parameters=dict(full_attention=dict(factor=8.0, rope_type="linear")),
    ),
}  # fmt: skip
