"""SantaCoder and StarCoder (Li et al. 2023): GPT-2 with one key head, whose matrices are stored as `[out, in]`."""

from eqx_decoders.families import _gpt2
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, fused_attention, plain_mlp
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Flag, Integer, value_at
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.model.decoder_config import DecoderConfig


def gpt_bigcode(shape: DecoderSizes, *, max_positions: int = 1024, scaled: bool = True) -> DecoderConfig:
    """Return a decoder of GPT-2's blocks; scores are divided by the root of `head_dim` if `scaled`."""
    norm, mlp = LayerNormConfig(eps=shape.eps), shape.mlp(gated=False, bias=True)
    mixer = shape.attention(rope=None, qkv_bias=True, out_bias=True, query_scale=None if scaled else 1.0)
    return shape.decoder(shape.block(mixer, mlp, norm), norm, positions=LearnedPositions(max_positions=max_positions))


FAMILY = Family(
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    settings=(
        *_gpt2.DEFAULTS,
        Flag("multi_query", lambda config: value_at(config, "attention").num_kv_heads == 1, True, name="_multi_query"),
        decoder_sizes(
            num_kv_heads=lambda values: 1 if values["_multi_query"] else values["num_heads"],
            eps=1e-5, tied=True, activation="gelu_pytorch_tanh", keys=_gpt2.KEYS,
        ),
        Integer("n_positions", "positions.max_positions"),
        Flag("scale_attn_weights", lambda x: value_at(x, "attention.query_scale") is None, True, name="scaled"),
    ),
    build=gpt_bigcode,
    weights=(
        *_gpt2.ENDS,
        *fused_attention(_gpt2.LAYER + "attn.", "c_attn", "c_proj"),
        *plain_mlp(_gpt2.LAYER + "mlp.", up="c_fc", down="c_proj"),
    ),
    ignored_tensors=_gpt2.IGNORED_TENSORS,
    ignored_keys=_gpt2.IGNORED_KEYS | {
        "attention_softmax_in_fp32 scale_attention_softmax_in_fp32": "softmax is in float32 here anyway",
        "inference_runner max_batch_size max_sequence_length pad_key_length pre_allocate_kv_cache "
        "validate_runner_input runner_max_sequence_length": "how it was run",
        "num_key_value_heads": "multi_query says it",
    },
)  # fmt: skip


_SETTINGS = dict(model_type="gpt_bigcode", vocab_size=49_152, n_positions=8192)

MODELS = {
    "santacoder-1.1b": _SETTINGS | dict(vocab_size=49_280, n_embd=2048, n_layer=24, n_head=16, n_positions=2048),
    "starcoder-164m": _SETTINGS | dict(n_layer=20),
    "starcoder-1b": _SETTINGS | dict(n_embd=2048, n_layer=24, n_head=16),
    "starcoder-3b": _SETTINGS | dict(n_embd=2816, n_layer=36, n_head=22),
    "starcoder-7b": _SETTINGS | dict(n_embd=4096, n_layer=42, n_head=32),
    "starcoder-15b": _SETTINGS | dict(n_embd=6144, n_layer=40, n_head=48),
}  # fmt: skip
