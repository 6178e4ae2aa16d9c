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
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rotated_features
from eqx_decoders.families.setting_rows import Defaults, Flag, Integer, Renamed, Rule, Setting, Values, only, value_at
from eqx_decoders.families.weight_rows import Weight, norm_weights, self_attention
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def _default_mlp_dim(fields: Fields, values: Values) -> None:
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
_OTHER_SPELLINGS = ("hidden_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers")


def defaults(**sizes: int) -> tuple[Setting, ...]:
    """Return the settings rows that convert other spellings of GPT-2's keys and add transformers' default `sizes`."""
    return Renamed({key: KEYS[key] for key in _OTHER_SPELLINGS}), Defaults(sizes), Rule("", _default_mlp_dim)


DEFAULTS = defaults(vocab_size=50_257, n_embd=768, n_layer=12, n_head=12, n_positions=1024)
IGNORED_KEYS = {
    "summary_type summary_use_proj summary_activation summary_proj_to_labels "
    "summary_first_dropout": "for a classification head",
    "n_ctx": "older name of n_positions",
    "n_special predict_special_tokens": "setting of GPT-1",
}
# old files store the causal mask
IGNORED_TENSORS = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"
LAYER = "transformer.h.{layer}."
# weight rows of embeddings, norms and the head
ENDS = (
    *ends("transformer.wte", "transformer.ln_f"),
    Weight("transformer.wpe.weight", "positions.table", "positions embed -> positions embed"),
    *norm_weights(LAYER, pre_mixer_norm="ln_1", pre_mlp_norm="ln_2"),
)


# --- GPT-2: LayerNorm with bias, learned positions, fused QKV, biases everywhere, tied head ---


def gpt2(
    shape: DecoderSizes, *, max_positions: int = 1024, scaled: bool = True, scaled_by_layer: bool = False
) -> DecoderConfig:
    """Return a decoder of GPT-2 blocks.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `max_positions`: number of learned positions.
    - `scaled`: whether attention scores are divided by the square root of `head_dim`.
    - `scaled_by_layer`: whether attention scores are also divided by the index of the layer, from 1.
    """
    norm = LayerNormConfig(eps=shape.eps)
    mlp = shape.mlp(gated=False, bias=True)
    options: dict[str, Any] = dict(rope=None, fused_qkv=True, qkv_bias=True, out_bias=True)

    def block(layer: int) -> BlockConfig:
        scale = None if scaled else 1.0
        if scaled_by_layer:
            scale = (shape.head_dim**-0.5 if scaled else 1.0) / layer
        return shape.block(shape.attention(query_scale=scale, **options), mlp, norm)

    blocks = map(block, range(1, shape.num_layers + 1))
    return shape.decoder(blocks, norm, positions=LearnedPositions(max_positions=max_positions))


def _query_scales(config: DecoderConfig) -> list[float | None]:
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
        Flag("scale_attn_weights", lambda config: _query_scales(config)[0] != 1.0, True, name="scaled"),
        Flag(
            "scale_attn_by_inverse_layer_idx",
            lambda config: any(scale not in (None, 1.0) for scale in _query_scales(config)),
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
    ignored_keys=IGNORED_KEYS | {"reorder_and_upcast_attn": "scores and softmax are always computed in float32"},
)


# --- SantaCoder and StarCoder: GPT-2 with one key head; checkpoints store matrices as `[out, in]` ---


def gpt_bigcode(shape: DecoderSizes, *, max_positions: int = 1024, scaled: bool = True) -> DecoderConfig:
    """Return a decoder of GPT-2 blocks with `shape.num_kv_heads` key heads; the arguments are those of `gpt2`."""
    norm = LayerNormConfig(eps=shape.eps)
    mlp = shape.mlp(gated=False, bias=True)
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
        "attention_softmax_in_fp32 scale_attention_softmax_in_fp32": "softmax is always computed in float32",
        "inference_runner max_batch_size max_sequence_length pad_key_length pre_allocate_kv_cache "
        "validate_runner_input runner_max_sequence_length": "runtime option; it changes no output",
        "num_key_value_heads": "multi_query determines it",
    },
)  # fmt: skip


_BIGCODE_BASE = dict(model_type="gpt_bigcode", vocab_size=49_152, n_positions=8192)


# --- GPT-J: parallel attention and MLP with a shared norm, RoPE with interleaved pairs ---


def gptj(shape: DecoderSizes, *, rotary_dim: int = 64) -> DecoderConfig:
    """Return a decoder of GPT-J blocks, in which RoPE rotates the first `rotary_dim` features of each head."""
    norm = LayerNormConfig(eps=shape.eps)
    rope = Rope(fraction=rotary_dim / shape.head_dim, pairing="interleaved")
    block = shape.block(shape.attention(rope=rope), shape.mlp(gated=False, bias=True), norm, parallel_norms=1)
    return shape.decoder(block, norm, head_bias=True)


GPTJ = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    settings=(
        *defaults(vocab_size=50_400, n_embd=4096, n_layer=28, n_head=16),
        decoder_sizes(eps=1e-5, activation="gelu_new", words={"gelu_new": "gelu_tanh", **ACTIVATIONS}, keys=KEYS),
        Integer("rotary_dim", rotated_features, 64, name="rotary_dim"),
        # published files have these keys; transformers does not read them
        *only(rotary=True, scale_attn_weights=True),
    ),
    build=gptj,
    weights=(
        *ENDS,
        *renamed(self_attention(LAYER, "attn."), {"o_proj": "out_proj"}),
        *plain_mlp(LAYER + "mlp.", up="fc_in", down="fc_out"),
    ),
    ignored_tensors=IGNORED_TENSORS,
    ignored_keys=IGNORED_KEYS | {"n_positions": "rotary embeddings have no maximum length"},
)


FAMILIES = (GPT2, GPT_BIGCODE, GPTJ)

MODELS = {
    "gpt2": dict(model_type="gpt2"),
    "gpt2-medium": dict(model_type="gpt2", n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": dict(model_type="gpt2", n_embd=1280, n_layer=36, n_head=20),
    "gpt2-xl": dict(model_type="gpt2", n_embd=1600, n_layer=48, n_head=25),
    "santacoder-1.1b": _BIGCODE_BASE | dict(vocab_size=49_280, n_embd=2048, n_layer=24, n_head=16, n_positions=2048),
    "starcoder-164m": _BIGCODE_BASE | dict(n_layer=20),
    "starcoder-1b": _BIGCODE_BASE | dict(n_embd=2048, n_layer=24, n_head=16),
    "starcoder-3b": _BIGCODE_BASE | dict(n_embd=2816, n_layer=36, n_head=22),
    "starcoder-7b": _BIGCODE_BASE | dict(n_embd=4096, n_layer=42, n_head=32),
    "starcoder-15b": _BIGCODE_BASE | dict(n_embd=6144, n_layer=40, n_head=48),
    "gptj-6b": dict(model_type="gptj"),
}  # fmt: skip
