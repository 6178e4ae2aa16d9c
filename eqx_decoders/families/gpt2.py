"""GPT-2 (Radford et al. 2019): LayerNorm with bias, learned positions, fused QKV, biases everywhere, tied head."""

from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.families import _gpt2
from eqx_decoders.families.common import DecoderSizes, attentions, decoder_sizes
from eqx_decoders.families.config_keys import ACTIVATIONS
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Flag, Integer
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.model.decoder_config import DecoderConfig


def gpt2(
    shape: DecoderSizes, *, max_positions: int = 1024, scaled: bool = True, scaled_by_layer: bool = False
) -> DecoderConfig:
    """Return a decoder of GPT-2 blocks; the table of positions has `max_positions` rows.

    Scores are divided by the root of `head_dim` if `scaled`, and by the layer's number from 1 if `scaled_by_layer`.
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


def _scales(config: DecoderConfig) -> list[float | None]:
    return [mixer.query_scale for mixer in attentions(config)]


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    settings=(
        *_gpt2.DEFAULTS,
        decoder_sizes(
            eps=1e-5, tied=True, activation="gelu_new", keys=_gpt2.KEYS, words={"gelu_new": "gelu_tanh", **ACTIVATIONS}
        ),
        Integer("n_positions", "positions.max_positions"),
        Flag("scale_attn_weights", lambda config: _scales(config)[0] != 1.0, True, name="scaled"),
        Flag(
            "scale_attn_by_inverse_layer_idx",
            lambda config: len(set(_scales(config))) > 1,
            False,
            name="scaled_by_layer",
        ),
    ),
    build=gpt2,
    weights=(
        *_gpt2.ENDS,
        Weight(
            _gpt2.LAYER + "attn.c_attn.weight", "mixer.qkv", "embed (qkv_heads head_dim) -> embed qkv_heads head_dim"
        ),
        Weight(_gpt2.LAYER + "attn.c_attn.bias", "mixer.qkv_bias", "(qkv_heads head_dim) -> qkv_heads head_dim"),
        Weight(_gpt2.LAYER + "attn.c_proj.weight", "mixer.out", "(heads head_dim) embed -> heads head_dim embed"),
        Weight(_gpt2.LAYER + "attn.c_proj.bias", "mixer.out_bias", "embed -> embed"),
        Weight(_gpt2.LAYER + "mlp.c_fc.weight", "mlp.up", "embed mlp -> embed mlp"),
        Weight(_gpt2.LAYER + "mlp.c_fc.bias", "mlp.up_bias", "mlp -> mlp"),
        Weight(_gpt2.LAYER + "mlp.c_proj.weight", "mlp.down", "mlp embed -> mlp embed"),
        Weight(_gpt2.LAYER + "mlp.c_proj.bias", "mlp.down_bias", "embed -> embed"),
    ),
    ignored_tensors=_gpt2.IGNORED_TENSORS,
    ignored_keys=_gpt2.IGNORED_KEYS | {"reorder_and_upcast_attn": "scores and softmax are in float32 here anyway"},
)


MODELS = {
    "gpt2": dict(model_type="gpt2"),
    "gpt2-medium": dict(model_type="gpt2", n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": dict(model_type="gpt2", n_embd=1280, n_layer=36, n_head=20),
    "gpt2-xl": dict(model_type="gpt2", n_embd=1600, n_layer=48, n_head=25),
}  # fmt: skip
