"""Hunyuan, dense (Tencent 2025): queries and keys are normalized after they are rotated, by a base wider by alpha."""

from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights, renamed
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.layers.attention.attention import QKNorm
from eqx_decoders.layers.rope import NTKRope, Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def hunyuan(shape: DecoderSizes, *, rope: Rope) -> DecoderConfig:
    """Return a decoder of Hunyuan blocks."""
    mixer = shape.attention(rope=rope, qk_norm=QKNorm(norm=shape.norm, when="after_rope"))
    return shape.decoder(shape.block(mixer))


NAMES = {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}
IGNORED_KEYS = {
    "pretraining_tp": "how it was trained",
    "eod_token_id": "generation_config.json says where a text ends",
    "sep_token_id": "it changes no output",
}
FAMILY = Family(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    settings=(decoder_sizes(eps=1e-5), rope_settings()),
    build=hunyuan,
    weights=renamed(llama_weights(), NAMES),
    ignored_keys=IGNORED_KEYS,
)

_7B = DecoderSizes(
    vocab_size=128_167, embed_dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=14_336,
    eps=1e-5, tied=True,
)  # fmt: skip

MODELS = {"hunyuan-7b": lambda: hunyuan(_7B, rope=NTKRope(alpha=1000.0))}
