"""GPT-2 (Radford et al. 2019): LayerNorm with bias, learned positions, fused QKV, biases everywhere, tied head."""

import functools
from typing import Any

from eqx_decoders.block import BlockConfig
from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.errors import ConversionError
from eqx_decoders.families.family import Family, Weight
from eqx_decoders.families.fields import ACTIVATIONS, Fields, activation_name
from eqx_decoders.families.shape import Shape, attentions, norm_weights
from eqx_decoders.layers.embedding import LearnedPositions
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import LayerNormConfig


def gpt2(
    shape: Shape, *, max_positions: int = 1024, scaled: bool = True, scaled_by_layer: bool = False
) -> DecoderConfig:
    """A decoder of GPT-2 blocks.

    **Arguments:**

    - `max_positions`: rows of the table of positions.
    - `scaled`: whether scores are divided by the root of `head_dim`.
    - `scaled_by_layer`: whether those of layer i, counted from 1, are also divided by i.
    """
    norm, mlp = LayerNormConfig(eps=shape.eps), shape.mlp(gated=False, bias=True)
    options: dict[str, Any] = dict(rope=None, fused_qkv=True, qkv_bias=True, out_bias=True)

    def block(layer: int) -> BlockConfig:
        scale = None if scaled else 1.0
        if scaled_by_layer:
            scale = (shape.head_dim**-0.5 if scaled else 1.0) / layer
        return shape.block(shape.attention(query_scale=scale, **options), mlp, norm)

    blocks = map(block, range(1, shape.num_layers + 1))
    return shape.decoder(blocks, norm, positions=LearnedPositions(max_positions=max_positions))


def _read(fields: Fields) -> DecoderConfig:
    for ours, theirs in _RENAMED.items():
        fields.rename(theirs, ours)
    embed, heads = fields.integer("n_embd", 768), fields.integer("n_head", 12)
    if embed % heads:
        raise fields.error(f"n_embd={embed} must be a multiple of n_head={heads}.")
    shape = Shape(
        vocab_size=fields.integer("vocab_size", 50_257),
        embed_dim=embed,
        num_layers=fields.layers("n_layer", 12),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=embed // heads,
        mlp_dim=fields.integer("n_inner", 4 * embed),
        eps=fields.number("layer_norm_epsilon", 1e-5),
        tied=fields.flag("tie_word_embeddings", True),
        activation=fields.word("activation_function", ACTIVATIONS, "gelu_new"),
        init_std=fields.number("initializer_range", 0.02),
    )
    return gpt2(
        shape,
        max_positions=fields.integer("n_positions", 1024),
        scaled=fields.flag("scale_attn_weights", True),
        scaled_by_layer=fields.flag("scale_attn_by_inverse_layer_idx", False),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    mixers, mlp, norm = attentions(config), config.blocks[0].mlp, config.final_norm
    if not isinstance(mlp, MLPConfig) or norm is None or not isinstance(config.positions, LearnedPositions):
        raise ConversionError("DecoderConfig.positions must be learned, and blocks[0].mlp and final_norm be there.")
    return {
        "vocab_size": config.vocab_size,
        "n_positions": config.positions.max_positions,
        "n_embd": config.embed_dim,
        "n_layer": len(config.blocks),
        "n_head": mixers[0].num_heads,
        "n_inner": mlp.mlp_dim,
        "activation_function": "gelu_new" if mlp.activation == "gelu_tanh" else activation_name(mlp.activation),
        "layer_norm_epsilon": norm.eps,
        "initializer_range": config.init_std,
        "scale_attn_weights": mixers[0].query_scale != 1.0,
        "scale_attn_by_inverse_layer_idx": len({mixer.query_scale for mixer in mixers}) > 1,
        "tie_word_embeddings": config.tied,
    }


_RENAMED = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}
_SUMMARY = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
_LAYER = "transformer.h.{layer}."
FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    read=_read,
    write=_write,
    weights=(
        Weight("transformer.wte.weight", "embedding.table", "vocab embed -> vocab embed"),
        Weight("transformer.wpe.weight", "positions.table", "positions embed -> positions embed"),
        *norm_weights(_LAYER, pre_mixer_norm="ln_1", pre_mlp_norm="ln_2"),
        Weight(_LAYER + "attn.c_attn.weight", "mixer.qkv", "embed (qkv_heads head_dim) -> embed qkv_heads head_dim"),
        Weight(_LAYER + "attn.c_attn.bias", "mixer.qkv_bias", "(qkv_heads head_dim) -> qkv_heads head_dim"),
        Weight(_LAYER + "attn.c_proj.weight", "mixer.out", "(heads head_dim) embed -> heads head_dim embed"),
        Weight(_LAYER + "attn.c_proj.bias", "mixer.out_bias", "embed -> embed"),
        Weight(_LAYER + "mlp.c_fc.weight", "mlp.up", "embed mlp -> embed mlp"),
        Weight(_LAYER + "mlp.c_fc.bias", "mlp.up_bias", "mlp -> mlp"),
        Weight(_LAYER + "mlp.c_proj.weight", "mlp.down", "mlp embed -> mlp embed"),
        Weight(_LAYER + "mlp.c_proj.bias", "mlp.down_bias", "embed -> embed"),
        *norm_weights("transformer.", final_norm="ln_f"),
        Weight("lm_head.weight", "head.kernel", "vocab embed -> embed vocab"),
    ),
    prefix="transformer.",
    ignored_tensors=r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",  # the causal mask, which old files store
    ignored_keys={
        **dict.fromkeys((f"summary_{key}" for key in _SUMMARY), "for a classification head"),
        "n_ctx": "an older name of n_positions",
        **dict.fromkeys(("n_special", "predict_special_tokens"), "of the first GPT"),
        "reorder_and_upcast_attn": "scores and softmax are in float32 here anyway",
    },
)

_shape = functools.partial(Shape, vocab_size=50_257, head_dim=64, eps=1e-5, tied=True, activation="gelu_tanh")

MODELS = {
    "gpt2": lambda: gpt2(_shape(embed_dim=768, num_layers=12, num_heads=12, num_kv_heads=12, mlp_dim=3072)),
    "gpt2-medium": lambda: gpt2(_shape(embed_dim=1024, num_layers=24, num_heads=16, num_kv_heads=16, mlp_dim=4096)),
    "gpt2-large": lambda: gpt2(_shape(embed_dim=1280, num_layers=36, num_heads=20, num_kv_heads=20, mlp_dim=5120)),
    "gpt2-xl": lambda: gpt2(_shape(embed_dim=1600, num_layers=48, num_heads=25, num_kv_heads=25, mlp_dim=6400)),
}
