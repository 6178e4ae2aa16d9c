"""ModernBERT's decoder, Ettin (Weller et al. 2025): two layers with windows per full layer, and BERT's output head."""

from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.common import (
    LAYER,
    DecoderSizes,
    decoder_sizes,
    ends,
    find_window,
    fused_mlp,
    read_masks,
    renamed,
    write_masks,
)
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import RopesByLayer
from eqx_decoders.families.setting_rows import Flag, Only, Renamed, Rule, Values, activation
from eqx_decoders.families.weight_rows import Weight, norm, norm_weights, self_attention, sharing
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.embedding.head_transform import HeadTransformConfig
from eqx_decoders.layers.mask import Mask, SlidingWindow
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def modernbert_decoder(
    shape: DecoderSizes,
    *,
    masks: tuple[Mask, ...],
    rope: Rope = Rope(theta=160_000.0),
    local_rope: Rope = Rope(theta=10_000.0),
    norm_bias: bool = False,
    mlp_bias: bool = False,
    head_activation: str = "gelu",
    transform_bias: bool = False,
    head_bias: bool = True,
) -> DecoderConfig:
    """Return a decoder of ModernBERT blocks.

    The first block has no norm before attention, because the embedding has a norm.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `masks`: the attention mask of each layer.
    - `rope`, `local_rope`: rotary embeddings of full layers and of layers with windows.
    - `norm_bias`, `mlp_bias`, `head_bias`: whether norms, MLPs and the output head have biases.
    - `head_activation`, `transform_bias`: activation and bias of the transform before the output head.
    """
    norm = LayerNormConfig(eps=shape.eps, bias=norm_bias)
    mlp = shape.mlp(fused=True, bias=mlp_bias)

    def mixer(mask: Mask) -> AttentionConfig:
        return shape.attention(mask=mask, rope=local_rope if isinstance(mask, SlidingWindow) else rope)

    first = shape.block(mixer(masks[0]), mlp, norm, pre_mixer_norm=None)
    blocks = (first, *(shape.block(mixer(mask), mlp, norm) for mask in masks[1:]))
    transform = HeadTransformConfig(activation=head_activation, bias=transform_bias, norm=norm)
    return shape.decoder(blocks, norm, embedding_norm=norm, head_transform=transform, head_bias=head_bias)


def _read_masks(fields: Fields, values: Values) -> tuple[Mask, ...]:
    """Return the masks. The window is half of `local_attention`, which counts the tokens on both sides of the query.

    transformers 4 saves the window as `sliding_window`, and does not save `local_attention`.
    """
    period = fields.integer("global_attn_every_n_layers", 3)
    default_window = fields.integer("sliding_window", 64)
    window = fields.integer("local_attention", 2 * default_window, least=2) // 2
    fields.allow_only("sliding_window", window)
    return read_masks(fields, values, window, lambda index: index % period != 0, key="local_attention")


def _write_masks(config: DecoderConfig) -> dict[str, Any]:
    return write_masks(config, default=64) | {"local_attention": 2 * (find_window(config) or 64)}


_TRANSFORM = "head_transform."
_KEY_NAMES = {
    "hidden_act": "hidden_activation",
    "rms_norm_eps": "norm_eps",
    **dict.fromkeys(("num_key_value_heads", "head_dim")),
}
FAMILY = Family(
    model_type="modernbert-decoder",
    architecture="ModernBertDecoderForCausalLM",
    settings=(
        decoder_sizes(eps=1e-5, tied=True, activation="gelu", keys=_KEY_NAMES),
        Rule("masks", _read_masks, _write_masks),
        Only("rope_scaling"),
        Only("causal_mask", True),
        Renamed({"global_rope_theta": "rope_theta"}),
        RopesByLayer(theta=160_000.0, local_theta=10_000.0, local_key="local_rope_theta"),
        Flag("norm_bias", "final_norm.bias", False, name="norm_bias"),
        Flag("mlp_bias", "mlp.bias", False, name="mlp_bias"),
        activation("classifier_activation", _TRANSFORM + "activation", "gelu", name="head_activation"),
        Flag("classifier_bias", _TRANSFORM + "bias", False, name="transform_bias"),
        Flag("decoder_bias", "head_bias", True, name="head_bias"),
    ),
    build=modernbert_decoder,
    weights=(
        *ends("model.embeddings.tok_embeddings", "model.final_norm", "decoder"),
        *norm("model.embeddings.norm", "embedding_norm"),
        *norm_weights(LAYER, pre_mixer_norm="attn_norm", pre_mlp_norm="mlp_norm"),
        *renamed(self_attention(LAYER, "attn."), {"o_proj": "Wo"}),
        *fused_mlp(LAYER + "mlp.", gate_up="Wi", down="Wo"),
        *sharing(LAYER + "mlp.Wi.bias", ("mlp.gate_bias", "mlp -> mlp"), ("mlp.up_bias", "mlp -> mlp")),
        Weight(LAYER + "mlp.Wo.bias", "mlp.down_bias", "embed -> embed"),
        Weight("lm_head.dense.weight", _TRANSFORM + "kernel", "outer embed -> embed outer"),
        Weight("lm_head.dense.bias", _TRANSFORM + "bias", "outer -> outer"),
        *norm("lm_head.norm", _TRANSFORM + "norm"),
    ),
    default_settings={"pad_token_id": 50_283, "bos_token_id": 50_281},  # transformers does not accept null
    ignored_keys={
        "embedding_dropout mlp_dropout classifier_dropout": "dropout is used in training only",
        "cls_token_id classifier_pooling initializer_cutoff_factor": "not used by causal models",
        "layer_norm_eps position_embedding_type": "transformers reads other keys",
        "deterministic_flash_attn reference_compile": "runtime options of the encoder",
        "repad_logits_with_grad sparse_prediction sparse_pred_ignore_index": "training of the encoder only",
    },
)


_BASE = dict(
    model_type="modernbert-decoder",
    vocab_size=50_368,
    rope_parameters=dict(sliding_attention=dict(rope_theta=160_000.0)),
)

MODELS = {
    "ettin-17m": _BASE | dict(hidden_size=256, num_hidden_layers=7, num_attention_heads=4, intermediate_size=384),
    "ettin-32m": _BASE | dict(hidden_size=384, num_hidden_layers=10, num_attention_heads=6, intermediate_size=576),
    "ettin-68m": _BASE | dict(hidden_size=512, num_hidden_layers=19, num_attention_heads=8, intermediate_size=768),
    "ettin-150m": _BASE | dict(
        hidden_size=768, num_hidden_layers=22, num_attention_heads=12, intermediate_size=1152,
    ),
    "ettin-400m": _BASE | dict(
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=2624,
    ),
    "ettin-1b": _BASE | dict(
        hidden_size=1792, num_hidden_layers=28, num_attention_heads=28, intermediate_size=3840,
    ),
}  # fmt: skip
