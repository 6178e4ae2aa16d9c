"""GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023): attention and MLP in parallel, each with its norm."""

import functools
from typing import Any

from eqx_decoders.families.common import DecoderSizes, decoder_sizes, fused_attention, gpt_sizes, norm, plain_mlp
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Flag, Number, Renamed
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def gpt_neox(shape: DecoderSizes, *, rope: Rope = Rope(fraction=0.25), parallel: bool = True) -> DecoderConfig:
    """Return a decoder of GPT-NeoX blocks, whose attention and MLP follow one another unless `parallel`."""
    mixer, mlp = shape.attention(rope=rope), shape.mlp(gated=False, bias=True)
    layer_norm = LayerNormConfig(eps=shape.eps)
    options: dict[str, Any] = {"residual": "parallel"} if parallel else {}
    return shape.decoder(shape.block(mixer, mlp, layer_norm, **options), layer_norm)


_KEYS = {"rms_norm_eps": "layer_norm_eps", "num_key_value_heads": None, "head_dim": None}
_LAYER = "gpt_neox.layers.{layer}."
FAMILY = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    settings=(
        decoder_sizes(eps=1e-5, activation="gelu", attention_bias=True, keys=_KEYS),
        Flag("use_parallel_residual", "blocks.0.residual.shares_norm", True, name="parallel"),
        Renamed({"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}),
        rope_settings(fraction=0.25),
        # read above, and written as transformers 4 reads them
        Number("rotary_pct", "attention.rope.fraction", None, name="_fraction"),
        Number("rotary_emb_base", "attention.rope.theta", None, name="_theta"),
    ),
    build=gpt_neox,
    weights=(
        Weight("gpt_neox.embed_in.weight", "embedding.table", "vocab embed -> vocab embed"),
        *norm(_LAYER + "input_layernorm", "pre_mixer_norm"),
        *norm(_LAYER + "post_attention_layernorm", "pre_mlp_norm"),
        *fused_attention(_LAYER + "attention.", "query_key_value", "dense"),
        *plain_mlp(_LAYER + "mlp.", up="dense_h_to_4h", down="dense_4h_to_h"),
        *norm("gpt_neox.final_layer_norm", "final_norm"),
        Weight("embed_out.weight", "head.kernel", "vocab embed -> embed vocab"),
    ),
    prefix="gpt_neox.",
    ignored_keys={"classifier_dropout": "dropout happens in training only"},
    # the causal mask and frequencies, which old files store
    ignored_tensors=r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
)


def _model(*sizes: int, vocab_size: int = 50_304, activation: str = "gelu") -> DecoderConfig:
    return gpt_neox(gpt_sizes(*sizes, vocab_size=vocab_size, eps=1e-5, activation=activation, attention_bias=True))


MODELS = {
    "pythia-14m": functools.partial(_model, 128, 6, 4),
    "pythia-31m": functools.partial(_model, 256, 6, 8),
    "pythia-70m": functools.partial(_model, 512, 6, 8),
    "pythia-160m": functools.partial(_model, 768, 12, 12),
    "pythia-410m": functools.partial(_model, 1024, 24, 16),
    "pythia-1b": functools.partial(_model, 2048, 16, 8),
    "pythia-1.4b": functools.partial(_model, 2048, 24, 16),
    "pythia-2.8b": functools.partial(_model, 2560, 32, 32),
    "pythia-6.9b": functools.partial(_model, 4096, 32, 32, vocab_size=50_432),
    "pythia-12b": functools.partial(_model, 5120, 36, 40, vocab_size=50_688),
    "gpt-neox-20b": functools.partial(_model, 6144, 44, 64, vocab_size=50_432, activation="gelu_tanh"),
}
