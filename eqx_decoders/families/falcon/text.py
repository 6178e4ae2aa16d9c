"""Falcon (Almazrouei et al. 2023): parallel attention and MLP, one key head (7B) or a few, LayerNorm, no biases.

Falcon-RW has sequential attention and MLP, ALiBi instead of RoPE, and biases.
"""

from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, ends, fused_attention, plain_mlp
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import AUTO_MAP, Flag, Integer, Renamed, Rule, Values, only, value_at
from eqx_decoders.families.weight_rows import norm
from eqx_decoders.layers.attention.alibi import Alibi
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def falcon(shape: DecoderSizes, *, rope: Rope = Rope(), norms: int = 1, alibi: bool = False) -> DecoderConfig:
    """Return a decoder of Falcon blocks.

    **Arguments:**

    - `shape`: sizes of the decoder; `shape.attention_bias` also adds biases to the MLP.
    - `rope`: rotary embedding; not used with `alibi`.
    - `norms`: 1: attention and MLP are parallel and share a norm. 2: they are parallel with separate norms. 0: the MLP
        follows attention.
    - `alibi`: whether attention has ALiBi, scaled like the queries.
    """
    layer_norm = LayerNormConfig(eps=shape.eps)
    mlp = shape.mlp(gated=False, bias=shape.attention_bias)
    if alibi:
        mixer = shape.attention(rope=None, alibi=Alibi(scale=shape.head_dim**-0.5, rounded=True))
    else:
        mixer = shape.attention(rope=rope)
    return shape.decoder(shape.block(mixer, mlp, layer_norm, parallel_norms=norms), layer_norm)


def _num_kv_heads(values: Values) -> int:
    """Return the number of key heads. Without `new_decoder_architecture`, transformers ignores `num_kv_heads`."""
    if values["_new_architecture"]:
        return values["_num_kv_heads"] or values["num_heads"]
    return 1 if values["_multi_query"] else values["num_heads"]


def _read_norms(fields: Fields, values: Values) -> int:
    is_new = values["_new_architecture"]
    is_parallel = fields.flag("parallel_attn", True)
    norms = fields.integer("num_ln_in_parallel_attn", 2 if is_new else 1)
    if norms > 2 or (norms == 2 and not is_new):
        raise fields.error(f"num_ln_in_parallel_attn={norms} must be 1, or 2 with new_decoder_architecture=true.")
    if norms == 2 and values["shape"].attention_bias:
        raise fields.error("bias=true is not implemented for parallel layers with two norms: use bias=false.")
    return norms if is_parallel or is_new else 0


def _write_architecture(config: DecoderConfig) -> dict[str, Any]:
    attention = value_at(config, "attention")
    block = config.blocks[0]
    is_parallel = block.residual_config.shares_norm
    norms = 1 if block.pre_mlp_norm is None else 2
    is_new = is_parallel and (norms == 2 or attention.num_kv_heads not in (1, attention.num_heads))
    return {
        "num_kv_heads": attention.num_kv_heads if is_new else attention.num_heads,
        "multi_query": is_new or attention.num_kv_heads == 1,
        "new_decoder_architecture": is_new,
        "parallel_attn": is_parallel,
        "num_ln_in_parallel_attn": norms if is_new else None,
    }


_KEYS: dict[str, str | None] = {
    "intermediate_size": "ffn_hidden_size", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation",
    "attention_bias": "bias", "num_key_value_heads": None, "head_dim": None,
}  # fmt: skip
_LAYER = "transformer.h.{layer}."
FAMILY = Family(
    model_type="falcon",
    architecture="FalconForCausalLM",
    settings=(
        AUTO_MAP,
        *only(apply_residual_connection_post_layernorm=False),
        Renamed({"n_embed": "hidden_size"}),
        Flag("alibi", "attention.alibi", False, name="alibi"),
        Flag("new_decoder_architecture", None, False, name="_new_architecture"),
        Flag("multi_query", None, True, name="_multi_query"),
        Integer("num_kv_heads", None, None, name="_num_kv_heads"),
        decoder_sizes(
            num_kv_heads=_num_kv_heads, mlp_dim=lambda values: 4 * values["embed_dim"], eps=1e-5, tied=True,
            activation="gelu", keys=_KEYS,
        ),
        Rule("norms", _read_norms, _write_architecture),
        rope_settings(unused=True),
    ),
    build=falcon,
    weights=(
        *ends("transformer.word_embeddings", "transformer.ln_f"),
        *fused_attention(_LAYER + "self_attention.", "query_key_value", "dense"),
        *plain_mlp(_LAYER + "mlp.", up="dense_h_to_4h", down="dense_4h_to_h"),
        *norm(_LAYER + "input_layernorm", "pre_mixer_norm"),
        *norm(_LAYER + "ln_attn", "pre_mixer_norm", needs="pre_mlp_norm.scale"),
        *norm(_LAYER + "ln_mlp", "pre_mlp_norm"),
        # of the models with biases, only the sequential ones have two norms
        *norm(_LAYER + "input_layernorm", "pre_mixer_norm", needs="mixer.query_bias"),
        *norm(_LAYER + "post_attention_layernorm", "pre_mlp_norm", needs="mixer.query_bias"),
    ),
    ignored_keys={"ff_factor": "ffn_hidden_size determines it"},
)  # fmt: skip


_BASE = dict(model_type="falcon", vocab_size=65_024)

MODELS = {
    "falcon-7b": _BASE | dict(hidden_size=4544, num_hidden_layers=32, num_attention_heads=71),
    "falcon-40b": _BASE | dict(
        hidden_size=8192, num_hidden_layers=60, num_attention_heads=128, num_kv_heads=8, new_decoder_architecture=True,
    ),
    "falcon-180b": _BASE | dict(
        hidden_size=14_848, num_hidden_layers=80, num_attention_heads=232, num_kv_heads=8,
        new_decoder_architecture=True,
    ),
    "falcon-rw-1b": _BASE | dict(
        vocab_size=50_304, hidden_size=2048, num_hidden_layers=24, num_attention_heads=32, alibi=True, bias=True,
        multi_query=False, parallel_attn=False,
    ),
    "falcon-rw-7b": _BASE | dict(
        hidden_size=4096, num_hidden_layers=36, num_attention_heads=64, alibi=True, bias=True, multi_query=False,
        parallel_attn=False,
    ),
    "falcon2-11b": _BASE | dict(
        hidden_size=4096, num_hidden_layers=60, num_attention_heads=32, num_kv_heads=8, new_decoder_architecture=True,
        num_ln_in_parallel_attn=1, rope_theta=500_042.0, tie_word_embeddings=False,
    ),
}  # fmt: skip
