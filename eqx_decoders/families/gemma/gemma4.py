"""The text decoder of Gemma 4 (Gemma Team 2026): Gemma 3 with wider heads in layers with full attention.

In the larger models, values are the normalized keys in layers with full attention, and one model has experts in
parallel with the MLP. The smaller models have per-layer embeddings, and their last layers read the keys and values of
earlier layers.
"""

import dataclasses
import functools
from typing import Any

from eqx_decoders.blocks.block import BlockConfig, ExtraLayerConfig
from eqx_decoders.blocks.residual.residual import Sequential
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError
from eqx_decoders.families.common import (
    LAYER,
    LAYER_TYPES,
    DecoderSizes,
    attentions,
    llama_weights,
    read_masks,
    write_masks,
)
from eqx_decoders.families.family import Family
from eqx_decoders.families.gemma.text import (
    IGNORED_ACTIVATION_KEY,
    PER_LAYER_WEIGHTS,
    count_kv_shared_layers,
    gemma_sizes,
    share_keys,
    shared_key_settings,
    unused_kv_tensors,
)
from eqx_decoders.families.moe import IGNORED_ROUTER_KEYS, fused_experts
from eqx_decoders.families.rope_config import read_ropes, write_ropes
from eqx_decoders.families.setting_rows import Flag, Number, Only, Rule, Values, first_layer
from eqx_decoders.families.weight_rows import Weight, gated_mlp, norm_weights
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.embedding.per_layer_embedding import PerLayerEmbeddingConfig, PerLayerInputConfig
from eqx_decoders.layers.mask import Causal, Mask
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import ProportionalRope, Rope
from eqx_decoders.model.decoder_config import DecoderConfig


ROPES: dict[str, Rope] = {
    "full_attention": ProportionalRope(theta=1e6, fraction=0.25),
    "sliding_attention": Rope(theta=10_000.0),
}
Heads = tuple[int, int]  # (num_kv_heads, head_dim)


def gemma4(
    shape: DecoderSizes,
    *,
    masks: tuple[Mask, ...],
    heads: tuple[Heads, ...],
    ropes: dict[str, Rope] = ROPES,
    shared_kv: bool = False,
    num_kv_shared_layers: int = 0,
    double_wide: bool = False,
    experts: dict[str, int] | None = None,
    per_layer: PerLayerEmbeddingConfig | None = None,
    logit_cap: float | None = 30.0,
) -> DecoderConfig:
    """Return the configuration of a decoder with Gemma 4 blocks.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `masks`: mask of each layer.
    - `heads`: number of key and value heads, and features per head, of each layer.
    - `ropes`: rotary embedding for each layer type.
    - `shared_kv`: whether values are the keys in layers with full attention.
    - `num_kv_shared_layers`: number of layers at the end that read the keys and values of an earlier layer of the same
        type.
    - `double_wide`: whether the MLPs of these layers are twice as wide.
    - `experts`: `num_experts`, `num_experts_per_token` and `mlp_dim` of experts in parallel with the MLP; None: no
        experts.
    - `per_layer`: per-layer embeddings; None: no per-layer embeddings.
    - `logit_cap`: soft cap of the logits; None: no cap.
    """
    kv_sharing = share_keys(masks, num_kv_shared_layers)

    def block(layer: int) -> BlockConfig:
        shared_as, shared_from = kv_sharing[layer]
        reads_shared_kv = shared_from is not None
        num_kv_heads, head_dim = heads[layer]
        mixer = shape.attention(
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            mask=masks[layer],
            rope=ropes[LAYER_TYPES[type(masks[layer])]],
            query_scale=1.0,
            qk_norm=shape.qk_norm,
            shared_kv=shared_kv and isinstance(masks[layer], Causal) and not reads_shared_kv,
            value_norm=None if reads_shared_kv else RMSNormConfig(eps=shape.eps, scale=False),
            kv_shared_from=shared_from,
        )
        mlp = _mlp(shape, 2 if double_wide and reads_shared_kv else 1, experts)
        return dataclasses.replace(_block(shape, mixer, mlp, per_layer), shares_kv_as=shared_as)

    return shape.decoder(
        map(block, range(len(masks))),
        embedding_scale=shape.embed_dim**0.5,
        logit_soft_cap=logit_cap,
        per_layer_embedding=per_layer,
    )


def _mlp(shape: DecoderSizes, width_factor: int, experts: dict[str, Any] | None) -> MLPConfig | ExpertsConfig:
    dense = MLPConfig(mlp_dim=shape.mlp_dim * width_factor, activation=shape.activation)
    if experts is None:
        return dense
    router = RouterConfig(order="score_first", renormalize=True, per_expert_scale=True, input_norm=shape.norm)
    return shape.experts(router=router, shared=dense, norms=shape.norm, **experts)


def _block(
    shape: DecoderSizes,
    mixer: AttentionConfig,
    mlp: MLPConfig | ExpertsConfig,
    per_layer: PerLayerEmbeddingConfig | None,
) -> BlockConfig:
    post_layers = ()
    if per_layer is not None:
        layer = PerLayerInputConfig(features=per_layer.features, activation=shape.activation)
        post_layers = (ExtraLayerConfig(layer=layer, post_norm=shape.norm),)
    return BlockConfig(
        mixer=mixer,
        mlp=mlp,
        pre_mixer_norm=shape.norm,
        post_mixer_norm=shape.norm,
        pre_mlp_norm=shape.norm if isinstance(mlp, MLPConfig) else None,
        post_mlp_norm=shape.norm,
        post_layers=post_layers,
        residual=Sequential(output_scale=True),
    )


# --- config.json ---


def _read_masks(fields: Fields, values: Values) -> tuple[Mask, ...]:
    masks = read_masks(fields, values, fields.integer("sliding_window", 512), lambda layer: (layer + 1) % 6 != 0)
    return (*masks[:-1], Causal())  # in transformers the last layer always has full attention


def _read_rope_tables(fields: Fields, values: Values) -> dict[str, Rope]:
    if fields.content.get("rope_parameters") is None:
        return ROPES
    return read_ropes(fields, theta=1e6, local_theta=10_000.0, local_key=None)


def _read_heads(fields: Fields, values: Values) -> tuple[Heads, ...]:
    """Read the heads of each layer from `per_layer_config`, or from `global_…` keys in older files."""
    shape, masks = values["shape"], values["masks"]
    default = (shape.num_kv_heads, shape.head_dim)
    global_head_dim = fields.integer("global_head_dim", 512)
    global_kv_heads = fields.integer("num_global_key_value_heads", None)
    if global_kv_heads is None or not values["shared_kv"]:
        global_kv_heads = shape.num_kv_heads
    table = fields.table("per_layer_config")
    if "per_layer_config" not in fields.content:
        return tuple((global_kv_heads, global_head_dim) if isinstance(mask, Causal) else default for mask in masks)
    if table is None:
        return (default,) * len(masks)
    # transformers pads layer indices with zeros to the same length: "04", "09", "14".
    table.content = {key.lstrip("0") or key[:1]: value for key, value in table.content.items()}
    heads = []
    for layer in range(len(masks)):
        layer_fields = table.table(str(layer))
        if layer_fields is None:
            heads.append(default)
            continue
        num_kv_heads = layer_fields.integer("num_key_value_heads", shape.num_kv_heads)
        head_dim = layer_fields.integer("head_dim", shape.head_dim)
        layer_fields.finish()
        heads.append((num_kv_heads, head_dim))
    table.finish()
    return tuple(heads)


_EXPERT_KEYS = {
    "num_experts": "num_experts",
    "top_k_experts": "num_experts_per_token",
    "moe_intermediate_size": "mlp_dim",
}


def _read_experts(fields: Fields, values: Values) -> dict[str, int] | None:
    if not fields.flag("enable_moe_block", False):
        for key in _EXPERT_KEYS:
            fields.take(key, None)  # no effect without experts, but the key counts as read
        return None
    return {name: fields.integer(key) for key, name in _EXPERT_KEYS.items()}


def _write_experts(config: DecoderConfig) -> dict[str, Any]:
    experts = first_layer(config, "experts")
    sizes = {key: None if experts is None else getattr(experts, name) for key, name in _EXPERT_KEYS.items()}
    return {"enable_moe_block": experts is not None, **sizes}


def _read_per_layer(fields: Fields, values: Values) -> PerLayerEmbeddingConfig | None:
    features = fields.integer("hidden_size_per_layer_input", 256, null=0, least=0)
    vocab_size = fields.integer("vocab_size_per_layer_input", 262_144, least=1 if features else 0)
    return _per_layer(values["shape"], features, vocab_size) if features else None


def _write_per_layer(config: DecoderConfig) -> dict[str, Any]:
    per_layer = config.per_layer_embedding
    return {
        "hidden_size_per_layer_input": 0 if per_layer is None else per_layer.features,
        "vocab_size_per_layer_input": config.vocab_size if per_layer is None else per_layer.vocab_size,
    }


def _per_layer(shape: DecoderSizes, features: int = 256, vocab_size: int = 262_144) -> PerLayerEmbeddingConfig:
    return PerLayerEmbeddingConfig(features=features, vocab_size=vocab_size, norm=shape.norm, init_std=shape.init_std)


def _is_double_wide(config: DecoderConfig) -> bool:
    return (
        count_kv_shared_layers(config) > 0
        and _dense_mlp(config.blocks[-1]).mlp_dim != _dense_mlp(config.blocks[0]).mlp_dim
    )


def _dense_mlp(block: BlockConfig) -> MLPConfig:
    """Return the dense MLP of a block, which is the shared expert in a block with experts."""
    mlp = block.mlp.shared if isinstance(block.mlp, ExpertsConfig) else block.mlp
    if not isinstance(mlp, MLPConfig):
        raise ConversionError(
            f"BlockConfig.mlp={block.mlp!r} must be an MLPConfig, or an ExpertsConfig whose `shared` is an MLPConfig, "
            "to export Gemma 4."
        )
    return mlp


def _write_heads(config: DecoderConfig) -> dict[str, Any]:
    """Return `per_layer_config`: the sizes of layers that differ from the sizes of the first layer."""
    mixers = attentions(config)
    first = mixers[0]
    layers: dict[str, dict[str, int]] = {}
    for layer, mixer in enumerate(mixers):
        sizes = {}
        if mixer.head_dim != first.head_dim:
            sizes["head_dim"] = mixer.head_dim
        if mixer.num_kv_heads != first.num_kv_heads:
            sizes["num_key_value_heads"] = mixer.num_kv_heads
        if sizes:
            layers[str(layer)] = sizes
    return {"per_layer_config": layers}


FAMILY = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    settings=(
        Only("use_bidirectional_attention", "vision"),  # only affects the tokens of images
        gemma_sizes(
            paths={
                "intermediate_size": lambda config: _dense_mlp(config.blocks[0]).mlp_dim,
                "hidden_act": lambda config: _dense_mlp(config.blocks[0]).activation,
            }
        ),
        Rule("masks", _read_masks, functools.partial(write_masks, default=512)),
        Flag(
            "attention_k_eq_v",
            lambda config: any(mixer.shared_kv for mixer in attentions(config)),
            False,
            name="shared_kv",
        ),
        *shared_key_settings(0),
        Rule("heads", _read_heads, _write_heads),
        Rule("ropes", _read_rope_tables, write_ropes),
        Flag("use_double_wide_mlp", _is_double_wide, False, name="double_wide"),
        Rule("experts", _read_experts, _write_experts),
        Rule("per_layer", _read_per_layer, _write_per_layer),
        Number("final_logit_softcapping", "logit_soft_cap", None, name="logit_cap"),
    ),
    build=gemma4,
    weights=(
        *llama_weights(norms="sandwich"),
        *gated_mlp(LAYER + "mlp.", "mlp.shared."),
        *fused_experts(LAYER, router="router.proj"),
        *norm_weights(
            LAYER,
            **{
                "mlp.norms.pre_shared": "pre_feedforward_layernorm",
                "mlp.norms.post_shared": "post_feedforward_layernorm_1",
                "mlp.norms.pre_routed": "pre_feedforward_layernorm_2",
                "mlp.norms.post_routed": "post_feedforward_layernorm_2",
            },
        ),
        Weight(LAYER + "router.scale", "mlp.router.input_norm.scale", "norm -> norm"),
        Weight(LAYER + "router.per_expert_scale", "mlp.router.per_expert_scale", "experts -> experts"),
        Weight(LAYER + "layer_scalar", "residual.scale", "one -> one"),
        *PER_LAYER_WEIGHTS,
    ),
    ignored_keys=IGNORED_ACTIVATION_KEY | IGNORED_ROUTER_KEYS,
    ignored_tensors=unused_kv_tensors,
)


_BASE = dict(model_type="gemma4_text", vocab_size=262_144, final_logit_softcapping=30.0)

MODELS = {
    "gemma4-e2b": _BASE | dict(
        hidden_size=1536, num_hidden_layers=35, num_attention_heads=8, num_key_value_heads=1, intermediate_size=6144,
        layer_types=["full_attention" if layer % 5 == 4 else "sliding_attention" for layer in range(35)],
        num_kv_shared_layers=20, use_double_wide_mlp=True,
    ),
    "gemma4-e4b": _BASE | dict(
        hidden_size=2560, num_hidden_layers=42, num_attention_heads=8, num_key_value_heads=2, intermediate_size=10_240,
        num_kv_shared_layers=18,
    ),
    "gemma4-26b": _BASE | dict(
        hidden_size=2816, num_hidden_layers=30, num_attention_heads=16, num_key_value_heads=8, intermediate_size=2112,
        attention_k_eq_v=True, enable_moe_block=True, hidden_size_per_layer_input=0, moe_intermediate_size=704,
        num_experts=128,
        per_layer_config={str(layer): dict(head_dim=512, num_key_value_heads=2) for layer in range(5, 30, 6)},
        sliding_window=1024, top_k_experts=8,
    ),
    "gemma4-31b": _BASE | dict(
        hidden_size=5376, num_hidden_layers=60, num_attention_heads=32, num_key_value_heads=16,
        intermediate_size=21_504, attention_k_eq_v=True, hidden_size_per_layer_input=0,
        per_layer_config={str(layer): dict(head_dim=512, num_key_value_heads=4) for layer in range(5, 60, 6)},
        sliding_window=1024,
    ),
}  # fmt: skip
