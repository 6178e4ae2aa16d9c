"""GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023): parallel attention and MLP with separate norms."""

from eqx_decoders.families.common import DecoderSizes, decoder_sizes, ends, fused_attention, plain_mlp
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Flag, Number
from eqx_decoders.families.weight_rows import norm_weights
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def gpt_neox(shape: DecoderSizes, *, rope: Rope = Rope(fraction=0.25), parallel: bool = True) -> DecoderConfig:
    """Return a decoder of GPT-NeoX blocks; `parallel=False`: the MLP follows attention."""
    norm = LayerNormConfig(eps=shape.eps)
    mlp = shape.mlp(gated=False, bias=True)
    return shape.decoder(shape.block(shape.attention(rope=rope), mlp, norm, parallel_norms=2 if parallel else 0), norm)


_KEY_NAMES = {"rms_norm_eps": "layer_norm_eps", "num_key_value_heads": None, "head_dim": None}
_LAYER = "gpt_neox.layers.{layer}."
FAMILY = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    settings=(
        decoder_sizes(eps=1e-5, activation="gelu", attention_bias=True, keys=_KEY_NAMES),
        Flag("use_parallel_residual", "blocks.0.residual.shares_norm", True, name="parallel"),
        # keys of the rotary embedding, also with the names that transformers 4 reads
        Number("partial_rotary_factor", "attention.rope.fraction", None, name="_fraction", twin="rotary_pct"),
        Number("rope_theta", "attention.rope.theta", None, name="_theta", twin="rotary_emb_base"),
        rope_settings(fraction=0.25),
    ),
    build=gpt_neox,
    weights=(
        *ends("gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),
        *norm_weights(_LAYER, pre_mixer_norm="input_layernorm", pre_mlp_norm="post_attention_layernorm"),
        *fused_attention(_LAYER + "attention.", "query_key_value", "dense"),
        *plain_mlp(_LAYER + "mlp.", up="dense_h_to_4h", down="dense_4h_to_h"),
    ),
    ignored_keys={"classifier_dropout": "dropout is used in training only"},
    # old files store the causal mask and the RoPE frequencies
    ignored_tensors=r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
)


_BASE = dict(model_type="gpt_neox", vocab_size=50_304)

MODELS = {
    "pythia-14m": _BASE | dict(hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=512),
    "pythia-31m": _BASE | dict(hidden_size=256, num_hidden_layers=6, num_attention_heads=8, intermediate_size=1024),
    "pythia-70m": _BASE | dict(hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=2048),
    "pythia-160m": _BASE | dict(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
    ),
    "pythia-410m": _BASE | dict(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
    ),
    "pythia-1b": _BASE | dict(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=8, intermediate_size=8192,
    ),
    "pythia-1.4b": _BASE | dict(
        hidden_size=2048, num_hidden_layers=24, num_attention_heads=16, intermediate_size=8192,
    ),
    "pythia-2.8b": _BASE | dict(
        hidden_size=2560, num_hidden_layers=32, num_attention_heads=32, intermediate_size=10_240,
    ),
    "pythia-6.9b": _BASE | dict(
        vocab_size=50_432, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=16_384,
    ),
    "pythia-12b": _BASE | dict(
        vocab_size=50_688, hidden_size=5120, num_hidden_layers=36, num_attention_heads=40, intermediate_size=20_480,
    ),
    "gpt-neox-20b": _BASE | dict(
        vocab_size=50_432, hidden_size=6144, num_hidden_layers=44, num_attention_heads=64, intermediate_size=24_576,
        hidden_act="gelu_pytorch_tanh",
    ),
}  # fmt: skip
