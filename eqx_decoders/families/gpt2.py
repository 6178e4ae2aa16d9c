"""GPT-2 (Radford et al. 2019), SantaCoder and StarCoder (Li et al. 2023), and GPT-J (Wang and Komatsuzaki 2021)."""

from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.common import (
    DecoderSizes,
    attentions,
    decoder_sizes,
    ends,
    fused_attention,
    plain_mlp,
    renamed,
)
from eqx_decoders.families.config_keys import ACTIVATIONS
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Defaults, Flag, Integer, Renamed, Rule, Setting, Values, only, value_at
from eqx_decoders.families.weight_rows import Weight, norm_weights, self_attention
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def _default_mlp(fields: Fields, values: Values) -> None:
    if fields.take("n_inner", None) is None:
        fields.content["n_inner"] = 4 * fields.integer("n_embd")


KEYS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
    **dict.fromkeys(("num_key_value_heads", "head_dim", "attention_bias")),
}
_TWINS = ("hidden_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers")


def defaults(**sizes: int) -> tuple[Setting, ...]:
    """Return the keys of config.json with defaults and other spellings that transformers accepts, as GPT-2's keys."""
    return Renamed({key: KEYS[key] for key in _TWINS}), Defaults(sizes), Rule("", _default_mlp)


DEFAULTS = defaults(vocab_size=50_257, n_embd=768, n_layer=12, n_head=12, n_positions=1024)
_SUMMARY = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
IGNORED_KEYS = {
    **dict.fromkeys((f"summary_{key}" for key in _SUMMARY), "for a classification head"),
    "n_ctx": "an older name of n_positions",
    **dict.fromkeys(("n_special", "predict_special_tokens"), "of the first GPT"),
}
# the causal mask, which old files store
IGNORED_TENSORS = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"
LAYER = "transformer.h.{layer}."
# embeddings, norms and the head
ENDS = (
    *ends("transformer.wte", "transformer.ln_f"),
    Weight("transformer.wpe.weight", "positions.table", "positions embed -> positions embed"),
    *norm_weights(LAYER, pre_mixer_norm="ln_1", pre_mlp_norm="ln_2"),
)


# --- GPT-2: LayerNorm with bias, learned positions, fused QKV, biases everywhere, tied head ---


def gpt2(
    shape: DecoderSizes, *, max_positions: int = 1024, scaled: bool = True, scaled_by_layer: bool = False
) -> DecoderConfig:
    """Return a decoder of GPT-2 blocks; the table of positions has `max_positions` rows.

    Scores are divided by the root of `head_dim` if `scaled`, and by the layer's number from 1 if `scaled_by_layer`.
    """
    norm, mlp = LayerNormConfig(eps=shape.eps), shape.mlp(gated=False, bias=True)
    options: dict[str, Any] = dict(rope=None, fused_qkv=True, qkv_bias=True, out_bias=True)

    def block(layer: int) -> BlockConfig:
        scale = None if scaled else 1.0
        if scaled_by_layer:
            scale = (shape.head_dim**-0.5 if scaled else 1.0) / layer
        return shape.block(shape.attention(query_scale=scale, **options), mlp, norm)

    blocks = map(block, range(1, shape.num_layers + 1))
    return shape.decoder(blocks, norm, positions=LearnedPositions(max_positions=max_positions))


def _scales(config: DecoderConfig) -> list[float | None]:
    return [mixer.query_scale for mixer in attentions(config)]


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    settings=(
        *DEFAULTS,
        decoder_sizes(
            eps=1e-5, tied=True, activation="gelu_new", keys=KEYS, words={"gelu_new": "gelu_tanh", **ACTIVATIONS}
        ),
        Integer("n_positions", "positions.max_positions"),
        Flag("scale_attn_weights", lambda config: _scales(config)[0] != 1.0, True, name="scaled"),
        Flag(
            "scale_attn_by_inverse_layer_idx",
            lambda config: len(set(_scales(config))) > 1,
            False,
            name="scaled_by_layer",
        ),
    ),
    build=gpt2,
    weights=(
        *ENDS,
        Weight(LAYER + "attn.c_attn.weight", "mixer.qkv", "embed (qkv_heads head_dim) -> embed qkv_heads head_dim"),
        Weight(LAYER + "attn.c_attn.bias", "mixer.qkv_bias", "(qkv_heads head_dim) -> qkv_heads head_dim"),
        Weight(LAYER + "attn.c_proj.weight", "mixer.out", "(heads head_dim) embed -> heads head_dim embed"),
        Weight(LAYER + "attn.c_proj.bias", "mixer.out_bias", "embed -> embed"),
        Weight(LAYER + "mlp.c_fc.weight", "mlp.up", "embed mlp -> embed mlp"),
        Weight(LAYER + "mlp.c_fc.bias", "mlp.up_bias", "mlp -> mlp"),
        Weight(LAYER + "mlp.c_proj.weight", "mlp.down", "mlp embed -> mlp embed"),
        Weight(LAYER + "mlp.c_proj.bias", "mlp.down_bias", "embed -> embed"),
    ),
    ignored_tensors=IGNORED_TENSORS,
    ignored_keys=IGNORED_KEYS | {"reorder_and_upcast_attn": "scores and softmax are in float32 here anyway"},
)


# --- SantaCoder and StarCoder: GPT-2 with one key head, whose matrices are stored as `[out, in]` ---


def gpt_bigcode(shape: DecoderSizes, *, max_positions: int = 1024, scaled: bool = True) -> DecoderConfig:
    """Return a decoder of GPT-2's blocks; scores are divided by the root of `head_dim` if `scaled`."""
    norm, mlp = LayerNormConfig(eps=shape.eps), shape.mlp(gated=False, bias=True)
    mixer = shape.attention(rope=None, qkv_bias=True, out_bias=True, query_scale=None if scaled else 1.0)
    return shape.decoder(shape.block(mixer, mlp, norm), norm, positions=LearnedPositions(max_positions=max_positions))


GPT_BIGCODE = Family(
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    settings=(
        *DEFAULTS,
        Flag("multi_query", lambda config: value_at(config, "attention").num_kv_heads == 1, True, name="_multi_query"),
        decoder_sizes(
            num_kv_heads=lambda values: 1 if values["_multi_query"] else values["num_heads"],
            eps=1e-5, tied=True, activation="gelu_pytorch_tanh", keys=KEYS,
        ),
        Integer("n_positions", "positions.max_positions"),
        Flag("scale_attn_weights", lambda x: value_at(x, "attention.query_scale") is None, True, name="scaled"),
    ),
    build=gpt_bigcode,
    weights=(
        *ENDS,
        *fused_attention(LAYER + "attn.", "c_attn", "c_proj"),
        *plain_mlp(LAYER + "mlp.", up="c_fc", down="c_proj"),
    ),
    ignored_tensors=IGNORED_TENSORS,
    ignored_keys=IGNORED_KEYS | {
        "attention_softmax_in_fp32 scale_attention_softmax_in_fp32": "softmax is in float32 here anyway",
        "inference_runner max_batch_size max_sequence_length pad_key_length pre_allocate_kv_cache "
        "validate_runner_input runner_max_sequence_length": "how it was run",
        "num_key_value_heads": "multi_query says it",
    },
)  # fmt: skip


_BIGCODE_KEYS = dict(model_type="gpt_bigcode", vocab_size=49_152, n_positions=8192)


# --- GPT-J: attention and MLP in parallel after one norm, pairs of neighbors rotated ---


def gptj(shape: DecoderSizes, *, rotary_dim: int = 64) -> DecoderConfig:
    """Return a decoder of GPT-J's blocks, which rotate the first `rotary_dim` features of a head."""
    norm, rope = LayerNormConfig(eps=shape.eps), Rope(fraction=rotary_dim / shape.head_dim, pairing="interleaved")
    block = shape.block(shape.attention(rope=rope), shape.mlp(gated=False, bias=True), norm, parallel=1)
    return shape.decoder(block, norm, head_bias=True)


def _rotary_dim(config: DecoderConfig) -> int:
    attention = value_at(config, "attention")
    return attention.rope.rotated(attention.head_dim)


GPTJ = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    settings=(
        *defaults(vocab_size=50_400, n_embd=4096, n_layer=28, n_head=16),
        decoder_sizes(eps=1e-5, activation="gelu_new", words={"gelu_new": "gelu_tanh", **ACTIVATIONS}, keys=KEYS),
        Integer("rotary_dim", _rotary_dim, 64, name="rotary_dim"),
        # these stand in published files, and transformers does not read them
        *only(rotary=True, scale_attn_weights=True),
    ),
    build=gptj,
    weights=(
        *ENDS,
        *renamed(self_attention(LAYER, "attn."), {"o_proj": "out_proj"}),
        *plain_mlp(LAYER + "mlp.", up="fc_in", down="fc_out"),
    ),
    ignored_tensors=IGNORED_TENSORS,
    ignored_keys=IGNORED_KEYS | {"n_positions": "a promise, not a limit: rotary positions have no table"},
)


FAMILIES = (GPT2, GPT_BIGCODE, GPTJ)

MODELS = {
    "gpt2": dict(model_type="gpt2"),
    "gpt2-medium": dict(model_type="gpt2", n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": dict(model_type="gpt2", n_embd=1280, n_layer=36, n_head=20),
    "gpt2-xl": dict(model_type="gpt2", n_embd=1600, n_layer=48, n_head=25),
    "santacoder-1.1b": _BIGCODE_KEYS | dict(vocab_size=49_280, n_embd=2048, n_layer=24, n_head=16, n_positions=2048),
    "starcoder-164m": _BIGCODE_KEYS | dict(n_layer=20),
    "starcoder-1b": _BIGCODE_KEYS | dict(n_embd=2048, n_layer=24, n_head=16),
    "starcoder-3b": _BIGCODE_KEYS | dict(n_embd=2816, n_layer=36, n_head=22),
    "starcoder-7b": _BIGCODE_KEYS | dict(n_embd=4096, n_layer=42, n_head=32),
    "starcoder-15b": _BIGCODE_KEYS | dict(n_embd=6144, n_layer=40, n_head=48),
    "gptj-6b": dict(model_type="gptj"),
}  # fmt: skip
