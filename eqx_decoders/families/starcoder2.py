"""StarCoder2 (Lozhkov et al. 2024): LayerNorm, MLPs without a gate, biases, a window in every layer."""

from eqx_decoders.families.common import LAYER, DecoderSizes, decoder_sizes, llama_weights, plain_mlp, same_window
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import only
from eqx_decoders.layers.mask import Causal, Mask
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def starcoder2(shape: DecoderSizes, *, rope: Rope = Rope(), mask: Mask = Causal()) -> DecoderConfig:
    """Return a decoder of StarCoder2 blocks; `shape.attention_bias` also adds biases to the MLP."""
    norm = LayerNormConfig(eps=shape.eps)
    mlp = shape.mlp(gated=False, bias=shape.attention_bias)
    return shape.decoder(shape.block(shape.attention(rope=rope, mask=mask), mlp, norm), norm)


FAMILY = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    settings=(
        decoder_sizes(
            num_kv_heads=2, eps=1e-5, tied=True, activation="gelu_pytorch_tanh", attention_bias=True,
            keys={"rms_norm_eps": "norm_epsilon", "attention_bias": "use_bias"},
        ),
        *only(mlp_type="default", norm_type="layer_norm", scale_attn_weights=True),
        same_window(),
        rope_settings(),
    ),
    build=starcoder2,
    weights=llama_weights(mlp=plain_mlp(LAYER + "mlp.", up="c_fc", down="c_proj")),
    ignored_keys={
        "embedding_dropout residual_dropout": "dropout is used in training only",
        "activation_function layer_norm_epsilon": "transformers reads other keys",
        "attention_softmax_in_fp32 scale_attention_softmax_in_fp32": "softmax is always computed in float32",
    },
)  # fmt: skip


_BASE = dict(model_type="starcoder2", vocab_size=49_152, initializer_range=0.018042, sliding_window=4096)

MODELS = {
    "starcoder2-3b": _BASE | dict(
        hidden_size=3072, num_hidden_layers=30, num_attention_heads=24, intermediate_size=12_288,
        rope_theta=999_999.4420358813,
    ),
    "starcoder2-7b": _BASE | dict(
        hidden_size=4608, num_hidden_layers=32, num_attention_heads=36, num_key_value_heads=4, intermediate_size=18_432,
        rope_theta=1_000_000.0,
    ),
    "starcoder2-15b": _BASE | dict(
        hidden_size=6144, num_hidden_layers=40, num_attention_heads=48, num_key_value_heads=4, intermediate_size=24_576,
        initializer_range=0.01275, rope_theta=100_000.0, tie_word_embeddings=False,
    ),
}  # fmt: skip
