"""Small models of llama.cpp's architectures. The weights are computed from their names."""

import zlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from eqx_decoders.families.registry import FAMILIES
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.init import abstract
from eqx_decoders.sharding.axes import named_leaves, replaced


BASE: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64,
    vocab_size=64, max_position_embeddings=512,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, intermediate_size=32)
SPARSE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1)
WINDOWS: dict[str, Any] = dict(
    sliding_window=8, head_dim=32, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=32
)


def rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **more}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
FACTORS = [[1 + index / 10 for index in range(8)], [1.5 + index / 4 for index in range(8)]]
LONG = dict(short_factor=FACTORS[0], long_factor=FACTORS[1], original_max_position_embeddings=384)
ALL = dict(partial_rotary_factor=1.0)

# name -> dtype of the matrices, model_type, settings that differ from BASE
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("q8_0", "llama", dict(head_dim=16, rms_norm_eps=1e-5) | LLAMA3),
    "llama_bias": ("f16", "llama", dict(attention_bias=True, mlp_bias=True) | rope("linear", factor=2.0)),
    "llama_yarn": ("f32", "llama", rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "mixtral": ("f16", "mixtral", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None) | rope()),
    "qwen2": ("bf16", "qwen2", dict(tie_word_embeddings=True) | rope()),
    "qwen2_moe": ("f16", "qwen2_moe", SPARSE | dict(shared_expert_intermediate_size=64, norm_topk_prob=False) | rope()),
    "qwen3": ("q8_0", "qwen3", dict(head_dim=32) | rope()),
    "qwen3_moe": ("bf16", "qwen3_moe", SPARSE | dict(head_dim=32, norm_topk_prob=True) | rope()),
    "gemma": ("f16", "gemma", dict(head_dim=32, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True) | rope()),
    "gemma2": ("q8_0", "gemma2", WINDOWS | dict(attn_logit_softcapping=50.0, tie_word_embeddings=True) | rope()),
    "gemma3": (
        "f16",
        "gemma3_text",
        WINDOWS
        | dict(num_hidden_layers=7, tie_word_embeddings=True, rope_theta=1e6, rope_local_base_freq=1e4)
        | dict(rope_scaling={"rope_type": "linear", "factor": 8.0}),
    ),
    "phi3": ("f32", "phi3", dict(sliding_window=None, max_position_embeddings=4096) | rope(**ALL)),
    "phi3_long": (
        "f16",
        "phi3",
        dict(sliding_window=None, original_max_position_embeddings=384) | rope("longrope", **ALL, **LONG),
    ),
    "phi": ("f16", "phi", dict(num_key_value_heads=2, intermediate_size=128) | rope(partial_rotary_factor=0.5)),
    "gpt2": ("f16", "gpt2", dict(n_embd=32, n_layer=2, n_head=2, n_positions=512, n_inner=128, vocab_size=64)),
    "olmo": ("bf16", "olmo", dict(clip_qkv=2.0) | rope()),
    "olmo2": ("f32", "olmo2", dict(num_key_value_heads=2) | rope()),
    "olmo3": ("f16", "olmo3", dict(num_key_value_heads=2, sliding_window=8, rope_theta=500_000.0)),
    "olmoe": ("f16", "olmoe", dict(num_key_value_heads=2, norm_topk_prob=False) | EXPERTS | rope()),
    "granite": (
        "q8_0",
        "granite",
        dict(attention_multiplier=0.1, embedding_multiplier=6.0, residual_multiplier=0.3, logits_scaling=4.0) | rope(),
    ),
    "smollm3": ("f16", "smollm3", dict(no_rope_layers=[1, 1, 1, 0], use_sliding_window=False) | rope()),
    "starcoder2": ("f16", "starcoder2", dict(use_bias=True, sliding_window=None) | rope()),
    "stablelm": ("f16", "stablelm", dict(use_qkv_bias=True) | rope(partial_rotary_factor=0.25)),
    "stablelm_parallel": ("f16", "stablelm", dict(use_parallel_residual=True) | rope(partial_rotary_factor=0.25)),
    "cohere": ("bf16", "cohere", rope()),
    "cohere2": ("f16", "cohere2", dict(sliding_window=8) | rope()),
    "seed_oss": ("f16", "seed_oss", dict(head_dim=32, attention_bias=True, attention_out_bias=False) | rope()),
    "arcee": ("f16", "arcee", rope()),
    "ernie4_5": ("q8_0", "ernie4_5", dict(head_dim=16, tie_word_embeddings=True) | rope()),
    "nemotron": ("f16", "nemotron", rope(partial_rotary_factor=0.5)),
    "lfm2": (
        "f32",
        "lfm2",
        dict(conv_L_cache=3, conv_bias=False, block_auto_adjust_ff_dim=False, tie_word_embeddings=True)
        | dict(layer_types=["conv", "conv", "full_attention", "conv"])
        | rope(),
    ),
}


def settings(name: str) -> dict[str, Any]:
    """The content of a `config.json`."""
    _, family, different = CASES[name]
    base = {} if family == "gpt2" else BASE | {"tie_word_embeddings": family in ("cohere", "cohere2")}
    return {"model_type": family, **base, **different}


def build(name: str) -> Decoder:
    """Build the model. Weights have the size of trained ones, and norms are near 1."""
    config, _ = FAMILIES[CASES[name][1]].decode(settings(name))
    shapes = abstract(config)
    leaves = {}
    for path, leaf in named_leaves(shapes).items():
        seed = zlib.crc32(path.replace("scanned_layers", "segments").encode())  # as for the stored hashes
        numbers = np.random.default_rng(seed).normal(0, 0.1, leaf.shape)
        leaves[path] = jnp.asarray((numbers + (path.endswith("scale") and "norm" in path)).astype(np.float32))
    return replaced(shapes, leaves)
