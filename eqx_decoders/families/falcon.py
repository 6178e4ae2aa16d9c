"""Falcon (Almazrouei et al. 2023): attention and MLP in parallel, one key head (7B) or few, LayerNorm, no biases.

Falcon-RW: one after the other, with ALiBi and biases.
"""

from typing import Any

from eqx_decoders.families.common import DecoderSizes, decoder_sizes, fused_attention, gpt_sizes, norm, plain_mlp
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import AUTO_MAP, Flag, Renamed, Rule, Values, only, value_at
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.attention.alibi import Alibi
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def falcon(
    shape: DecoderSizes, *, rope: Rope = Rope(), norms: int = 1, parallel: bool = True, alibi: bool = False
) -> DecoderConfig:
    """Return a decoder of Falcon blocks, whose attention and MLP share a norm or, with `norms=2`, have one each.

    Unless `parallel` they follow one another. With `alibi`, which is scaled as the queries, nothing is rotated.
    """
    layer_norm, mlp = LayerNormConfig(eps=shape.eps), shape.mlp(gated=False, bias=shape.attention_bias)
    biases = Alibi(scale=shape.head_dim**-0.5, rounded=True) if alibi else None
    mixer = shape.attention(rope=None if alibi else rope, alibi=biases)
    if not parallel:
        return shape.decoder(shape.block(mixer, mlp, layer_norm), layer_norm)
    return shape.decoder(shape.parallel_block(mixer, mlp, layer_norm, norms=norms), layer_norm)


def _read_form(fields: Fields, values: Values) -> int:
    """Read the number of norms; fill in the MLP's width, and the number of key heads: in old files one or all."""
    heads, new = fields.integer("num_attention_heads"), fields.flag("new_decoder_architecture", False)
    multi_query, own = fields.flag("multi_query", True), fields.integer("num_kv_heads", heads)
    fields.content["num_kv_heads"] = own if new else 1 if multi_query else heads
    fields.content["ffn_hidden_size"] = fields.integer("ffn_hidden_size", 4 * fields.integer("hidden_size"))
    norms = fields.integer("num_ln_in_parallel_attn", 2 if new else 1)
    if norms > 2 or (norms == 2 and not new):
        raise fields.error(f"num_ln_in_parallel_attn={norms} needs new_decoder_architecture=true, and is at most 2.")
    if norms == 2 and fields.content.get("bias"):
        raise fields.error("bias=true with two norms of parallel layers is not implemented.")
    return norms


def _read_parallel(fields: Fields, values: Values) -> bool:
    return fields.flag("parallel_attn", True) or fields.flag("new_decoder_architecture", False)


def _write_form(config: DecoderConfig) -> dict[str, Any]:
    attention, block = value_at(config, "attention"), config.blocks[0]
    parallel, norms = block.residual.shares_norm, 1 if block.pre_mlp_norm is None else 2
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    form = {"num_kv_heads": heads, "multi_query": kv_heads == 1, "new_decoder_architecture": False}
    if parallel and (norms == 2 or kv_heads not in (1, heads)):
        form = {"num_kv_heads": kv_heads, "multi_query": True, "new_decoder_architecture": True}
    form["parallel_attn"] = parallel
    return form | {"num_ln_in_parallel_attn": norms if form["new_decoder_architecture"] else None}


def _write_unused_rope(config: DecoderConfig) -> dict[str, Any]:
    """Return the settings that transformers always writes, where nothing is rotated."""
    unused = {"rope_parameters": {"rope_type": "default", "rope_theta": Rope().theta}}
    return {} if value_at(config, "attention").rope is not None else unused


_KEYS: dict[str, str | None] = {
    "intermediate_size": "ffn_hidden_size", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation",
    "attention_bias": "bias", "num_key_value_heads": "num_kv_heads", "head_dim": None,
}  # fmt: skip
_LAYER = "transformer.h.{layer}."
FAMILY = Family(
    model_type="falcon",
    architecture="FalconForCausalLM",
    settings=(
        Renamed({"n_embed": "hidden_size"}),
        Flag("alibi", lambda config: value_at(config, "attention").alibi is not None, False, name="alibi"),
        AUTO_MAP,
        *only(apply_residual_connection_post_layernorm=False),
        Rule("norms", _read_form),
        Rule("parallel", _read_parallel),
        decoder_sizes(eps=1e-5, tied=True, activation="gelu", keys=_KEYS),
        Rule("", lambda fields, values: None, _write_form),  # its number of key heads counts
        rope_settings(required=False),
        Rule("", lambda fields, values: None, _write_unused_rope),
    ),
    build=falcon,
    weights=(
        Weight("transformer.word_embeddings.weight", "embedding.table", "vocab embed -> vocab embed"),
        *norm(_LAYER + "input_layernorm", "pre_mixer_norm"),
        *norm(_LAYER + "ln_attn", "pre_mixer_norm", needs="pre_mlp_norm.scale"),
        *norm(_LAYER + "ln_mlp", "pre_mlp_norm"),
        # of models with biases only those whose layers follow one another have two norms
        *norm(_LAYER + "input_layernorm", "pre_mixer_norm", needs="mixer.query_bias"),
        *norm(_LAYER + "post_attention_layernorm", "pre_mlp_norm", needs="mixer.query_bias"),
        *fused_attention(_LAYER + "self_attention.", "query_key_value", "dense"),
        *plain_mlp(_LAYER + "mlp.", up="dense_h_to_4h", down="dense_4h_to_h"),
        *norm("transformer.ln_f", "final_norm"),
        Weight("lm_head.weight", "head.kernel", "vocab embed -> embed vocab"),
    ),
    prefix="transformer.",
    ignored_keys={"ff_factor": "ffn_hidden_size says it"},
)


def _falcon_rw(*sizes: int, vocab_size: int = 65_024) -> DecoderConfig:
    shape = gpt_sizes(*sizes, vocab_size=vocab_size, eps=1e-5, activation="gelu", tied=True, attention_bias=True)
    return falcon(shape, parallel=False, alibi=True)


def _model(*sizes: int, norms: int = 2, tied: bool = True, rope: Rope = Rope()) -> DecoderConfig:
    shape = gpt_sizes(*sizes, vocab_size=65_024, eps=1e-5, activation="gelu", tied=tied)
    return falcon(shape, norms=norms, rope=rope)


MODELS = {
    "falcon-7b": lambda: _model(4544, 32, 71, 1, norms=1),
    "falcon-40b": lambda: _model(8192, 60, 128, 8),
    "falcon-180b": lambda: _model(14_848, 80, 232, 8),
    "falcon-rw-1b": lambda: _falcon_rw(2048, 24, 32, vocab_size=50_304),
    "falcon-rw-7b": lambda: _falcon_rw(4096, 36, 64),
    "falcon2-11b": lambda: _model(4096, 60, 32, 8, norms=1, tied=False, rope=Rope(theta=500_042.0)),
}
