"""DiffLlama (Matsumoto 2024): Llama with differential attention (Ye et al. 2024)."""

from eqx_decoders.families.common import ENDS, GATED_MLP, LAYER, PRE_NORMS, DecoderSizes, decoder_sizes
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Check
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.attention.variants.differential import DifferentialAttentionConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def diffllama(shape: DecoderSizes, *, rope: Rope = Rope()) -> DecoderConfig:
    """Return a decoder of DiffLlama blocks; a differential head has two of `shape.num_heads` heads."""
    norm = RMSNormConfig(eps=shape.eps, scale=False)
    attention = shape.attention(rope=rope)
    return shape.decoder(shape.block(DifferentialAttentionConfig(attention=attention, norm=norm), shape.mlp()))


_ATTENTION = LAYER + "self_attn."


def _projection(name: str, path: str, heads: str) -> tuple[Weight, ...]:
    """Return the rows of a projection. Checkpoints store the first heads of all pairs, then the second heads."""
    stored = f"(halves {heads} head_dim)"
    loaded = f"{heads} halves head_dim"
    return (
        Weight(f"{_ATTENTION}{name}.weight", path, f"{stored} embed -> embed {loaded}"),
        Weight(f"{_ATTENTION}{name}.bias", f"{path}_bias", f"{stored} -> {loaded}"),
    )


_LAMBDAS = {"q1": "first_query", "k1": "first_key", "q2": "second_query", "k2": "second_key"}
_HEADS = "blocks.0.mixer.attention."
_PATHS = {
    "num_attention_heads": _HEADS + "num_heads",
    "num_key_value_heads": _HEADS + "num_kv_heads",
    "head_dim": _HEADS + "head_dim",
    "attention_bias": _HEADS + "qkv_bias",
}
FAMILY = Family(
    model_type="diffllama",
    architecture="DiffLlamaForCausalLM",
    settings=(
        decoder_sizes(eps=1e-5, paths=_PATHS),
        Check(
            lambda values: values["shape"].num_kv_heads % 2 == 0,
            "num_key_value_heads={shape.num_kv_heads} must be even: a differential head has two heads.",
        ),
        rope_settings(),
    ),
    build=diffllama,
    weights=(
        *ENDS,
        *PRE_NORMS,
        *_projection("q_proj", "mixer.query", "heads"),
        *_projection("k_proj", "mixer.key", "kv_heads"),
        *_projection("v_proj", "mixer.value", "kv_heads"),
        Weight(_ATTENTION + "o_proj.weight", "mixer.out", "embed (heads value_dim) -> heads value_dim embed"),
        Weight(_ATTENTION + "o_proj.bias", "mixer.out_bias", "embed -> embed"),
        *(Weight(f"{_ATTENTION}lambda_{n}", f"mixer.{path}", "head_dim -> head_dim") for n, path in _LAMBDAS.items()),
        *GATED_MLP,
    ),
    ignored_keys={"lambda_std_dev": "initialization only"},
)


MODELS = {
    "diffllama-1b": dict(
        model_type="diffllama", vocab_size=32_000, hidden_size=2048, num_hidden_layers=16, num_attention_heads=32,
        intermediate_size=8192,
    ),
}  # fmt: skip
