"""OPT (Zhang et al. 2022): learned positions with an offset of 2, LayerNorm, ReLU MLPs without a gate, biases.

OPT 350M has post-norms, and embeddings with fewer features than the stream.
"""

import dataclasses

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.residual.residual import PostNorm
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, ends, plain_mlp, renamed
from eqx_decoders.families.family import Family
from eqx_decoders.families.setting_rows import Flag, Integer, Rule, Values, only
from eqx_decoders.families.weight_rows import Weight, norm_weights, self_attention
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.layers.embedding.head_transform import HeadTransformConfig
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.model.decoder_config import DecoderConfig


def opt(
    shape: DecoderSizes,
    *,
    max_positions: int = 2048,
    bias: bool = True,
    rank: int | None = None,
    norm_first: bool = True,
    affine_norms: bool = True,
    remove_final_norm: bool = False,
) -> DecoderConfig:
    """Return a decoder of OPT blocks.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `max_positions`: number of learned positions.
    - `bias`: whether projections have biases.
    - `rank`: number of features of the embeddings; None: the features of the stream.
    - `norm_first`: True: norms before attention and MLP (pre-norm). False: norms after residual sums (post-norm).
    - `affine_norms`: whether norms have scales and biases.
    - `remove_final_norm`: whether the decoder has no final norm; with `norm_first=False` it never has a final norm.
    """
    mixer = shape.attention(rope=None, qkv_bias=bias, out_bias=bias)
    mlp = shape.mlp(gated=False, bias=bias)
    norm = LayerNormConfig(eps=1e-5, scale=affine_norms, bias=affine_norms)
    if norm_first:
        block = shape.block(mixer, mlp, norm)
    else:
        block = BlockConfig(mixer=mixer, mlp=mlp, residual=PostNorm(norm=norm))
    config = shape.decoder(
        block,
        norm,
        positions=LearnedPositions(max_positions=max_positions, offset=2),
        embedding_rank=rank,
        head_transform=None if rank is None else HeadTransformConfig(features=rank, activation="identity"),
    )
    has_final_norm = norm_first and not remove_final_norm
    return config if has_final_norm else dataclasses.replace(config, final_norm=None)


def _norm_first(config: DecoderConfig) -> bool:
    return not isinstance(config.residual, PostNorm)


def _has_affine_norms(config: DecoderConfig) -> bool:
    residual = config.residual
    norm = residual.norm if isinstance(residual, PostNorm) else config.blocks[0].pre_mixer_norm
    return norm is not None and norm.scale


def _removes_final_norm(config: DecoderConfig) -> bool:
    return _norm_first(config) and config.final_norm is None


def _read_rank(fields: Fields, values: Values) -> int | None:
    features = values["_embedding_features"]
    return None if features == values["shape"].embed_dim else features


_KEY_NAMES = {
    "intermediate_size": "ffn_dim",
    "hidden_act": "activation_function",
    "initializer_range": "init_std",
    **dict.fromkeys(("num_key_value_heads", "head_dim", "attention_bias", "rms_norm_eps")),
}
_PREFIX = "model.decoder."
_LAYER = _PREFIX + "layers.{layer}."
FAMILY = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    settings=(
        decoder_sizes(tied=True, activation="relu", keys=_KEY_NAMES),
        Integer("max_position_embeddings", "positions.max_positions", 2048, name="max_positions"),
        Flag("enable_bias", "attention.qkv_bias", True, name="bias"),
        Integer(
            "word_embed_proj_dim",
            "table_features",
            lambda values: values["shape"].embed_dim,
            name="_embedding_features",
        ),
        Rule("rank", _read_rank),
        Flag("do_layer_norm_before", _norm_first, True, name="norm_first"),
        Flag("layer_norm_elementwise_affine", _has_affine_norms, True, name="affine_norms"),
        Flag("_remove_final_layer_norm", _removes_final_norm, False, name="remove_final_norm"),
        *only(learned_embeddings=True, scale_embeddings=False),
    ),
    build=opt,
    weights=(
        *ends(_PREFIX + "embed_tokens", _PREFIX + "final_layer_norm"),
        Weight(_PREFIX + "project_in.weight", "embedding.projection.kernel", "embed inner -> inner embed"),
        Weight(_PREFIX + "project_out.weight", "head_transform.kernel", "outer embed -> embed outer"),
        Weight(_PREFIX + "embed_positions.weight", "positions.table", "positions embed -> positions embed"),
        *norm_weights(_LAYER, pre_mixer_norm="self_attn_layer_norm", pre_mlp_norm="final_layer_norm"),
        *norm_weights(_LAYER, **{"residual.norms.0": "self_attn_layer_norm", "residual.norms.1": "final_layer_norm"}),
        *renamed(self_attention(_LAYER), {"o_proj": "out_proj"}),
        *plain_mlp(_LAYER, up="fc1", down="fc2"),
    ),
    ignored_keys={"dropout layerdrop activation_dropout": "dropout is used in training only"},
)

_BASE = dict(model_type="opt", vocab_size=50_272)

MODELS = {
    "opt-125m": _BASE | dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, ffn_dim=3072),
    "opt-350m": _BASE | dict(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, ffn_dim=4096, do_layer_norm_before=False,
        word_embed_proj_dim=512,
    ),
    "opt-1.3b": _BASE | dict(hidden_size=2048, num_hidden_layers=24, num_attention_heads=32, ffn_dim=8192),
    "opt-2.7b": _BASE | dict(hidden_size=2560, num_hidden_layers=32, num_attention_heads=32, ffn_dim=10_240),
    "opt-6.7b": _BASE | dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, ffn_dim=16_384),
    "opt-13b": _BASE | dict(hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, ffn_dim=20_480),
    "opt-30b": _BASE | dict(hidden_size=7168, num_hidden_layers=48, num_attention_heads=56, ffn_dim=28_672),
    "opt-66b": _BASE | dict(hidden_size=9216, num_hidden_layers=64, num_attention_heads=72, ffn_dim=36_864),
}  # fmt: skip
