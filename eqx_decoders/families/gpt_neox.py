"""GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023): attention and MLP in parallel, each with its norm."""

import functools

from eqx_decoders.families.common import DecoderSizes, decoder_sizes, ends, fused_attention, gpt_sizes, plain_mlp
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Flag, Number
from eqx_decoders.families.weight_rows import norm_weights
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def gpt_neox(shape: DecoderSizes, *, rope: Rope = Rope(fraction=0.25), parallel: bool = True) -> DecoderConfig:
    """Return a decoder of GPT-NeoX blocks, whose attention and MLP follow one another unless `parallel`."""
    norm, mlp = LayerNormConfig(eps=shape.eps), shape.mlp(gated=False, bias=True)
    return shape.decoder(shape.block(shape.attention(rope=rope), mlp, norm, parallel=2 if parallel else 0), norm)


_KEYS = {"rms_norm_eps": "layer_norm_eps", "num_key_value_heads": None, "head_dim": None}
_LAYER = "gpt_neox.layers.{layer}."
FAMILY = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    settings=(
        decoder_sizes(eps=1e-5, activation="gelu", attention_bias=True, keys=_KEYS),
        Flag("use_parallel_residual", "blocks.0.residual.shares_norm", True, name="parallel"),
        # for the rotary embedding, also in the spelling that transformers 4 reads
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
    ignored_keys={"classifier_dropout": "dropout happens in training only"},
    # the causal mask and frequencies, which old files store
    ignored_tensors=r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
)

_sizes = functools.partial(gpt_sizes, vocab_size=50_304, eps=1e-5, activation="gelu", attention_bias=True)

MODELS = {
    "pythia-14m": lambda: gpt_neox(_sizes(128, 6, 4)),
    "pythia-31m": lambda: gpt_neox(_sizes(256, 6, 8)),
    "pythia-70m": lambda: gpt_neox(_sizes(512, 6, 8)),
    "pythia-160m": lambda: gpt_neox(_sizes(768, 12, 12)),
    "pythia-410m": lambda: gpt_neox(_sizes(1024, 24, 16)),
    "pythia-1b": lambda: gpt_neox(_sizes(2048, 16, 8)),
    "pythia-1.4b": lambda: gpt_neox(_sizes(2048, 24, 16)),
    "pythia-2.8b": lambda: gpt_neox(_sizes(2560, 32, 32)),
    "pythia-6.9b": lambda: gpt_neox(_sizes(4096, 32, 32, vocab_size=50_432)),
    "pythia-12b": lambda: gpt_neox(_sizes(5120, 36, 40, vocab_size=50_688)),
    "gpt-neox-20b": lambda: gpt_neox(_sizes(6144, 44, 64, vocab_size=50_432, activation="gelu_tanh")),
}
