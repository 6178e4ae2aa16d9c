"""RWKV-4 (Peng et al. 2023): recurrent time mixing with decay per channel, and channel mixing with a token shift."""

import functools

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.families.common import ends
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.mamba.blocks import MambaSizes
from eqx_decoders.families.settings_table import Flag, Group, Integer, Layers, Number
from eqx_decoders.families.weight_rows import Weight, norm_weights
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.recurrent.rwkv import ChannelMixConfig, TimeMixConfig
from eqx_decoders.model.decoder_config import DecoderConfig


def rwkv(shape: MambaSizes, *, channels: int | None = None, mlp_dim: int | None = None) -> DecoderConfig:
    """Return a decoder of RWKV-4 blocks.

    **Arguments:**

    - `shape`: sizes of the decoder; `shape.eps` does not apply to the final norm.
    - `channels`: number of channels of time mixing; None: `embed_dim`.
    - `mlp_dim`: number of hidden features of channel mixing; None: `4 * embed_dim`.
    """
    embed_dim = shape.embed_dim
    norm = LayerNormConfig(eps=shape.eps)
    mixer = TimeMixConfig(embed_dim=embed_dim, channels=channels or embed_dim)
    mlp = ChannelMixConfig(embed_dim=embed_dim, mlp_dim=mlp_dim or 4 * embed_dim)
    block = BlockConfig(mixer=mixer, mlp=mlp, pre_mixer_norm=norm, pre_mlp_norm=norm)
    return DecoderConfig(
        vocab_size=shape.vocab_size, embed_dim=embed_dim, blocks=(block,) * shape.num_layers, tied=shape.tied,
        embedding_norm=norm, final_norm=LayerNormConfig(eps=1e-5),
    )  # fmt: skip


_SIZES = (
    Integer("vocab_size", "vocab_size", 50_277),
    Integer("hidden_size", "embed_dim", 4096),
    Layers("num_hidden_layers", "blocks", 32, name="num_layers"),
    Number("layer_norm_epsilon", "embedding_norm.eps", 1e-5),
    Flag("tie_word_embeddings", "tied", False),
)
_LAYER = "rwkv.blocks.{layer}."
_INPUT_PATTERN = "mlp embed -> embed mlp"
FAMILY = Family(
    model_type="rwkv",
    architecture="RwkvForCausalLM",
    settings=(
        Group("shape", MambaSizes, _SIZES),
        Integer("attention_hidden_size", "blocks.0.mixer.channels", None),
        Integer("intermediate_size", "blocks.0.mlp.mlp_dim", None),
    ),
    build=rwkv,
    weights=(
        *ends("rwkv.embeddings", "rwkv.ln_out", "head"),
        *norm_weights("rwkv.", embedding_norm="blocks.0.pre_ln"),
        *norm_weights(_LAYER, pre_mixer_norm="ln1", pre_mlp_norm="ln2"),
        *(
            Weight(f"{_LAYER}{part}.time_mix_{name}", f"{path}_mix", "1 1 embed -> embed")
            for part, name, path in (
                ("attention", "key", "mixer.key"),
                ("attention", "value", "mixer.value"),
                ("attention", "receptance", "mixer.gate"),
                ("feed_forward", "key", "mlp.key"),
                ("feed_forward", "receptance", "mlp.gate"),
            )
        ),
        Weight(_LAYER + "attention.time_decay", "mixer.decay", "mlp -> mlp"),
        Weight(_LAYER + "attention.time_first", "mixer.bonus", "mlp -> mlp"),
        Weight(_LAYER + "attention.key.weight", "mixer.key", _INPUT_PATTERN),
        Weight(_LAYER + "attention.value.weight", "mixer.value", _INPUT_PATTERN),
        Weight(_LAYER + "attention.receptance.weight", "mixer.gate", _INPUT_PATTERN),
        Weight(_LAYER + "attention.output.weight", "mixer.out", "embed mlp -> mlp embed"),
        Weight(_LAYER + "feed_forward.key.weight", "mlp.key", _INPUT_PATTERN),
        Weight(_LAYER + "feed_forward.receptance.weight", "mlp.gate", "outer embed -> embed outer"),
        Weight(_LAYER + "feed_forward.value.weight", "mlp.value", "embed mlp -> mlp embed"),
    ),
    ignored_keys={"context_length rescale_every": "runtime option; it changes no output"},
)

_sizes = functools.partial(MambaSizes, vocab_size=50_277)
_SHAPES = {
    "rwkv4-169m": _sizes(embed_dim=768, num_layers=12),
    "rwkv4-430m": _sizes(embed_dim=1024, num_layers=24),
    "rwkv4-1.5b": _sizes(embed_dim=2048, num_layers=24),
    "rwkv4-3b": _sizes(embed_dim=2560, num_layers=32),
    "rwkv4-7b": _sizes(embed_dim=4096, num_layers=32),
    "rwkv4-14b": _sizes(embed_dim=5120, num_layers=40),
}

MODELS = {name: functools.partial(rwkv, shape) for name, shape in _SHAPES.items()}
