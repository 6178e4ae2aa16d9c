"""MPT (MosaicML 2023): ALiBi, LayerNorm without biases, GELU MLPs without a gate, optional clipping of QKV."""

from eqx_decoders.families.common import DecoderSizes, decoder_sizes, ends, plain_mlp
from eqx_decoders.families.family import Family
from eqx_decoders.families.setting_rows import AUTO_MAP, Number, Only, Renamed, Table
from eqx_decoders.families.weight_rows import Weight, norm_weights
from eqx_decoders.layers.attention.alibi import Alibi
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.model.decoder_config import DecoderConfig


def mpt(shape: DecoderSizes, *, clip: float | None = None, scale: float | None = None) -> DecoderConfig:
    """Return a decoder of MPT blocks.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `clip`: queries, keys and values are clipped to `[-clip, clip]`; None: they are not clipped.
    - `scale`: factor of the queries; None: `head_dim ** -0.5`.
    """
    layer_norm = LayerNormConfig(eps=shape.eps, bias=False)
    mixer = shape.attention(rope=None, alibi=Alibi(), fused_qkv=True, qkv_clip=clip, query_scale=scale)
    return shape.decoder(shape.block(mixer, shape.mlp(gated=False), layer_norm), layer_norm)


_KEY_NAMES = {
    "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    "rms_norm_eps": "layer_norm_epsilon",
    **dict.fromkeys(("num_key_value_heads", "head_dim", "intermediate_size", "hidden_act", "attention_bias")),
}  # fmt: skip
# the supported values of keys in attn_config
_ATTENTION_VALUES = dict(alibi=True, alibi_bias_max=8, qk_ln=False, prefix_lm=False, attn_type="multihead_attention")
_LAYER = "transformer.blocks.{layer}."
FAMILY = Family(
    model_type="mpt",
    architecture="MptForCausalLM",
    settings=(
        Renamed({key: _KEY_NAMES[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}),
        decoder_sizes(
            mlp_dim=lambda values: 4 * values["embed_dim"], eps=1e-5, tied=True, activation="gelu", keys=_KEY_NAMES
        ),
        Table(
            "attn_config",
            (
                Number("clip_qkv", "attention.qkv_clip", None, name="clip"),
                Number("softmax_scale", "attention.query_scale", None, name="scale"),
                *(Only(key, value, written=True) for key, value in _ATTENTION_VALUES.items()),
            ),
            what="attention",
            ignored={
                "attn_pdrop": "dropout is used in training only",
                "attn_impl": "runtime option; it changes no output",
                "attn_uses_sequence_id": "segment_ids determine the document of a token",
            },
        ),
        Only("no_bias", True, written=True),
        Only("logit_scale", written=True),
        Only("norm_type", "low_precision_layernorm", "layernorm", written=True),
        AUTO_MAP,
    ),
    build=mpt,
    weights=(
        *ends("transformer.wte", "transformer.norm_f"),
        *norm_weights(_LAYER, pre_mixer_norm="norm_1", pre_mlp_norm="norm_2"),
        Weight(_LAYER + "attn.Wqkv.weight", "mixer.qkv", "(qkv_heads head_dim) embed -> embed qkv_heads head_dim"),
        Weight(_LAYER + "attn.out_proj.weight", "mixer.out", "embed (heads head_dim) -> heads head_dim embed"),
        *plain_mlp(_LAYER + "ffn."),
    ),
    other_architectures=("MPTForCausalLM",),
    ignored_keys={
        "expansion_ratio": "transformers always uses MLPs with 4 * d_model hidden features",
        "learned_pos_emb max_seq_len": "ALiBi needs no position embeddings",
        "embedding_fraction emb_pdrop resid_pdrop init_device init_config": "initialization and training only",
        "tokenizer_name verbose": "not a setting of the model",
    },
)


_BASE = dict(model_type="mpt", vocab_size=50_432, attn_config=dict())

MODELS = {
    "mpt-7b": _BASE | dict(d_model=4096, n_layers=32, n_heads=32),
    "mpt-30b": _BASE | dict(d_model=7168, n_layers=48, n_heads=64),
}  # fmt: skip
