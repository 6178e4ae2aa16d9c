"""What the keys of `config.json` mean in each family. A new family adds rows to these tables."""

import dataclasses

import pytest
from pytest import approx

import eqx_decoders as ed
from eqx_decoders.blocks.residual.residual import PostNorm
from eqx_decoders.families.deepseek.v4 import HEAVY, SLIDING, SPARSE
from eqx_decoders.families.moe import sparse_layer_indices
from eqx_decoders.families.qwen import text as qwen
from eqx_decoders.families.registry import FAMILIES
from eqx_decoders.io.huggingface.load import decode_config
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.layers.mask import Bidirectional, Causal, SlidingWindow
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import LayerNormConfig, RMSNormConfig
from eqx_decoders.layers.rope import AxialRope, DynamicRope, LinearRope, Llama3Rope, ProportionalRope, Rope, YarnRope
from tests.errors import refused
from tests.families.samples import (
    ABSENT,
    WINDOW_KEYS,
    assert_values,
    cases,
    decode,
    drop,
    encode,
    mixers,
    replaced,
    row,
    rows,
    sample,
    settings,
    value_at,
    windows,
)  # fmt: skip


# --- shorthands in the tables ---

FULL, LOCAL, LINEAR = "full_attention", "sliding_attention", "linear_attention"
NO_ROPE = drop("rope_parameters", "rope_theta", "rope_scaling")
LLAMA3_KEYS = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
YARN_KEYS = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
GEMMA3_ROPE = NO_ROPE | dict(rope_theta=5e5, rope_local_base_freq=2e4)
NO_WINDOW = drop(*WINDOW_KEYS)
GRANITE_MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")
FALCON_H1_MULTIPLIERS = [key for key in sample("falcon_h1") if key.endswith(("_multiplier", "_multipliers"))]
FALCON_KEYS = ("new_decoder_architecture", "multi_query", "num_kv_heads", "num_ln_in_parallel_attn", "parallel_attn")
ONE_NORM, TWO_NORMS = {"pre_mlp_norm": None}, {"pre_mlp_norm.type": "LayerNormConfig"}
V2_ROUTER = RouterConfig(order="score_first", scaling_factor=3.0)
SIZES = drop("num_key_value_heads", "head_dim") | dict(num_attention_heads=4, hidden_size=32)
# files of these published repositories
R7B, M2 = "CohereLabs/c4ai-command-r7b-12-2024", "MiniMaxAI/MiniMax-M2"
MIXTRAL, QWEN3, CODER = "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-Coder-480B-A35B-Instruct"
GPT_OSS, SCOUT = "openai/gpt-oss-20b", "meta-llama/Llama-4-Scout-17B-16E"
V2_LITE, V2, V3 = (f"deepseek-ai/DeepSeek-{version}" for version in ("V2-Lite", "V2", "V3"))
GLM4, AIR = "THUDM/glm-4-9b-chat-hf", "PrimeIntellect/INTELLECT-3-Base"
QWEN15_MOE, SOLAR, TRINITY = "Qwen/Qwen1.5-MoE-A2.7B", "upstage/Solar-Open-100B", "arcee-ai/Trinity-Nano-Preview"


def rotated(config) -> list[bool]:
    """Return which layers have a rotary embedding."""
    return [mixer.rope is not None for mixer in mixers(config)]


def softmax(config) -> list[int]:
    """Return the indices of layers with softmax attention."""
    return [index for index, block in enumerate(config.blocks) if hasattr(block.mixer, "mask")]


def cycles(config) -> list[tuple[int, int]]:
    """Return the number of blocks in each scanned cycle, and the number of its repetitions."""
    return [(len(unit), repeats) for unit, repeats in ed.find_repeats(config.blocks)]


def num_mixers(config) -> int:
    """Return the number of different mixers."""
    return len(set(mixers(config)))


def traced(config) -> int:
    return sum(size for size, _ in cycles(config))


def shares_keys(config) -> list[bool]:
    """Return which layers use the keys and values of an earlier layer."""
    return [mixer.kv_shared_from is not None for mixer in mixers(config)]


def compressed(config) -> list[str]:
    """Return, for layers of DeepSeek V4, the number of tokens per key, and whether an indexer selects keys."""
    sizes = [0 if mixer.compression is None else mixer.compression.size for mixer in mixers(config)]
    return [f"{size} chosen" if mixer.indexer else f"{size}" for size, mixer in zip(sizes, mixers(config), strict=True)]


def hashed(config) -> list[bool]:
    """Return which layers of DeepSeek V4 select experts by token ids."""
    return [block.mlp.router.hashed_tokens is not None for block in config.blocks]


def indexer_kinds(config) -> str:
    """Return a letter per layer of GLM 5: f has an indexer, F shares its selection with later layers, s uses it."""
    names = [(block.mixer.indexer.shares_as, block.mixer.indexer.shared_from) for block in config.blocks]
    return "".join({(None, None): "f", ("choice", None): "F", (None, "choice"): "s"}[pair] for pair in names)


def ngrams(config) -> list[int]:
    """Return the indices of layers of Qwen 4 Exp that look up n-grams."""
    return [index for index, block in enumerate(config.blocks) if block.pre_layers]


def kinds(letters: str) -> list[str]:
    """Return the types of layers of RecurrentGemma from their first letters."""
    return [{"r": "recurrent", "a": "attention"}[letter] for letter in letters]


def by_period(values: list, count: int) -> list:
    """Return the first `count` values of the repeated list."""
    return (values * count)[:count]


def models(prefix: str) -> list[str]:
    return [name for name in ed.list_models() if name.startswith(prefix)]


# --- values that follow from keys, and round trips ---

# fmt: off
# source, changed keys, expected values of the configuration
SETTINGS = [
    row("afmoe", {}, {"embedding_scale": 24**0.5}),
    row("afmoe", drop("mup_enabled"), {"embedding_scale": 1.0}),
    row("afmoe", dict(num_dense_layers=0), {sparse_layer_indices: [0, 1, 2]}),
    row("apertus", NO_ROPE, {"mixer.rope": Llama3Rope(theta=12e6)}),
    row("bamba", {}, {"blocks.0.mixer.value_dim": 8, "blocks.0.mixer.out_bias": False}),
    row("bamba", dict(mamba_proj_bias=True), {"blocks.0.mixer.in_bias": True, "blocks.0.mixer.out_bias": True}),
    row("bloom", drop("apply_residual_connection_post_layernorm"), {"residual.keeps_normed": False}),
    row("bloom", dict(apply_residual_connection_post_layernorm=False), {"residual.keeps_normed": False}),
    row("bloom", dict(apply_residual_connection_post_layernorm=True), {"residual.keeps_normed": True}),
    # in published files, the RoPE base is in the object of attention
    row("dbrx", NO_ROPE | {"attn_config.rope_theta": 5e5}, {"mixer.rope.theta": 5e5}),
    row("dbrx", {"ffn_config.moe_normalize_expert_weights": 1}, {"mlp.router.renormalize": True}),
    row("dbrx", {"ffn_config.moe_normalize_expert_weights": None}, {"mlp.router.renormalize": False}),
    row("deepseek2_groups/config", {},  # mscale=1.0 and mscale_all_dim=0.707
        {"blocks.0.mixer.scale": 0.37979454312603067, "blocks.0.mixer.rope.magnitude": 1.053118360780668}),
    row("deepseek_v2", dict(topk_method="greedy"), {"blocks.-1.mlp.router": V2_ROUTER}),
    row("deepseek_v2", dict(topk_method="group_limited_greedy"), {"blocks.-1.mlp.router": dataclasses.replace(
        V2_ROUTER, num_groups=4, groups_per_token=1, group_score="max")}),
    row("deepseek_v2", dict(mlp_bias=True), {"mlp.bias": [True, False], "blocks.1.mlp.shared.bias": True}),
    *rows("deepseek_v4", drop("layer_types", "compress_rates", "mlp_layer_types") | dict(num_hidden_layers=4), (
        (dict(layer_types=[SLIDING, SPARSE, HEAVY, SPARSE]), {compressed: ["0", "4 chosen", "128", "4 chosen"]}),
        (dict(compress_ratios=[0, 4, 128, 0, 0]), {compressed: ["0", "4 chosen", "128", "0"]}),
        ({}, {compressed: ["128", "128", "128", "4 chosen"]}),
        (dict(compress_rates={SPARSE: 2, HEAVY: 6}), {compressed: ["6", "6", "6", "2 chosen"]}),
        (dict(compress_rate_csa=2, compress_rate_hca=6), {compressed: ["6", "6", "6", "2 chosen"]}),
    )),
    # layers without compressed keys have another rotary embedding
    row("deepseek_v4", drop("rope_parameters") | dict(rope_theta=7.0, compress_rope_theta=8.0, rope_scaling={
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
        {"blocks.0.mixer.rope": Rope(theta=7.0, pairing="interleaved"), "blocks.1.mixer.rope.type": "YarnRope",
         "blocks.1.mixer.rope.theta": 8.0, "blocks.1.mixer.rope.magnitude": 1.0}),
    row("deepseek_v4", dict(head_dim=44, index_head_dim=44, qk_rope_head_dim=30, partial_rotary_factor=30 / 44),
        {"mixer.rope_dim": 30}),
    row("deepseek_v4", drop("mlp_layer_types"), {hashed: [True, True, True]}),
    row("deepseek_v4", drop("mlp_layer_types") | dict(num_hash_layers=2), {hashed: [True, True, False]}),
    row("deepseek_v4", dict(mlp_layer_types=["moe", "hash_moe", "moe"]), {hashed: [False, True, False]}),
    *rows("ernie4_5_moe", drop("moe_layer_interval", "moe_layer_start_index", "moe_layer_end_index")
          | dict(num_hidden_layers=7), (
        ({}, {sparse_layer_indices: [1, 2, 3, 4, 5, 6]}),
        (dict(moe_layer_start_index=3, moe_layer_end_index=4), {sparse_layer_indices: [3, 4]}),
        (dict(moe_layer_interval=3, moe_layer_start_index=0), {sparse_layer_indices: [2, 5]}),
        (dict(moe_layer_interval=2, moe_layer_start_index=2, moe_layer_end_index=-1), {sparse_layer_indices: [3, 5]}),
    )),
    row("ernie4_5_moe", dict(moe_num_shared_experts=0), {"blocks.1.mlp.shared": None}),
    *(
        row("ernie4_5_moe", dict(use_bias=bias), {
            "head_bias": bias, "blocks.1.mixer.qkv_bias": bias, "blocks.1.mixer.out_bias": bias,
            "blocks.0.mlp.bias": bias, "blocks.1.mlp.bias": False, "blocks.1.mlp.shared.bias": bias})
        for bias in (False, True)
    ),
    *rows("exaone4", NO_WINDOW | dict(num_hidden_layers=4), (
        ({}, {rotated: [True, True, True, False]}),
        (dict(sliding_window=7, sliding_window_pattern=2), {rotated: [True, False, True, False]}),
        (dict(sliding_window=None), {rotated: [True] * 4}),
        # full-attention layers have no rotary embedding if a window is configured, even if no layer uses the window
        (dict(sliding_window=7, layer_types=[FULL] * 4), {"mixer.rope": None}),
    )),
    *rows("falcon", drop(*FALCON_KEYS), (
        ({}, ONE_NORM | {"mixer.num_kv_heads": 1, "residual.shares_norm": True}),
        (dict(parallel_attn=False), {"residual.shares_norm": False}),
        (dict(parallel_attn=False, new_decoder_architecture=True), {"residual.shares_norm": True}),
        (dict(num_kv_heads=2), ONE_NORM | {"mixer.num_kv_heads": 1}),
        (dict(multi_query=True), ONE_NORM | {"mixer.num_kv_heads": 1}),
        (dict(multi_query=False), ONE_NORM | {"mixer.num_kv_heads": 4}),
        (dict(multi_query=False, num_kv_heads=2), ONE_NORM | {"mixer.num_kv_heads": 4}),
        (dict(new_decoder_architecture=True), TWO_NORMS | {"mixer.num_kv_heads": 4}),
        (dict(new_decoder_architecture=True, num_kv_heads=2), TWO_NORMS | {"mixer.num_kv_heads": 2}),
        (dict(new_decoder_architecture=True, num_kv_heads=2, multi_query=False), TWO_NORMS | {"mixer.num_kv_heads": 2}),
        (dict(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
         ONE_NORM | {"mixer.num_kv_heads": 2}),
    )),
    row("falcon", dict(alibi=True),
        {"mixer.rope": None, "mixer.alibi.rounded": True, "mixer.alibi.scale": approx(6**-0.5)}),
    row("falcon_h1", dict(mamba_rms_norm=False, mamba_norm_before_gate=False),
        {"blocks.0.mixer.mixers.0.mixer.norm": None}),
    row("falcon_h1", dict(mamba_rms_norm=True, mamba_norm_before_gate=False),
        {"blocks.0.mixer.mixers.0.mixer.norm": "after_gate"}),
    row("falcon_h1", dict(mamba_rms_norm=True, mamba_norm_before_gate=True),
        {"blocks.0.mixer.mixers.0.mixer.norm": "before_gate"}),
    row("falcon_h1", drop(*FALCON_H1_MULTIPLIERS),
        {"blocks.0.mixer.mixers.0.input_scale": 1.0, "blocks.0.mixer.mixers.1.input_scale": 1.0,
         "blocks.0.mixer.mixers.1.mixer.key_scale": 1.0, "logit_divisor": 1.0}),
    # Apertus calls the tanh approximation "gelu"
    row("gemma", drop("hidden_activation") | dict(hidden_act="gelu"), {"mlp.activation": "gelu_tanh"}),
    row("gemma", drop("hidden_activation") | dict(hidden_act="gelu_pytorch_tanh"), {"mlp.activation": "gelu_tanh"}),
    row("gemma", drop("hidden_act") | dict(hidden_activation="relu"), {"mlp.activation": "gelu_tanh"}),  # is not read
    row("gemma2", dict(hidden_activation="gelu"), {"mlp.activation": "gelu"}),
    row("gemma2", drop("final_logit_softcapping", "attn_logit_softcapping"),
        {"logit_soft_cap": 30.0, "mixer.soft_cap": 50.0}),
    row("gemma2", dict(final_logit_softcapping=None), {"logit_soft_cap": None}),
    row("gemma2", dict(attn_logit_softcapping=None), {"mixer.soft_cap": None}),
    row("gemma3_text", dict(hidden_act="relu"), {"mlp.activation": "gelu_tanh"}),  # is not read
    # old files have two separate keys
    row("gemma3_text", GEMMA3_ROPE | dict(rope_scaling=dict(rope_type="linear", factor=4.0)), {
        "mixer.rope": [*[Rope(theta=2e4)] * 2, LinearRope(theta=5e5, factor=4.0), *[Rope(theta=2e4)] * 2]}),
    row("gemma3n_text", drop("activation_sparsity_pattern") | dict(intermediate_size=20),
        {"mlp.mlp_dim": 20, "mlp.gate_sparsity": 0.0}),
    row("gemma3n_text", dict(intermediate_size=[20, 24, 28, 32]), {"mlp.mlp_dim": [20, 24, 28, 32]}),
    *rows("gemma4_text", drop("per_layer_config", "global_head_dim", "num_global_key_value_heads")
          | dict(num_hidden_layers=2, layer_types=[LOCAL, FULL]), (
        ({}, {"mixer.num_kv_heads": [2, 2], "mixer.head_dim": [8, 512]}),
        (dict(global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True),
         {"mixer.num_kv_heads": [2, 1], "mixer.head_dim": [8, 32]}),
        (dict(global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=False),
         {"mixer.num_kv_heads": [2, 2], "mixer.head_dim": [8, 32]}),
        # like the padding in transformers
        (dict(per_layer_config={"01": {"head_dim": 16}}), {"mixer.num_kv_heads": [2, 2], "mixer.head_dim": [8, 16]}),
        (dict(per_layer_config={}), {"mixer.num_kv_heads": [2, 2], "mixer.head_dim": [8, 8]}),
    )),
    row("gemma4_text", drop("per_layer_config") | dict(num_hidden_layers=2, layer_types=[FULL, LOCAL]),
        {"blocks.1.mixer.mask": Causal()}),  # the last layer has full attention
    row("glm", {}, {"mixer.rope.pairing": "interleaved"}),
    row("glm4", {}, {"mixer.rope.pairing": "interleaved"}),
    row("glm4_moe", {}, {"mixer.rope.pairing": "half"}),
    *rows(("glm", "glm4", "glm4_moe", "solar_open"), {}, (
        (dict(attention_bias=True), {"mixer.qkv_bias": True, "mixer.out_bias": False}),
    )),
    *rows("glm_moe_dsa", drop("indexer_types", "mlp_layer_types", "layer_types") | dict(num_hidden_layers=6), (
        ({}, {indexer_kinds: "ffffff"}),
        (dict(index_topk_freq=3), {indexer_kinds: "fFssFs"}),
        (dict(index_topk_freq=2, index_skip_topk_offset=3), {indexer_kinds: "ffFsFs"}),
        (dict(index_topk_pattern="FFSSFS"), {indexer_kinds: "fFssFs"}),
        (dict(index_topk_pattern=["full", "full", "shared", "shared", "full", "shared"]), {indexer_kinds: "fFssFs"}),
        (dict(indexer_types=["full"] + ["shared"] * 5, index_topk_freq=2), {indexer_kinds: "Fsssss"}),
    )),
    row("glm_moe_dsa", dict(num_nextn_predict_layers=1), {"mtp.block.mixer.indexer.shared_from": None}),
    row("gpt2", {}, {"mixer.query_scale": None}),
    row("gpt2", dict(scale_attn_weights=False), {"mixer.query_scale": 1.0}),
    row("gpt2", dict(scale_attn_by_inverse_layer_idx=True), {"mixer.query_scale": [6**-0.5, 6**-0.5 / 2]}),
    row("gpt2", dict(scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False),
        {"mixer.query_scale": [1.0, 0.5]}),
    row("gpt2", dict(scale_attn_by_inverse_layer_idx=True, n_layer=1), {"mixer.query_scale": [6**-0.5]}),
    row("gpt2", dict(scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False, n_layer=1),
        {"mixer.query_scale": [1.0]}),
    row("gpt_neox", drop("rope_parameters", "rotary_pct", "rotary_emb_base") | dict(hidden_size=32),
        {"mixer.rope.fraction": 0.25, "mixer.rope.theta": 10_000.0}),
    row("gpt_oss", NO_ROPE,
        {"mixer.rope": YarnRope(theta=150_000.0, factor=32.0, original_length=4096, truncate=False)}),
    row("gpt_oss", NO_ROPE | dict(rope_parameters={"rope_type": "default"}), {"mixer.rope": Rope(theta=150_000.0)}),
    # the key replaces `head_dim ** -0.5`
    *rows(("granite", "granitemoe", "granitemoeshared"), {}, (
        (drop(*GRANITE_MULTIPLIERS), {"mixer.query_scale": 1.0, "residual.residual_scale": 1.0, "embedding_scale": 1.0,
                                      "logit_divisor": 1.0}),
    )),
    # a model with only attention layers, whose file still contains the sizes of recurrent layers
    row("granitemoehybrid", dict(layer_types=["attention"] * 4), {"mixer.type": "AttentionConfig"}),
    row("granitemoehybrid", {}, {"blocks.0.mixer.out_bias": False}),
    row("granitemoehybrid", dict(mamba_proj_bias=True),
        {"blocks.0.mixer.in_bias": True, "blocks.0.mixer.out_bias": True}),
    *rows("granitemoehybrid", {}, [
        (dict(time_step_limit=limit), {"blocks.0.mixer.dt_min": 0.0, "blocks.0.mixer.dt_max": None})
        for limit in ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], None)
    ]),
    row("granitemoeshared", {}, {"mlp.shared": MLPConfig(mlp_dim=14)}),
    row("granitemoeshared", dict(shared_intermediate_size=0), {"mlp.shared": None}),
    row("helium", dict(attention_bias=True), {"mixer.qkv_bias": True, "mixer.out_bias": False}),
    row("helium", dict(attention_bias=False), {"mixer.qkv_bias": False, "mixer.out_bias": False}),
    *rows(("hy_v3", "glm4_moe_lite"), drop("mlp_layer_types", "first_k_dense_replace") | dict(num_hidden_layers=3), (
        ({}, {sparse_layer_indices: [1, 2]}),
        (dict(first_k_dense_replace=2), {sparse_layer_indices: [2]}),
        (dict(mlp_layer_types=["sparse", "dense", "sparse"]), {sparse_layer_indices: [0, 2]}),
    )),
    row("hyperclovax", drop(*GRANITE_MULTIPLIERS), {"mixer.query_scale": 8**-0.5}),
    row("hyperclovax", dict(attention_multiplier=None), {"mixer.query_scale": 8**-0.5}),
    row("hyperclovax", dict(use_post_norm=True), dict.fromkeys(
        ("pre_mixer_norm", "post_mixer_norm", "post_mlp_norm"), RMSNormConfig(eps=1e-3))),
    row("hyperclovax", dict(use_post_norm=False), {"post_mixer_norm": None, "post_mlp_norm": None}),
    *rows("jamba", {}, [
        (dict(num_hidden_layers=count, attn_layer_period=period, attn_layer_offset=offset, expert_layer_period=period,
              expert_layer_offset=offset), {softmax: layers, sparse_layer_indices: layers})
        for count, period, offset, layers in ((6, 3, 1, [1, 4]), (5, 5, 2, [2]))
    ]),
    row("jamba", dict(num_experts=1), {sparse_layer_indices: []}),  # a single expert is an MLP
    *rows("lfm2", drop(
        "block_auto_adjust_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier", "intermediate_size"), (
        (dict(intermediate_size=12_288), {"mlp.mlp_dim": 8192}),
        (dict(intermediate_size=12_288, block_multiple_of=1000), {"mlp.mlp_dim": 9000}),
        (dict(intermediate_size=12_288, block_ffn_dim_multiplier=1.5), {"mlp.mlp_dim": 12_288}),
        (dict(intermediate_size=12_288, block_ffn_dim_multiplier=None), {"mlp.mlp_dim": 8192}),
        (dict(intermediate_size=12_288, block_auto_adjust_ff_dim=False), {"mlp.mlp_dim": 12_288}),
        (dict(block_ff_dim=6000), {"mlp.mlp_dim": 4096}),
    )),
    row("lfm2", drop("layer_types") | dict(num_hidden_layers=2, full_attn_idxs=[1]),
        {"mixer.type": ["GatedConvolutionConfig", "AttentionConfig"]}),
    *rows(("llama", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo3", "qwen3_moe", "gpt_oss"), {}, (
        (dict(attention_bias=True), {"mixer.qkv_bias": True, "mixer.out_bias": True}),
        (dict(attention_bias=False), {"mixer.qkv_bias": False, "mixer.out_bias": False}),
    )),
    row("llama", dict(hidden_act="gelu"), {"mlp.activation": "gelu"}),
    row("llama", dict(hidden_act="swish"), {"mlp.activation": "silu"}),
    *rows("llama", NO_ROPE | dict(max_position_embeddings=128), (
        ({}, {"mixer.rope": Rope(theta=10_000.0)}),
        (dict(rope_theta=5e5), {"mixer.rope": Rope(theta=5e5)}),
        (dict(rope_theta=500000, rope_scaling=None), {"mixer.rope": Rope(theta=5e5)}),
        (dict(rope_parameters=dict(rope_theta=5e5)), {"mixer.rope": Rope(theta=5e5)}),
        (dict(rope_theta=5e5, rope_scaling=dict(type="linear", factor=2)),
         {"mixer.rope": LinearRope(theta=5e5, factor=2.0)}),
        (dict(rope_scaling=dict(factor=2.0)), {"mixer.rope": Rope()}),
        (dict(rope_theta=5e5, rope_scaling=LLAMA3_KEYS | dict(original_max_position_embeddings=64)),
         {"mixer.rope": Llama3Rope(theta=5e5, original_length=64)}),
        (dict(rope_scaling=LLAMA3_KEYS, max_position_embeddings=2048),
         {"mixer.rope": Llama3Rope(original_length=2048)}),
        (dict(rope_scaling=dict(type="yarn", factor=4, original_max_position_embeddings=32, finetuned=True)),
         {"mixer.rope": YarnRope(factor=4.0, original_length=32)}),
        (dict(max_position_embeddings=96, original_max_position_embeddings=32,
              rope_scaling=dict(type="yarn", factor=None)), {"mixer.rope": YarnRope(factor=3.0, original_length=32)}),
        (dict(rope_parameters=dict(rope_type="yarn", factor=2, mscale=1, mscale_all_dim=1, truncate=False)),
         {"mixer.rope": YarnRope(factor=2.0, original_length=128, mscale=1.0, mscale_all_dim=1.0, truncate=False)}),
        (dict(rope_parameters=dict(rope_type="yarn", factor=2, mscale=1, mscale_all_dim=2.0, attention_factor=1.5)),
         {"mixer.rope": YarnRope(factor=2.0, original_length=128, mscale_all_dim=2.0, attention_factor=1.5)}),
        (dict(rope_scaling=dict(type="dynamic", factor=2)),
         {"mixer.rope": DynamicRope(factor=2.0, original_length=128)}),
        (dict(rope_parameters=dict(rope_type="yarn", factor=2, mscale=1.0, beta_fast=16)),
         {"mixer.rope": YarnRope(factor=2.0, original_length=128, beta_fast=16.0)}),
    )),
    # sizes with default values
    row("gemma2", SIZES, {"mixer.num_kv_heads": 4, "mixer.head_dim": 256}),
    row("llama", SIZES, {"mixer.num_kv_heads": 4, "mixer.head_dim": 8}),
    row("llama", SIZES | dict(head_dim=None, num_key_value_heads=None), {"mixer.num_kv_heads": 4, "mixer.head_dim": 8}),
    row("mistral", SIZES | dict(num_attention_heads=8), {"mixer.num_kv_heads": 8, "mixer.head_dim": 4}),
    row("olmo3", SIZES, {"mixer.num_kv_heads": 4, "mixer.head_dim": 8}),
    row("qwen2", SIZES | dict(num_key_value_heads=2), {"mixer.num_kv_heads": 2, "mixer.head_dim": 8}),
    row("qwen3", SIZES | dict(num_key_value_heads=2), {"mixer.num_kv_heads": 2, "mixer.head_dim": 128}),
    row("llama4_text", dict(attn_temperature_tuning=0), {"mixer.temperature": None}),
    *rows(("mamba", "falcon_mamba"), {}, (  # `expand` counts only without a width
        (drop("time_step_rank") | dict(expand=16, intermediate_size=40), {"mixer.channels": 40, "mixer.step_rank": 2}),
        (drop("intermediate_size") | dict(expand=3, hidden_size=36, time_step_rank="auto"),
         {"mixer.channels": 108, "mixer.step_rank": 3}),
    )),
    row("mamba2", {}, {"mixer.out_bias": False}),
    row("mamba2", dict(use_bias=True), {"mixer.in_bias": True, "mixer.out_bias": True}),
    row("mimo_v2_flash", {},
        {"mixer.num_kv_heads": [1, 2, 2], "mixer.sinks": [False, True, True], "mixer.value_dim": 6,
         "mixer.rope.theta": [1000.0, 100.0, 100.0]}),
    # a legacy key excludes the query itself from the window
    row("mimo_v2_flash", drop("mlp_layer_types", "sliding_window") | dict(sliding_window_size=7),
        {"blocks.1.mixer.mask.size": 8}),
    # transformers' default: softmax in every second layer, starting with the first; published files have a list
    row("minimax", drop("layer_types") | dict(num_hidden_layers=5), {
        softmax: [0, 2, 4], "blocks.0.residual.stream_scales": (1.3, 1.1), "blocks.0.residual.layer_scales": (0.8, 0.7),
        "blocks.1.residual.stream_scales": (1.2, 1.1), "blocks.1.residual.layer_scales": (0.9, 0.7)}),
    row("minimax_m3_vl_text", {},
        {"mixer.block_indexer.type": ["NoneType", "BlockIndexerConfig"], sparse_layer_indices: [1],
         "blocks.0.mlp.mlp_dim": 20}),
    row("minimax_m3_vl_text", drop("layer_types", "mlp_layer_types", "index_block_size"),
        {"mixer.block_indexer": None, sparse_layer_indices: [0, 1]}),
    row("minimax_m3_vl_text", dict(swiglu_alpha=1.25, swiglu_limit=3.0), {
        "mlp.activation": "silu", "mlp.activation_scale": 1.25, "mlp.up_offset": 1.0, "mlp.limit": 3.0,
        "blocks.1.mlp.shared.activation": "silu", "blocks.1.mlp.shared.activation_scale": 1.25,
        "blocks.1.mlp.shared.up_offset": 1.0, "blocks.1.mlp.shared.limit": 3.0}),
    row("modernbert-decoder", {}, {  # the first layer reads the norm of the embedding
        "pre_mixer_norm": [None, LayerNormConfig(eps=1e-3), LayerNormConfig(eps=1e-3)],
        "embedding_norm": LayerNormConfig(eps=1e-3), "head_transform.norm": LayerNormConfig(eps=1e-3)}),
    row("modernbert-decoder", dict(classifier_bias=False, decoder_bias=False, classifier_activation="relu"),
        {"head_bias": False, "head_transform.bias": False, "head_transform.activation": "relu"}),
    row("mpt", dict(expansion_ratio=2), {"mlp.mlp_dim": 4 * 24}),  # transformers does not read it
    row("nemotron_h", {}, {"blocks.0.mixer.out_bias": False}),
    row("nemotron_h", dict(use_bias=True), {"blocks.0.mixer.in_bias": True, "blocks.0.mixer.out_bias": True}),
    *rows("olmo_hybrid", drop("layer_types", *(f"linear_{name}" for name in (
        "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))) | dict(hidden_size=48), [
        (dict(num_hidden_layers=layers), {
            softmax: full, "blocks.0.mixer.num_key_heads": 3, "blocks.0.mixer.num_heads": 3,
            "blocks.0.mixer.key_dim": 12, "blocks.0.mixer.value_dim": 24})
        for layers, full in ((3, [2]), (6, [3]))
    ]),
    # null disables the rotary embedding; transformers' default applies if the key is missing
    *rows("olmo_hybrid", drop("rope_theta"), (
        (dict(rope_parameters={"rope_type": "default", "rope_theta": None}), {"blocks.1.mixer.rope": None}),
        (dict(rope_parameters=None, rope_theta=None), {"blocks.1.mixer.rope": None}),
        (dict(rope_parameters=None), {"blocks.1.mixer.rope.theta": 1e4}),
        (dict(rope_parameters={"rope_type": "default"}), {"blocks.1.mixer.rope.theta": 1e4}),
        (dict(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}), {"blocks.1.mixer.rope.theta": 5e5}),
    )),
    row("olmo3", NO_ROPE | dict(rope_theta=1e4), {"mixer.rope.theta": [5e5, 5e5, 5e5, 1e4, 5e5]}),
    row("opt", {}, {"final_norm": LayerNormConfig(), "blocks.0.pre_mlp_norm": LayerNormConfig()}),
    *rows("opt", dict(do_layer_norm_before=False, word_embed_proj_dim=16), [
        (keys, {"final_norm": None, "pre_mlp_norm": None, "config.residual": PostNorm(norm=norm), "embedding_rank": 16,
                "head_features": 16})
        for keys, norm in (
            (dict(do_layer_norm_before=False), LayerNormConfig(eps=1e-5)),
            (drop("layer_norm_elementwise_affine"), LayerNormConfig(eps=1e-5)),
            (dict(layer_norm_elementwise_affine=False), LayerNormConfig(scale=False, bias=False)),
        )
    ]),
    row("opt", dict(_remove_final_layer_norm=True), {"final_norm": None}),
    row("opt", dict(word_embed_proj_dim=None), {"embedding_rank": None, "head_transform": None}),
    row("phi3", {}, {"mixer.rope.type": "LongRope", "mixer.rope.original_length": 5}),
    row("phimoe", dict(head_dim=6), {"mixer.head_dim": 6}),  # as of Phi-mini-MoE, whose heads are narrow
    row("phimoe", {}, {"mixer.rope.attention_factor": 1.1, "mixer.rope.long_attention_factor": 1.4,
                       "mixer.rope.keeps_short": True}),
    row("qwen2", {}, {"mixer.qkv_bias": True, "mixer.out_bias": False, "mixer.qk_norm": None}),
    row("qwen2", dict(attention_bias=False), {"mixer.qkv_bias": True, "mixer.out_bias": False, "mixer.qk_norm": None}),
    row("qwen3", dict(rms_norm_eps=1e-3), {
        "mixer.qk_norm": QKNorm(norm=RMSNormConfig(eps=1e-3), over="head", when="before_rope"),
        "mixer.qkv_bias": False, "mixer.out_bias": False}),
    *rows("qwen3_moe", drop("mlp_only_layers", "decoder_sparse_step"), (
        ({}, {sparse_layer_indices: [0, 1, 2, 3]}),
        (dict(decoder_sparse_step=2), {
            sparse_layer_indices: [1, 3], "blocks.0.mlp.mlp_dim": 40, "blocks.1.mlp.mlp_dim": 12,
        }),
        (dict(decoder_sparse_step=2, mlp_only_layers=[3]), {sparse_layer_indices: [1]}),
        (dict(mlp_only_layers=[0, 2, 7]), {sparse_layer_indices: [1, 3]}),
    )),
    row("qwen3_moe", drop("intermediate_size"), {"blocks.0.mlp.mlp_dim": 6144}),
    row("qwen3_moe", dict(norm_topk_prob=True),
        {"blocks.1.mlp.router": RouterConfig(order="score_first", renormalize=True)}),
    row("qwen3_moe", dict(norm_topk_prob=False),
        {"blocks.1.mlp.router": RouterConfig(order="score_first", renormalize=False)}),
    row("qwen4_exp_text", dict(layer_types=[LINEAR, FULL]), {"blocks.1.mixer.selection.top_k": 2}),
    row("qwen4_exp_text", drop("layer_types") | dict(num_hidden_layers=4),
        {"mixer.selection.type": ["Absent", "Absent", "Absent", "PooledIndexerConfig"]}),
    row("qwen4_exp_text", dict(ple_layer_ids=[2, 1], eos_token_id=[7, 3]), {  # layers are counted from 1
        ngrams: [0, 1], "blocks.0.pre_layers.0.layer.layers": (0, 1), "blocks.0.pre_layers.0.layer.layer": 0,
        "blocks.1.pre_layers.0.layer.layer": 1, "blocks.0.pre_layers.0.layer.end_token": 7,
        "blocks.0.pre_layers.0.layer.pad_token": 7}),
    row("qwen4_exp_text", dict(ple_layer_ids=[]), {ngrams: []}),
    row("qwen4_exp_text", dict(ple_layer_ids=None), {ngrams: []}),
    # `intermediate_size` includes gate and up; odd values are rounded down
    *rows("recurrent_gemma", dict(num_hidden_layers=5, intermediate_size=37), (
        (dict(block_types=kinds("raara")), {softmax: [1, 2, 4], "mlp.mlp_dim": 18}),
        (dict(block_types=kinds("ra")), {softmax: [1, 3], "mlp.mlp_dim": 18}),
        (dict(block_types=kinds("aaaaa")), {softmax: [0, 1, 2, 3, 4], "mlp.mlp_dim": 18}),
        (dict(block_types=kinds("rra")), {softmax: [2], "mlp.mlp_dim": 18}),
    )),
    row("rwkv", dict(attention_hidden_size=None, intermediate_size=None, layer_norm_epsilon=0.1), {
        "mixer.channels": 24, "mlp.mlp_dim": 4 * 24, "embedding_norm.eps": 0.1, "pre_mlp_norm.eps": 0.1,
        "final_norm.eps": 1e-5}),
    # 1 in `no_rope_layers` means that the layer has a rotary embedding
    row("smollm3", {}, {rotated: [True, False, True, False]}),
    row("smollm3", drop("no_rope_layers"), {rotated: [True, True, True, False]}),
    row("smollm3", drop("no_rope_layers") | dict(no_rope_layer_interval=2), {rotated: [True, False, True, False]}),
    # rounded up to multiples; a fraction that gives a non-integer number of features is rounded down
    *rows("xlstm", {}, [
        (dict(hidden_size=embed, embedding_dim=embed, ffn_proj_factor=factor, ffn_round_up_to_multiple_of=multiple),
         {"mlp.mlp_dim": features})
        for embed, factor, multiple, features in (
            (64, 2.667, 64, 192), (64, 2.667, 1, 170), (96, 2.0, 64, 192), (48, 0.1, 8, 8)
        )
    ]),
]
# fmt: on


@cases("source, keys, values", SETTINGS)
def test_keys_give_these_values_and_round_trip(source, keys, values):
    content = settings(source, keys)
    config = decode(content)
    assert_values(config, values)
    assert decode(encode(content)) == config


# --- windows ---

# fmt: off
# source, changed keys of windows, the window of each layer; all other window keys are removed
WINDOWS = [
    row("afmoe", dict(global_attn_every_n_layers=3), [1024, 1024, None]),
    row("dots1", dict(sliding_window=5, max_window_layers=2), [None, None, 5, 5]),
    row("dots1", dict(sliding_window=5), [None] * 4),
    row("dots1", dict(sliding_window=None, max_window_layers=0), [None] * 2),
    row("exaone4", dict(sliding_window=7, sliding_window_pattern="LLLG", layer_types=[LOCAL, LOCAL, LOCAL, FULL]),
        [7, 7, 7, None]),
    row("gemma2", {}, [4096, None, 4096]),
    row("gemma3_text", dict(sliding_window=5), [5, 5, 5, 5, 5, None, 5, 5]),
    row("gemma3_text", dict(sliding_window=5, sliding_window_pattern=2), [5, None, 5, None]),
    *rows(("gemma2", "gemma3_text", "olmo3", "gpt_oss"), {}, (
        (dict(layer_types=[FULL, LOCAL], sliding_window=3), [None, 3]),
    )),
    # every sixth layer and the first layer have full attention
    row("mimo_v2_flash", drop("mlp_layer_types", "sliding_window_size"), [None, 129, 129, 129, 129, None, 129, 129]),
    row("mistral", {}, [4096, 4096]),
    row("mistral", dict(sliding_window=None), [None, None]),
    row("mistral", dict(sliding_window=7), [7, 7]),
    row("mistral", dict(sliding_window=7, layer_types=[LOCAL, LOCAL]), [7, 7]),
    row("mixtral", {}, [None, None]),
    row("mixtral", dict(sliding_window=7), [7, 7]),
    # half of the window of ModernBERT's encoder
    row("modernbert-decoder", drop("local_attention", "global_attn_every_n_layers"), [None, 64, 64, None]),
    row("modernbert-decoder", dict(local_attention=15, global_attn_every_n_layers=2), [None, 7, None, 7]),
    row("olmo3", dict(sliding_window=5), [5, 5, 5, None, 5]),
    row("qwen2", dict(sliding_window=7, max_window_layers=1), [None] * 3),
    row("qwen2", dict(sliding_window=7, max_window_layers=1, use_sliding_window=True), [None, 7, 7]),
    row("qwen2", dict(sliding_window=7, max_window_layers=0, use_sliding_window=True), [7, 7, 7]),
    row("qwen2", dict(use_sliding_window=True), [None] * 28 + [4096] * 2),
    # windows in alternate layers, up to a maximum layer
    row("qwen2_moe", dict(use_sliding_window=True, sliding_window=5, max_window_layers=4), [5, None, 5, None, None]),
    row("qwen2_moe", dict(use_sliding_window=True, sliding_window=5), [5, None, 5]),
    row("qwen2_moe", dict(sliding_window=5), [None] * 3),
    row("qwen2_moe", dict(sliding_window=0), [None] * 3),
    row("qwen3", dict(layer_types=[FULL, LOCAL], sliding_window=3, use_sliding_window=True), [None, 3]),
    row("qwen3", dict(sliding_window=3, use_sliding_window=True, max_window_layers=1), [None, 3]),
    row("qwen3_moe", dict(sliding_window=7), [None] * 4),
    row("qwen3_moe", dict(sliding_window=7, use_sliding_window=True, max_window_layers=2), [7] * 4),
    row("smollm3", dict(use_sliding_window=True, sliding_window=7), [None, 7, None, 7]),
    row("smollm3", dict(use_sliding_window=False, sliding_window=7), [None] * 4),
    row("smollm3", dict(use_sliding_window=True), [None] * 4),
]
# fmt: on


@cases("source, keys, sizes", WINDOWS)
def test_keys_give_these_windows(source, keys, sizes):
    config = decode(settings(source, NO_WINDOW | dict(num_hidden_layers=len(sizes)) | keys))
    assert windows(config) == sizes


# --- equivalent and different keys ---

FACTORS = dict(short_factor=[1.0, 1.1, 1.3], long_factor=[1.2, 3.0, 8.0])  # of the fixture of Phi-3
ALL_ONES = {key: None for key in sample("falcon_h1") if key.endswith("_multiplier")} | dict(
    ssm_multipliers=None, mlp_multipliers=[1.0, 1.0]
)

# fmt: off
# source, changed keys, equivalent other keys
EQUAL = [
    row("apertus", dict(mlp_bias=False, post_norm=False, qk_norm=True), {}),  # as in published files
    row("bamba", dict(mamba_d_head="auto"), {}),
    row("dbrx", dict(router_aux_loss_coef=0.05), {}),
    # transformers ignores an inner theta, and may write the outer value there
    row("deepseek_v4", drop("rope_parameters") | dict(rope_theta=7, rope_scaling=YARN_KEYS | dict(rope_theta=7)),
        drop("rope_parameters") | dict(rope_theta=7.0, rope_scaling=YARN_KEYS)),
    row("dbrx", {"ffn_config.uniform_expert_assignment": False}, {}),
    row("deepseek_v2", dict(norm_topk_prob=True), dict(norm_topk_prob=False)),  # weights are not normalized
    row("falcon_h1", ALL_ONES, drop(*ALL_ONES)),
    # transformers 4 reads and writes these
    *rows("gemma3_text", GEMMA3_ROPE | dict(rope_scaling=dict(factor=4.0)), [
        (names, GEMMA3_ROPE | dict(rope_scaling=dict(rope_type="linear", factor=4.0)))
        for names in (
            {"rope_scaling.type": "linear"}, {"rope_scaling.type": "linear", "rope_scaling.rope_type": "linear"},
            {"rope_scaling.type": None, "rope_scaling.rope_type": "linear"},
            {"rope_scaling.type": "linear", "rope_scaling.rope_type": None},
        )
    ]),
    row("gemma4_text", dict(use_bidirectional_attention="vision"), {}),  # there are no images
    row("gpt2", drop("n_embd", "n_positions", "n_head", "n_layer") | dict(
        hidden_size=24, max_position_embeddings=32, num_attention_heads=4, num_hidden_layers=2), {}),
    row("gpt2", dict(n_inner=None), dict(n_inner=4 * 24)),  # null in published files
    row("gpt2", drop("n_inner"), dict(n_inner=4 * 24)),
    row("gpt_oss", dict(experts_per_token=2), {}),
    row("granitemoe", dict(position_embedding_type="rope"), {}),  # transformers 4 writes this and the next three
    row("granitemoeshared", dict(position_embedding_type="rope"), {}),
    row("kimi_linear", dict(layer_types=None, linear_attn_config={"full_attn_layers": [4], "kda_layers": [1, 2, 3, 5]}),
        {}),
    row("lfm2", dict(num_hidden_layers=2, layer_types=None, full_attn_idxs=[1]),
        dict(num_hidden_layers=2, layer_types=["conv", FULL])),
    row("lfm2_vl", dict(model_type="lfm2-vl"), {}),
    row("longcat_flash", dict(num_hidden_layers=56), {}),
    *(
        row("hy_v3", {key: True}, {})  # transformers does not read them
        for key in ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias")
    ),
    # names of classes in Python files of the repository
    row("internlm3", dict(architectures=["InternLM3ForCausalLM"]), {}),
    row("jetmoe", dict(architectures=["JetMoEForCausalLM"]), {}),
    row("llama", dict(temperature=0.6, top_k=20, max_length=4096), {}),
    row("llama", dict(_attn_implementation="org/kernel"), {}),
    # transformers uses these numbers as booleans: `if mscale and mscale_all_dim`
    *rows(("llama", "deepseek_v3", "gpt_oss"), NO_ROPE | dict(rope_scaling=YARN_KEYS), [
        ({f"rope_scaling.{key}": value for key, value in keys.items()}, NO_ROPE | dict(rope_scaling=YARN_KEYS | same))
        for keys, same in (
            (dict(mscale_all_dim=0), {}),
            (dict(mscale_all_dim=0.0, mscale=1.0), {}),
            (dict(mscale=0, mscale_all_dim=0), {}),
            (dict(mscale=0, mscale_all_dim=0.7), dict(mscale_all_dim=0.7)),
            (dict(beta_fast=0, beta_slow=0), {}),
            (dict(extrapolation_factor=1.0, attn_factor=1), {}),
            (dict(mscale=0.7, mscale_all_dim=1.0), dict(mscale=0.7, mscale_all_dim=1)),
        )
    ]),
    row("llama4_text", dict(attn_temperature_tuning=4), {}),  # Scout was published with an integer
    row("minimax_m3_vl_text", drop("layer_types"), drop("layer_types", "index_block_size")),
    row("mistral", dict(attention_bias=True, mlp_bias=True, use_sliding_window=False, max_window_layers=1), {}),
    # transformers 4 saves `sliding_window`, but not `local_attention`
    row("modernbert-decoder", drop("local_attention") | dict(sliding_window=5),
        drop("sliding_window") | dict(local_attention=10)),
    row("mpt", dict(architectures=["MPTForCausalLM"]), {}),
    # transformers 5 writes default sizes of experts for a model without experts
    row("nemotron_h/model", dict(
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=7688, norm_topk_prob=True), {}),
    row("opt", dict(learned_embeddings=True), {}),
    row("opt", dict(scale_embeddings=False), {}),
    row("opt", dict(word_embed_proj_dim=None), dict(word_embed_proj_dim=24)),
    *rows("phi3", drop("rope_parameters") | dict(rope_theta=1000.0, partial_rotary_factor=0.75), (
        (dict(rope_scaling=dict(type="longrope") | FACTORS), {}),
        (dict(rope_scaling=dict(type="su") | FACTORS), {}),
        (dict(rope_scaling=dict(type="yarn") | FACTORS), {}),
    )),
    row("phimoe", dict(architectures=["PhiMoEForCausalLM"]), {}),
    # transformers writes this default for encoders of any number of layers
    row("qwen2_5_vl/config", {"vision_config.fullatt_block_indexes": [7, 15, 23, 31]},
        {"vision_config.fullatt_block_indexes": []}),
    row("qwen3_moe", dict(num_experts=6), drop("num_experts") | dict(num_local_experts=6)),
    row("qwen4_exp_text", dict(layer_types=[LINEAR, "indexed_attention"]), dict(layer_types=[LINEAR, FULL])),
    row("recurrent_gemma", drop("block_types") | dict(_block_types=["attention", "recurrent"]),
        dict(block_types=["attention", "recurrent"])),
    row("recurrent_gemma", dict(embeddings_scale_by_sqrt_dim=True), {}),
    row("xlstm", dict(cell_norm_eps=1e-3, mlstm_round_up_to_multiple_of=64, igate_bias_init_range=-10.0), {}),
    row("xlstm", dict(add_post_blocks_norm=True, add_forward_backend_padding=False), {}),
    row("xlstm", dict(add_post_norm=False, add_embedding_dropout=False, force_bos_token_insert=True), {}),
    row("xlstm", dict(add_qk_norm=False), {}),
    row("xlstm", dict(v_dim_factor=2.0, head_dim=32), dict(v_dim_factor=2.0)),  # features of values
]
# fmt: on


@cases("source, keys, others", EQUAL)
def test_these_keys_are_equivalent(source, keys, others):
    config, _, _ = decode_config(settings(source, keys), "config.json")
    assert config == decode(settings(source, others))


# fmt: off
# source, keys that change the model
CHANGED = [
    row(MIXTRAL, dict(num_experts_per_tok=1)),
    row(MIXTRAL, dict(sliding_window=4096)),
    row(QWEN3, dict(norm_topk_prob=False)),
    row(QWEN3, dict(decoder_sparse_step=2)),
    row(QWEN3, dict(mlp_only_layers=[3])),
    row(QWEN3, dict(use_sliding_window=True, sliding_window=64)),
    row(GPT_OSS, dict(swiglu_limit=1.0)),
    row(SCOUT, dict(attn_temperature_tuning=0)),
    row(SCOUT, dict(attn_temperature_tuning=False)),
    row(SCOUT, dict(use_qk_norm=False)),
    row(SCOUT, dict(no_rope_layers=[1] * 48)),
    row("meta-llama/Llama-4-Maverick-17B-128E", dict(interleave_moe_layer_step=1)),
    row("llama4_text", dict(attn_temperature_tuning=0)),
    row(V2, dict(topk_method="greedy")),
    row(V2, dict(topk_group=2)),
    row(V3, dict(norm_topk_prob=False)),
    row(V3, dict(rope_interleave=False)),
    row(V3, dict(n_group=4)),
    row(GLM4, dict(attention_bias=False)),
    row(GLM4, dict(partial_rotary_factor=1.0)),
    row("THUDM/GLM-4-32B-0414", dict(attention_bias=True)),
    row(AIR, dict(use_qk_norm=True)),
    row(AIR, dict(first_k_dense_replace=0)),
    row(QWEN15_MOE, dict(norm_topk_prob=True)),
    row(QWEN15_MOE, dict(qkv_bias=False)),
    row(QWEN15_MOE, dict(shared_expert_intermediate_size=8)),
    row("recurrent_gemma", dict(block_types=["attention", "recurrent"])),
    row(SOLAR, dict(attention_bias=True)),
    row(SOLAR, dict(moe_intermediate_size=8)),
    row("ibm-granite/granite-3.1-3b-a800m-instruct", dict(attention_multiplier=0.125)),
    row(TRINITY, dict(mup_enabled=False)),
    row(TRINITY, dict(num_shared_experts=2)),
]
# fmt: on


@cases("source, keys", CHANGED)
def test_these_keys_change_the_model(source, keys):
    assert decode(settings(source, keys)) != decode(settings(source, {}))


# --- exported keys ---

# fmt: off
# source, changed keys, keys that an export must contain
WRITTEN = [
    *rows("deepseek2_groups/config", {}, [
        ({f"rope_parameters.{key}": value for key, value in factors.items()},
         {f"{table}.{key}": value for table in ("rope_parameters", "rope_scaling") for key, value in factors.items()})
        for factors in (
            dict(mscale=mscale, mscale_all_dim=all_dim, factor=factor)
            for mscale in (1.0, 0.707, 1e-300) for all_dim, factor in ((0.707, 40.0), (1691.0, 8.0))
        )
    ]),
    row("ernie4_5_moe", dict(moe_num_shared_experts=0), dict(moe_num_shared_experts=0)),
    row("ernie4_5_moe", dict(use_bias=False), dict(use_bias=False)),
    row("ernie4_5_moe", dict(use_bias=True), dict(use_bias=True)),
    row("gemma3n_text", dict(intermediate_size=[20, 24, 28, 32]), dict(intermediate_size=[20, 24, 28, 32])),
    row("granitemoeshared", dict(shared_intermediate_size=0), dict(shared_intermediate_size=0)),
    *rows(("hy_v3", "glm4_moe_lite"), drop("first_k_dense_replace") | dict(num_hidden_layers=3), (
        (dict(mlp_layer_types=["sparse", "dense", "sparse"]), dict(mlp_layer_types=["sparse", "dense", "sparse"])),
    )),
    *rows("jamba", {}, [
        (dict(num_hidden_layers=count) | keys, keys) for count, keys in (
            (6, dict(attn_layer_period=3, attn_layer_offset=1, expert_layer_period=3, expert_layer_offset=1)),
            (5, dict(attn_layer_period=5, attn_layer_offset=2, expert_layer_period=5, expert_layer_offset=2)),
        )
    ]),
    row("minimax_m3_vl_text", drop("layer_types", "mlp_layer_types", "index_block_size"),
        drop("index_block_size", "dense_intermediate_size")),
    row("modernbert-decoder", dict(classifier_bias=False, decoder_bias=False),
        dict(classifier_bias=False, decoder_bias=False)),
    row("opt", dict(_remove_final_layer_norm=True), dict(_remove_final_layer_norm=True)),
    # the norms are after the sums, so there is no last norm to remove
    row("opt", dict(_remove_final_layer_norm=True, do_layer_norm_before=False, word_embed_proj_dim=16),
        dict(_remove_final_layer_norm=False)),
    row("Qwen/Qwen2-57B-A14B", {}, dict(use_sliding_window=False, sliding_window=0)),
    row("Qwen/Qwen3-30B-A3B-Instruct-2507", {}, dict(moe_intermediate_size=768, mlp_only_layers=[])),
    row("qwen4_exp_text", dict(ple_layer_ids=[2, 1]), dict(ple_layer_ids=[1, 2])),
    # the layer cycle is written once, and `intermediate_size` is even
    *rows("recurrent_gemma", dict(num_hidden_layers=5, intermediate_size=37), [
        (dict(block_types=kinds(letters)), dict(block_types=kinds(cycle), intermediate_size=36))
        for letters, cycle in (("raara", "raa"), ("ra", "ra"), ("aaaaa", "a"), ("rra", "rra"))
    ]),
]
# fmt: on


@cases("source, keys, written", WRITTEN)
def test_export_contains_these_keys(source, keys, written):
    content = settings(source, keys)
    again = encode(content)
    assert {path: value_at(again, path) for path in written} == written
    assert decode(again) == decode(content)


# fmt: off
# source, changed values of its configuration, family of the export, parts of the error
NOT_WRITTEN = [
    row("deepseek2_groups/config", {"blocks.0.mixer.query_scale": 0.1}, "deepseek_v2",
        ["blocks[0].mixer.query_scale=0.1"]),
    *(row(kind, {"blocks.0.mixer.out_bias": True, "blocks.1.mixer.out_bias": True}, kind, ["out_bias"])
      for kind in ("glm", "glm4", "glm4_moe", "solar_open")),
    *(row(name, {}, "gemma4_text", ["Gemma4ForCausalLM"]) for name in ("tiny", "gemma3-1b", "deepseek-custom")),
    # types of layers that the family does not support
    *(row("tiny", {}, family, ["experts"], name=dict(family=family))
      for family in ("afmoe", "deepseek_v3", "ernie4_5_moe", "lfm2_moe")),
    row("afmoe", {"blocks.0.mixer.mask": Bidirectional()}, "afmoe", ["AttentionConfig.mask=Bidirectional("]),
    row("bloom", {}, "gptj", ["AttentionConfig.rope=None"], name=dict(family="gptj")),
    row("deepseek_v4", {"blocks.0.mixer": AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=8)}, "deepseek_v4",
        ["BlockConfig.mixer=AttentionConfig(", "CompressedAttentionConfig"]),
    row("gemma3_text", {"blocks.0.mixer.mask": Bidirectional()}, "gemma3_text", ["mask=Bidirectional("]),
    row("glm_moe_dsa", {"blocks.0.mixer": AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=8)}, "glm_moe_dsa",
        ["AttentionConfig has no attribute chooses"]),
    row("llama", {"blocks.0.mixer.rope": AxialRope()}, "llama", ["AttentionConfig.rope=AxialRope(", "YarnRope"]),
    row("llava1.5-7b", {"media.vision.depths": ()}, "llava", ["EncoderConfig.depths=()"]),
    *(row("tiny", {}, family, names, name=dict(family=family)) for family, names in (
        ("llava", ["media"]), ("xlstm", ["key_dim"]))),
    row("mixtral", {}, "minimax", ["BlockConfig.residual="], name=dict(family="minimax")),
]
# fmt: on


@cases("source, values, family, names", NOT_WRITTEN)
def test_export_refuses_unsupported_configurations(source, values, family, names):
    config = ed.get_config(source) if source in ed.list_models() else decode(settings(source, {}))
    for path, value in values.items():
        config = replaced(config, path, value)
    with refused(ed.ConversionError, *names):
        FAMILIES[family].encode(config)


# --- refused keys ---


def refusal(source: str, keys: dict, *names: object) -> pytest.param:
    return row(source, keys, names)


# fmt: off
# source, changed keys, parts of the error
REFUSED = [
    refusal("apertus", dict(mlp_bias=True), "mlp_bias=true"),
    refusal("apertus", dict(post_norm=True), "post_norm=true"),
    refusal("apertus", dict(qk_norm=False), "qk_norm=false"),
    refusal("bamba", dict(attn_layer_indices=[]), "attn_layer_indices"),
    refusal("bamba", dict(attn_layer_indices=[1, 99]), "attn_layer_indices=[1, 99]", "from 0 to"),
    refusal("bamba", dict(attn_layer_indices=[-1]), "attn_layer_indices=[-1]"),
    refusal("bamba", dict(attn_rotary_emb=8), "attn_rotary_emb=8"),
    refusal("bamba", dict(mamba_d_head=9), "mamba_n_heads=6", "mamba_d_head=9", "mamba_expand", "hidden_size", 48),
    refusal("bamba", dict(rope_parameters=None, partial_rotary_factor=1.0), "half"),
    refusal(R7B, dict(use_parallel_block=False), "use_parallel_block"),  # transformers does not read it
    refusal(R7B, dict(rotary_pct=0.5), "rotary_pct"),
    refusal(R7B, dict(head_dim=64), "head_dim"),
    refusal("dbrx", NO_ROPE | {"attn_config.rope_theta": 5e5, "rope_theta": 1e4},
            "attn_config.rope_theta=500000.0", "10000.0"),
    refusal("dbrx", {"ffn_config.moe_normalize_expert_weights": 2.0}, "moe_normalize_expert_weights=2.0"),
    refusal("dbrx", {"ffn_config.uniform_expert_assignment": True}, "uniform_expert_assignment=true"),
    refusal(V2_LITE, dict(topk_method="noaux_tc"), "topk_method"),
    refusal(V2_LITE, dict(scoring_func="sigmoid"), "scoring_func"),
    refusal(V2_LITE, dict(moe_layer_freq=2), "moe_layer_freq"),
    refusal(V2, dict(ep_size=8), "ep_size"),
    refusal(V3, dict(qk_head_dim=64), "qk_head_dim=64", 192),
    refusal(V3, dict(topk_method="greedy"), "topk_method"),
    refusal(V3, dict(scoring_func="softmax"), "scoring_func"),
    refusal("deepseek_v4", dict(n_shared_experts=2), "n_shared_experts"),
    refusal("deepseek_v4", dict(num_key_value_heads=2), "num_key_value_heads"),
    refusal("deepseek_v4", dict(norm_topk_prob=False), "norm_topk_prob"),
    *rows("deepseek_v4", {}, (
        (drop("layer_types") | dict(compress_ratios=[0, 4, 128, 4]), ["compress_ratios"]),
        (drop("layer_types") | dict(compress_ratios=[0, 4]), ["compress_ratios has 2 entries", 3]),
        (drop("layer_types") | dict(compress_ratios=[]), ["compress_ratios has 0 entries", 3]),
        (drop("layer_types") | dict(compress_ratios=[0, 4, 64]), ["compress_ratios: 64", 128]),
        (dict(compress_ratios=[0, 4, 4]), ["compress_ratios=[0, 4, 4]", "layer_types"]),
        (dict(compress_rate_csa=2), ["compress_rate_csa=2", "compress_rates.compressed_sparse_attention=3"]),
        (dict(mlp_layer_types=["moe", "hash_moe", "moe"], num_hash_layers=1), ["num_hash_layers=1", "mlp_layer_types"]),
        (dict(qk_rope_head_dim=4, partial_rotary_factor=0.25), ["qk_rope_head_dim=4", "8 x 0.25"]),
        (drop("rope_parameters") | dict(rope_theta=7.0, compress_rope_theta=8.0, rope_scaling={
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 9.0}),
         ["rope_theta=9.0", "[7.0, 8.0]"]),
    )),
    refusal("diffllama", dict(num_attention_heads=3, num_key_value_heads=3), "num_key_value_heads=3"),
    refusal("doge", dict(is_moe=True), "is_moe=true"),
    refusal("doge", dict(sliding_window=4), "sliding_window=4"),
    refusal("ernie4_5_moe", drop("moe_layer_interval", "moe_layer_end_index") | dict(
        num_hidden_layers=7, moe_layer_start_index=7), "experts"),
    refusal("ernie4_5_moe", dict(num_nextn_predict_layers=1, use_bias=True), "bias", "mtp_linear_proj"),
    # a pattern of letters requires `layer_types`, because transformers ignores the pattern
    refusal("exaone4", NO_WINDOW | dict(num_hidden_layers=4, sliding_window=7, sliding_window_pattern="LLLG"),
            "sliding_window_pattern=LLLG"),
    refusal("falcon", drop(*FALCON_KEYS) | dict(new_decoder_architecture=True, bias=True), "bias=true"),
    refusal("falcon", drop(*FALCON_KEYS) | dict(num_ln_in_parallel_attn=2),
            "num_ln_in_parallel_attn=2", "new_decoder_architecture=true"),
    refusal("falcon_h1", dict(mamba_d_ssm=49), "mamba_n_heads=6", "mamba_d_head=8", "mamba_d_ssm=49"),
    refusal("falcon_h1", dict(mamba_d_ssm=None, mamba_expand=3), "mamba_d_ssm=72"),
    refusal("falcon_h1", dict(ssm_multipliers=[1.0, 2.0]), "ssm_multipliers", 5),
    refusal("falcon_h1", dict(mlp_multipliers=[1.0, 0.0]), "mlp_multipliers[1]=0.0"),
    refusal("falcon_mamba", dict(time_step_rank="half"), "time_step_rank"),
    refusal("gemma2", NO_WINDOW | dict(num_hidden_layers=3, layer_types=[FULL, LOCAL]), "layer_types", 2, 3),
    refusal("gemma2", NO_WINDOW | dict(num_hidden_layers=1, layer_types=["chunked_attention"]),
            "layer_types", "chunked_attention"),
    refusal("gemma3_text", GEMMA3_ROPE | dict(rope_scaling=dict(type="yarn", rope_type="linear", factor=4.0)),
            "type=yarn", "rope_type=linear"),
    refusal("gemma3n_text", dict(activation_sparsity_pattern=[0.5]), "activation_sparsity_pattern", 4),
    refusal("gemma3n_text", dict(activation_sparsity_pattern=[1.0] * 4), "activation_sparsity_pattern", 4),
    refusal("gemma3n_text", dict(altup_active_idx=1), "altup_active_idx=1"),
    refusal("gemma3n_text", dict(altup_num_inputs=17), "altup_num_inputs=17", 16),
    refusal("gemma3n_text", dict(intermediate_size=[]), "intermediate_size", "above 0"),
    refusal("gemma3n_text", dict(intermediate_size=[20]), "intermediate_size"),
    refusal("gemma3n_text", dict(num_kv_shared_layers=4), "num_kv_shared_layers=4"),
    refusal("gemma4_text", dict(enable_moe_block=True, num_experts=None), "num_experts"),
    refusal("gemma4_text", dict(num_kv_shared_layers=5), "num_kv_shared_layers=5"),
    refusal("gemma4_text", dict(num_kv_shared_layers=99), "num_kv_shared_layers=99"),
    refusal("gemma4_text", dict(per_layer_config={"0": {"num_attention_heads": 8}}), "num_attention_heads"),
    refusal("gemma4_text", dict(per_layer_config={"77": {"head_dim": 8}}), "per_layer_config", '"77"'),
    refusal("gemma4_text", dict(use_bidirectional_attention="all"), "use_bidirectional_attention=all"),
    refusal(GLM4, dict(sliding_window=8), "sliding_window"),
    refusal(AIR, dict(scoring_func="softmax"), "scoring_func"),
    refusal("glm_moe_dsa", drop("mlp_layer_types", "layer_types") | dict(
        num_hidden_layers=6, indexer_types=["shared"] * 6), "blocks[0].mixer.indexer.shared_from='choice'"),
    refusal("glm_moe_dsa", drop("mlp_layer_types", "layer_types") | dict(
        num_hidden_layers=2, indexer_types=["full", "shared"], index_topk_pattern="FF"),
            "index_topk_pattern=FF", "indexer_types"),
    refusal("glm_moe_dsa", dict(indexer_rope_interleave=False), "indexer_rope_interleave"),
    refusal("gpt2", dict(hidden_size=8), "hidden_size=8", "n_embd=24"),
    refusal("gpt_neox", drop("rope_parameters") | dict(rotary_pct=0.25, partial_rotary_factor=0.5),
            "rotary_pct=", "partial_rotary_factor="),
    refusal("gpt_oss", dict(hidden_act="gelu"), "hidden_act=gelu"),
    refusal("gpt_oss", dict(swiglu_alpha=1.0), "swiglu_alpha=1.0"),
    refusal("gpt_oss", dict(experts_per_token=3), "experts_per_token=3"),
    refusal(GPT_OSS, dict(experts_per_token=2), "experts_per_token"),
    refusal(GPT_OSS, dict(hidden_act="gelu"), "hidden_act"),
    refusal(GPT_OSS, dict(swiglu_alpha=1.0), "swiglu_alpha"),
    refusal("granitemoe", dict(position_embedding_type="nope"), "position_embedding_type=nope"),
    refusal("granitemoehybrid", dict(mamba_d_head=7), "mamba_n_heads=6", "mamba_d_head=7"),
    refusal("granitemoehybrid", dict(position_embedding_type="alibi"), "position_embedding_type=alibi"),
    refusal("granitemoehybrid", dict(time_step_limit=[0.5]), "time_step_limit=[0.5]"),
    refusal("granitemoehybrid", dict(time_step_limit=[0.5, 0.1]), "dt_max=0.1"),
    refusal("helium", dict(head_dim=16), "num_attention_heads", "head_dim", "hidden_size"),
    *(refusal(kind, drop("first_k_dense_replace") | dict(num_hidden_layers=3, mlp_layer_types=["dense"] * 3), "experts")
      for kind in ("hy_v3", "glm4_moe_lite")),
    *(refusal("hy_v3", {key: False}, key)  # transformers does not read them
      for key in ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias")),
    *(refusal(kind, dict(architectures=[f"{name}ForSequenceClassification"]), "architectures=")
      for kind, name in (("internlm3", "InternLM3"), ("jetmoe", "JetMoE"), ("mpt", "MPT"), ("phimoe", "PhiMoE"))),
    refusal("jamba", dict(attn_layer_offset=3), "attn_layer_offset=3", "attn_layer_period=3"),
    refusal("jamba", dict(attn_layer_period=9, attn_layer_offset=8), "attn_layer_offset"),
    refusal("jamba", dict(sliding_window=5), "sliding_window=5"),
    refusal("kimi_linear", dict(linear_attn_config={"full_attn_layers": [4], "kda_layers": [1]}), "linear_attn_config"),
    refusal("kimi_linear", dict(linear_attn_config={"gate_lower_bound": -5.0}), "gate_lower_bound"),
    refusal("kimi_linear", dict(linear_attn_config={"head_dim": 7}), "head_dim=7", "linear_head_dim=6"),
    refusal("kimi_linear", dict(layer_types=None), "layer_types is missing", "full_attn_layers"),
    refusal("kimi_linear", dict(linear_attn_config={"full_attn_layers": [5], "kda_layers": [1, 2, 3, 4]}),
            "full_attn_layers=[5]", "layer_types", [4]),
    refusal("kimi_linear", dict(mla_use_nope=False), "mla_use_nope"),
    refusal("kimi_linear", dict(qk_head_dim=4), "qk_head_dim=4", 12),
    refusal("kimi_linear", dict(mla_use_output_gate=True), "mla_use_output_gate"),
    refusal("lfm2", drop("layer_types") | dict(num_hidden_layers=2, full_attn_idxs=[1, 2]), "full_attn_idxs=[1, 2]"),
    refusal("lfm2", dict(layer_types=["conv", FULL], num_hidden_layers=2, full_attn_idxs=[0]), "layer_types="),
    refusal("lfm2", dict(layer_types=["conv", "conv"], num_hidden_layers=2), "attention"),
    refusal("lfm2_moe", dict(num_dense_layers=99), "experts"),
    refusal("llama", dict(_attn_implementation_internal="evil/kernel"), "_attn_implementation_internal"),
    refusal("llama", dict(add_cross_attention=True), "add_cross_attention=true"),
    refusal("llama", dict(architectures=["LlamaForSequenceClassification"]), "LlamaForCausalLM"),
    refusal("llama", dict(atention_bias=True), "'attention_bias'"),
    refusal("llama", dict(auto_map={"AutoModel": "modeling_x.X"}), "auto_map"),
    refusal("llama", dict(head_dim=None, num_attention_heads=5, num_key_value_heads=5), "num_attention_heads=5"),
    refusal("llama", dict(head_dim=7), "head_dim=7"),
    refusal("llama", dict(hidden_act="Silu"), "hidden_act=Silu", "'silu'"),
    refusal("llama", dict(hidden_act="mish"), "hidden_act=mish"),
    refusal("llama", dict(hidden_act=["silu"]), "hidden_act"),
    refusal("llama", dict(hidden_size=64.0), "hidden_size=64.0"),
    refusal("llama", dict(hidden_size=True), "hidden_size=true"),
    refusal("llama", dict(is_causal=False), "is_causal=false"),
    refusal("llama", dict(logits_scaling=8.0), "logits_scaling"),
    refusal("llama", dict(max_length=True), "max_length=true"),
    refusal("llama", dict(num_attention_heads=0), "num_attention_heads=0"),
    refusal("llama", dict(num_hidden_layers=-2), "num_hidden_layers=-2"),
    refusal("llama", dict(num_hidden_layers=10**6), "num_hidden_layers=1000000", 1024),
    refusal("llama", dict(num_key_value_heads=3), "num_kv_heads=3"),
    refusal("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    refusal("llama", dict(prefix=4), "prefix=4"),
    refusal("llama", dict(rms_norm_eps=0), "rms_norm_eps=0"),
    refusal("llama", dict(rms_norm_eps=10**400), "rms_norm_eps="),
    refusal("llama", dict(rms_norm_eps=float("nan")), "rms_norm_eps=NaN"),
    *rows("llama", NO_ROPE | dict(max_position_embeddings=128), (
        (dict(rope_parameters=dict(rope_type="spiral", factor=2)), ["rope_parameters", "rope_type=spiral"]),
        (dict(rope_parameters=dict(rope_type="yarn")), ["factor"]),
        (dict(rope_parameters=dict(rope_type="linear", factor=0.5)), ["factor=0.5"]),
        (dict(rope_parameters=dict(rope_type="llama3", factor=8)), ["low_freq_factor"]),
        (dict(rope_parameters=LLAMA3_KEYS | dict(high_freq_factor=0.5)), ["high_frequency_factor=0.5"]),
        (dict(rope_parameters=dict(short_factor=[1])), ["short_factor"]),
        (dict(rope_parameters=dict(partial_rotary_factor=0.5)), ["partial_rotary_factor=0.5"]),
        (dict(rope_parameters=dict(rope_theta=1e4), rope_theta=5e5), ["rope_theta=10000.0", "500000.0"]),
        (dict(rope_parameters=dict(rope_theta=1e4), rope_scaling=dict(type="linear", factor=2)),
         ["rope_parameters", "rope_scaling"]),
        (dict(rope_parameters=["yarn"]), ["rope_parameters"]),
        (dict(rope_scaling=dict(extrapolation_factor=2.0) | YARN_KEYS), ["extrapolation_factor=2.0"]),
        (dict(rope_theta="1e4"), ["rope_theta="]),
    )),
    refusal("llama", dict(sliding_window=128), "sliding_window"),
    refusal("llama", dict(temperature=[1.0]), "temperature=[1.0]"),
    refusal("llama", dict(tie_word_embeddings="no"), "tie_word_embeddings=no"),
    refusal("llama", dict(top_k=2.5), "top_k=2.5"),
    refusal("llama", dict(vocab_size="128"), 'vocab_size="128"'),
    refusal("llama", dict(vocab_size=10**12), "vocab_size=1000000000000", 2147483647),
    refusal("llama", dict(vocab_size=None), "vocab_size"),
    refusal(SCOUT, dict(for_llm_compressor=True), "for_llm_compressor"),
    refusal("longcat_flash", dict(head_dim=7), "head_dim=7", "qk_rope_head_dim="),
    refusal("mamba", dict(hidden_act="gelu"), "hidden_act=gelu"),
    refusal("mamba", dict(mixer_rms_eps=1e-6), "mixer_rms_eps"),
    refusal("mamba2", dict(head_dim=9), "num_heads=6", "head_dim=9", "expand", "hidden_size", 48),
    refusal("mamba2", dict(hidden_act="gelu"), "hidden_act=gelu"),
    refusal("minimax", dict(mlp_beta_factor=0), "mlp_beta_factor=0"),
    refusal("minimax", dict(postnorm=False), "postnorm=false"),
    refusal("minimax", dict(sliding_window=8), "sliding_window=8"),
    refusal(M2, dict(attn_type_list=[0] * 62), "attn_type_list"),
    refusal(M2, dict(partial_rotary_factor=0.25), "partial_rotary_factor"),
    refusal(M2, dict(shared_intermediate_size=8), "shared_intermediate_size"),
    refusal(M2, dict(use_routing_bias=False), "use_routing_bias"),
    refusal("minimax_m3_vl_text", dict(mlp_layer_types=["dense"] * 2), "experts"),
    refusal("minimax_m3_vl_text", dict(moe_layer_freq=[1, 1]), "moe_layer_freq"),
    refusal("minimax_m3_vl_text", dict(sparse_attention_config=[1, 1]), "sparse_attention_config"),
    refusal("ministral3", dict(rope_scaling=sample("ministral3")["rope_parameters"] | dict(llama_4_scaling_beta=0.7)),
            "llama_4_scaling_beta", "=0.7"),
    refusal("mistral", NO_WINDOW | dict(num_hidden_layers=2, layer_types=[FULL, LOCAL]), "layer_types"),
    refusal("mistral", NO_WINDOW | dict(num_hidden_layers=2, layer_types=[FULL, FULL]), "layer_types"),
    refusal("modernbert-decoder", drop("layer_types", "global_attn_every_n_layers") | dict(
        local_attention=15, sliding_window=6), "sliding_window=6", 7),
    refusal("mpt", {"attn_config.alibi": False}, "alibi=false"),  # transformers does not read them
    refusal("mpt", {"attn_config.alibi_bias_max": 16}, "alibi_bias_max=16"),
    refusal("mpt", {"attn_config.prefix_lm": True}, "prefix_lm=true"),
    refusal("mpt", {"attn_config.qk_ln": True}, "qk_ln=true"),
    refusal("nemotron_h", dict(layers_block_type=None, hybrid_override_pattern="M-X*"), "hybrid_override_pattern"),
    refusal("nemotron_h", dict(layers_block_type=["mamba", "attention"], hybrid_override_pattern="*M"),
            'hybrid_override_pattern="*M"', "layers_block_type", "M*"),
    refusal("nemotron_h", dict(layers_block_type=["mlp"]), "attention"),
    refusal("nemotron_h", dict(mamba_hidden_act="gelu"), "mamba_hidden_act"),
    refusal("nemotron_h", dict(num_nextn_predict_layers=1, layers_block_type=["mlp", "attention"]), "experts"),
    refusal("nemotron_h", dict(num_nextn_predict_layers=1, mtp_layers_block_type=["moe"]), "*E"),
    refusal("nemotron_h", dict(num_nextn_predict_layers=2), "num_nextn_predict_layers=2"),
    refusal("olmo_hybrid", dict(layer_types=[FULL] * 3), "attention"),
    refusal("olmo_hybrid", dict(linear_use_gate=False), "linear_use_gate"),
    refusal("opt", dict(learned_embeddings=False), "learned_embeddings=false"),
    refusal("opt", dict(scale_embeddings=True), "scale_embeddings=true"),
    *(refusal("phi3", {f"rope_parameters.{factors}": bad}, factors)
      for factors in ("short_factor", "long_factor") for bad in ([1.0, -1.0, 2.0], "many", [1.0, "2", 3.0])),
    refusal("phimoe", drop("rope_parameters.long_mscale"), "long_mscale"),
    refusal("phimoe", dict(rope_scaling=sample("phimoe")["rope_parameters"] | dict(short_mscale=1.2)),
            "short_mscale", "[1.1, 1.2]"),
    refusal("phimoe", dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4)),
            "rope_type", "default", "longrope"),
    refusal(QWEN15_MOE, dict(use_qk_norm=True), "use_qk_norm"),
    refusal("qwen3", NO_WINDOW | dict(num_hidden_layers=2, layer_types=[FULL, LOCAL], sliding_window=None),
            "sliding_window"),
    refusal("qwen3", NO_WINDOW | dict(
        num_hidden_layers=2, layer_types=[FULL, LOCAL], sliding_window=None, use_sliding_window=True),
            "sliding_window"),
    refusal(CODER, dict(qkv_bias=True), "qkv_bias"),
    refusal(CODER, dict(shared_expert_intermediate_size=8), "shared_expert_intermediate_size"),
    refusal(CODER, dict(use_qk_norm=False), "use_qk_norm"),
    refusal("qwen3_5_moe_text", dict(linear_num_value_heads=3), "num_heads=3", "num_key_heads=2"),
    refusal("qwen3_5_text", dict(attn_output_gate=False), "attn_output_gate"),
    refusal("qwen3_5_text", dict(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=True),
            "mtp_use_dedicated_embeddings"),
    refusal("qwen3_moe", drop("mlp_only_layers") | dict(decoder_sparse_step=5), "experts"),
    refusal("qwen3_moe", drop("decoder_sparse_step") | dict(mlp_only_layers=[0, 1, 2, 3]), "experts"),
    refusal("qwen3_moe", dict(num_experts=6, num_local_experts=4), "num_local_experts=4", "num_experts=6"),
    refusal("qwen3_next", dict(attention_bias=True), "attention_bias"),
    refusal("qwen3_next", dict(layer_types=[FULL] * 6), "attention"),
    refusal("qwen3_next", dict(layer_types=[LINEAR] * 6), "attention"),
    refusal("qwen3_next", dict(num_nextn_predict_layers=2), "num_nextn_predict_layers=2"),
    *(refusal("qwen4_exp_text", dict(eos_token_id=token), f"eos_token_id={shown}", 63)
      for token, shown in ((None, "null"), (True, "true"), (-1, "-1"), (64, "64"), ([], "[]"), ([2, "x"], '[2, "x"]'))),
    refusal("qwen4_exp_text", dict(indexer_budget=7), "indexer_budget=7", "indexer_compress_ratio=3"),
    refusal("qwen4_exp_text", dict(indexer_kv_heads=2), "indexer_kv_heads=2"),
    refusal("qwen4_exp_text", dict(mtp_num_hidden_layers=1, mtp={"rope_theta": 5}), "mtp: rope_theta=5"),
    refusal("qwen4_exp_text", dict(output_gate_type="tanh"), "output_gate_type=tanh"),
    refusal("qwen4_exp_text", dict(ple_embed_dim=10), "ple_embed_dim=10", "=4"),
    refusal("qwen4_exp_text", dict(ple_layer_ids=[0]), "ple_layer_ids=[0]", 1, 2),
    refusal("qwen4_exp_text", dict(split_ngram_parts=7), "table_parts=7"),
    refusal("recurrent_gemma", dict(block_types=["attention", "mamba"]), "block_types", "mamba"),
    refusal("recurrent_gemma", dict(block_types=["recurrent"]), "block_types"),
    refusal("recurrent_gemma", dict(embeddings_scale_by_sqrt_dim=False), "embeddings_scale_by_sqrt_dim=false"),
    refusal("recurrent_gemma", dict(lru_width=23), "lru_width=23", "num_attention_heads=2"),
    refusal("rwkv", dict(time_mix_extra_dim=32), "time_mix_extra_dim"),
    refusal("smollm3", NO_WINDOW | dict(num_hidden_layers=4, sliding_window=7, layer_types=[LOCAL] * 4),
            "sliding_window"),
    refusal(SOLAR, dict(first_k_dense_replace=1), "first_k_dense_replace"),
    refusal(SOLAR, dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    refusal(SOLAR, dict(use_qk_norm=True), "use_qk_norm"),
    refusal(TRINITY, dict(n_group=2), "n_group"),
    refusal(TRINITY, dict(route_norm=False), "route_norm"),
    refusal(TRINITY, dict(score_func="softmax"), "score_func"),
    refusal("xlstm", dict(add_post_blocks_norm=False), "add_post_blocks_norm=false"),
    refusal("xlstm", dict(add_post_norm=True), "add_post_norm=true"),
    refusal("xlstm", dict(add_qk_norm=True), "add_qk_norm=true"),
    refusal("xlstm", dict(cell_norm_eps=1e-5), "cell_norm_eps=1e-05"),
    refusal("xlstm", dict(gate_soft_cap=50.0), "gate_cap=50.0", 40),
    refusal("xlstm", dict(num_blocks=3), "num_blocks=3", "num_hidden_layers=1"),
    refusal("xlstm", dict(use_bias=True), "use_bias=true"),
    refusal("xlstm", dict(v_dim_factor=0.1), "v_dim_factor=6", "num_heads=4"),
    refusal("xlstm", dict(v_dim_factor=2.0, head_dim=16), "head_dim="),  # features of keys
    refusal("xlstm", dict(weight_mode="fused"), "weight_mode=fused"),
    refusal("zamba2", dict(add_bias_linear=True), "add_bias_linear=true"),
    refusal("zamba2", dict(layers_block_type=None), "layers_block_type"),
    refusal("zamba2", dict(num_mem_blocks=4), "num_mem_blocks"),
    refusal("zamba2", dict(use_long_context=True), "use_long_context=true"),
    # models with encoders
    refusal("gemma3n_vision/config", dict(image_token_id=9), "image_token_id=9", "audio_token_id=55"),
    refusal("gemma3n_vision/config", dict(vision_soft_tokens_per_image=9), "vision_soft_tokens_per_image=9", "2 x 2"),
    *rows("gemma3n_vision/config", {}, (
        ({"audio_config.hidden_size": 9}, ["hidden_size=9", "conf_num_attention_heads=2"]),
        ({"audio_config.sscp_conv_channel_size": [3]}, ["sscp_conv_channel_size=[3]"]),
        ({"audio_config.sscp_conv_stride_size": [[1, 2], [2, 2]]}, ["sscp_conv_stride_size="]),
        ({"audio_config.vocab_size": 4}, ["EncoderTokensConfig.fill=59", 55, 58]),
        ({"vision_config.architecture": "resnet50"}, ["architecture=resnet50"]),
        ({"vision_config.hidden_size": 9}, ["hidden_size=9", 8, "mobilenetv5_300m"]),
        ({"vision_config.vocab_size": 4}, ["[(52, 56), (55, 60)]"]),
        ({"vision_config.model_args.act_layer": "relu"}, ["model_args", "act_layer"]),
        ({"vision_config.model_args.block_args": [[]]}, ["block_args", 4]),
        ({"vision_config.model_args.block_args": [["uir"]]}, ["block_args[0][0]=uir", "object"]),
        ({"vision_config.model_args.block_args.0.0.block_type": "ir"}, ["block_type=ir"]),
        ({"vision_config.model_args.block_args.0.0.stride": 1}, ["stride", 2]),
        ({"vision_config.model_args.block_args.1.0.dw_kernel_size_end": 3},
         ["block_args[1][0]", "dw_kernel_size_end=3"]),
        ({"vision_config.model_args.block_args.2.1.value_dim": 5}, ["value_dim=5", 4]),
        ({"vision_config.model_args.msfa_indices": [0]}, ["msfa_indices=[0]", 1, 3]),
        ({"vision_config.model_args.stem_size": 12}, ["stem_size=12", 8]),
    )),
    *rows("gemma4_audio/config", {}, (
        ({"audio_config.attention_context_left": 1}, ["attention_context_left=1", 2]),
        ({"audio_config.attention_invalid_logits_value": -5.0}, ["attention_invalid_logits_value=-5.0"]),
        ({"audio_config.attention_logit_cap": 0}, ["attention_logit_cap=0"]),
        ({"audio_config.hidden_act": "mish"}, ["hidden_act=mish"]),
        ({"audio_config.hidden_size": 15}, ["hidden_size=15", "num_attention_heads=2"]),
        ({"audio_config.num_mel_bins": 80}, ["audio_config", "num_mel_bins"]),
        ({"audio_config.residual_weight": True}, ["residual_weight=true"]),
        ({"audio_config.subsampling_conv_channels": [8]}, ["subsampling_conv_channels=[8]"]),
        ({"audio_config.subsampling_conv_channels": [3, 2]}, ["subsampling_conv_channels", 4]),
    )),
    *rows("glm4v/config", {}, (
        ({"text_config.attention_bias": False}, ["attention_bias=false"]),
        ({"text_config.use_qk_norm": True}, ["use_qk_norm"]),
        ({"vision_config.image_size": [8, 4]}, ["image_size=[8, 4]"]),
        ({"vision_config.out_hidden_size": 8}, ["out_hidden_size=8", "hidden_size=16"]),
    )),
    refusal("granite-vision-3.2-2b", dict(vision_feature_select_strategy="default"), "'default'", "'full'", "SigLIP"),
    *rows("internvl3-1b", {}, (
        (dict(downsample_ratio=0.4), ["downsample_ratio=0.4"]),
        ({"text_config.model_type": "gemma2"}, ["model_type=gemma2"]),
        ({"vision_config.image_size": [448, 224]}, ["image_size=[448, 224]"]),
        ({"vision_config.use_mean_pooling": False}, ["use_mean_pooling=false"]),
    )),
    refusal("lfm2-vl-450m", {"text_config.model_type": "lfm2_moe"}, "model_type=lfm2_moe"),
    refusal("lfm2-vl-450m", {"vision_config.num_patches": 250}, "num_patches=250"),
    *rows("llama4-17b-128e-vision", {}, (
        ({"vision_config.intermediate_size": 4096}, ["intermediate_size=4096", 5632]),
        ({"vision_config.multi_modal_projector_bias": True}, ["multi_modal_projector_bias=true"]),
        ({"vision_config.pixel_shuffle_ratio": 0.3}, ["pixel_shuffle_ratio=0.3"]),
        ({"vision_config.vision_output_dim": 7680}, ["projector_input_dim=4096", "vision_output_dim=7680"]),
    )),
    *rows("llava1.5-7b", {}, (
        (dict(image_grid_pinpoints=[[336, 336]]), ["image_grid_pinpoints"]),
        (dict(vision_feature_layer=-26), ["vision_feature_layer", "num_hidden_layers=24"]),
        (dict(vision_feature_layer=[]), ["vision_feature_layer"]),
        (dict(vision_feature_select_strategy="full"), ["'full'", "'default'", "CLIP"]),
        ({"text_config.model_type": "gemma"}, ["model_type=gemma"]),
        ({"vision_config.model_type": "pixtral"}, ["model_type=pixtral"]),
    )),
    refusal("llava1.6-mistral-7b", dict(image_grid_pinpoints=[[336, 0]]), "image_grid_pinpoints"),
    refusal("llava1.6-mistral-7b", dict(image_grid_pinpoints=[[336, 500]]), "TilesConfig.side=336"),
    *rows("mistral-small-3.1-24b", {}, (
        (dict(vision_feature_layer=-2), ["vision_feature_layer=-2"]),
        ({"text_config.model_type": "qwen2"}, ["model_type=qwen2"]),
        ({"vision_config.head_dim": 32}, ["head_dim=32", "hidden_size", "num_attention_heads", 64]),
        ({"vision_config.rope_parameters": dict(rope_type="yarn")}, ["rope_type=yarn"]),
    )),
    *rows("phi4-multimodal-4.7b", {}, (
        (dict(audio_config=None), ["audio_config"]),
        (dict(rope_thetas=1.0), ["rope_thetas"]),
        ({"audio_config.chunk_size": 16}, ["chunk_size=16"]),
        ({"audio_config.ext_pw_out_channel": 512}, ["ext_pw_out_channel=512"]),
        ({"audio_config.num_attention_heads": 15}, ["hidden_size=1024", "num_attention_heads=15"]),
        ({"audio_config.time_reduction": 6}, ["time_reduction=6"]),
        ({"audio_config.time_reduction": 512}, ["time_reduction=512", 256]),
        ({"vision_config.crop_size": 420}, ["crop_size=420", "image_size=448"]),
        ({"vision_config.feature_layer": -30}, ["feature_layer=-30", "num_hidden_layers=27"]),
    )),
    *rows("qwen2_5_vl/config", {}, (
        (dict(text_config=3), ["text_config=3"]),
        (dict(vision_config=None), ["vision_config"]),
        ({"text_config.rope_parameters": {"mrope_interleaved": True}}, ["mrope_interleaved=true"]),
        ({"vision_config.fullatt_block_indexes": [0, 99]}, ["fullatt_block_indexes=[0, 99]", "depth="]),
        ({"vision_config.fullatt_block_indexes": [-1]}, ["fullatt_block_indexes=[-1]"]),
        ({"vision_config.num_heads": 3}, ["num_heads=3"]),
        ({"vision_config.out_hidden_size": 8}, ["out_hidden_size=8", "hidden_size=16"]),
        ({"vision_config.window_sice": 3}, ["window_sice"]),
        ({"vision_config.window_size": 3}, ["window_size=3", 4]),
    )),
    *rows("qwen3_omni/config", {}, (
        (dict(audio_config=None), ["audio_config"]),
        ({"audio_config.n_window_infer": 99}, ["n_window_infer=99", "n_window=50"]),
        ({"audio_config.output_dim": 8}, ["output_dim=8", "hidden_size=16"]),
        ({"audio_config.scale_embedding": True}, ["scale_embedding=true"]),
        ({"text_config.rope_parameters": {"mrope_interleaved": False}}, ["mrope_interleaved=false"]),
        ({"vision_config.apply_vit_abs_pos_embed": False}, ["apply_vit_abs_pos_embed=false"]),
        ({"vision_config.num_position_embeddings": 8}, ["num_position_embeddings=8"]),
    )),
    refusal("qwen3_vl", {"vision_config.deepstack_visual_indexes": list(range(9))}, "deepstack_visual_indexes=", 8),
    refusal("qwen3_vl", {"vision_config.deepstack_visual_indexes": [0, 99]}, "deepstack=(0, 99)"),
    *rows("smolvlm2-500m", {}, (
        (dict(vision_config=None), ["vision_config"]),
        ({"text_config.model_type": "mistral"}, ["model_type=mistral"]),
        ({"text_config.qk_layer_norms": True}, ["qk_layer_norms=true"]),
        ({"text_config.use_resampler": True}, ["use_resampler=true"]),
        ({"vision_config.image_size": 15}, ["image_size=15", "patch_size=16"]),
        ({"vision_config.num_attention_heads": 7}, ["hidden_size=768"]),
    )),
]
# fmt: on


@cases("source, keys, names", REFUSED)
def test_these_keys_are_refused(source, keys, names):
    with refused(ed.ConversionError, "config.json", *names) as caught:
        decode(settings(source, keys))
    assert len(str(caught.value)) < 500


# --- published models ---

NORM = RMSNormConfig(eps=1e-5)
LLAMA = {
    "mixer.mask": Causal(), "pre_mixer_norm": NORM, "pre_mlp_norm": NORM, "final_norm": NORM,
}  # fmt: skip
LLAMA3_ROPE = Llama3Rope(
    theta=5e5, factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192
)
GEMMA_NORM = RMSNormConfig(eps=1e-6, offset=1.0)
GEMMA = {
    "tied": True, "pre_mixer_norm": GEMMA_NORM, "pre_mlp_norm": GEMMA_NORM, "final_norm": GEMMA_NORM,
    "post_mixer_norm": None, "post_mlp_norm": None, "mixer.head_dim": 256, "mixer.query_scale": None,
}  # fmt: skip
GEMMA4_ROPE = ProportionalRope(theta=1e6, fraction=0.25)
MAXTEXT = {"vocab_size": 32_000, "embed_dim": 2048, "tied": False, "final_norm": NORM, cycles: [(1, 16)]}
GPT3_NORM = LayerNormConfig(eps=1e-5, offset=1.0)
GPT3 = {
    "tied": True, "pre_mixer_norm": GPT3_NORM, "pre_mlp_norm": GPT3_NORM, "final_norm": GPT3_NORM,
    "post_mixer_norm": None, "post_mlp_norm": None, "mixer.rope": None, "logit_soft_cap": None,
    "embedding_scale": 1.0, "mlp.activation": "gelu_tanh", "mlp.gated": False,
}  # fmt: skip
GPT_OSS_BLOCKS = {
    "mixer.sinks": True, "mixer.qkv_bias": True, "mixer.out_bias": True, "mlp.num_experts_per_token": 4,
    "mlp.activation": "quick_gelu", "mlp.up_offset": 1.0, "mlp.limit": 7.0, "mlp.bias": True, "mlp.router.bias": True,
}  # fmt: skip

# fmt: off
# name, values of its configuration
MODELS = {
    "command-a-111b": {windows: [4096, 4096, 4096, None] * 16, rotated: [True, True, True, False] * 16},
    "command-r-35b": {"mixer.qk_norm": None},
    "command-r-plus-104b": {"mixer.qk_norm.over": "each_head"},
    # queries are multiplied by these values, exactly: (128 + 64) ** -0.5 * (0.1 mscale ln(factor) + 1) ** 2
    "deepseek2-16b": {
        "mixer.scale": 0.11472138679292611, "mixer.rope.magnitude": 1.0, cycles: [(1, 1), (1, 26)], num_mixers: 1,
        "mixer.q_rank": None, "mixer.kv_rank": 512, "mixer.rope_dim": 64, "mlp.num_experts": [ABSENT, *[64] * 26],
        "mlp.mlp_dim": [10_944, *[1408] * 26], "mlp.shared.mlp_dim": [ABSENT, *[2 * 1408] * 26]},
    "deepseek2-236b": {
        "mixer.scale": 0.11472138679292611, "mixer.rope.magnitude": 1.0, cycles: [(1, 1), (1, 59)], num_mixers: 1,
        "mixer.q_rank": 1536, "mixer.kv_rank": 512, "mixer.rope_dim": 64, "mlp.num_experts": [ABSENT, *[160] * 59],
        "mlp.mlp_dim": [12_288, *[1536] * 59], "mlp.shared.mlp_dim": [ABSENT, *[2 * 1536] * 59]},
    "deepseek3-671b": {"mixer.scale": 0.1352337788608801, "mixer.rope.magnitude": 1.0},
    "kimi-k2-1t": {"mixer.scale": 0.13086079996295005, "mixer.rope.magnitude": 1.0},
    "deepseek-custom": {cycles: [(2, 1), (1, 2), (2, 1)], ngrams: [1, 4]},
    # sliding and full layers have the same rotary embedding
    "ettin-17m": {"mixer.rope.theta": 160_000.0, windows: [None, 64, 64, None, 64, 64, None]},
    "exaone4-1.2b": {rotated: [True] * 30},
    "gemma-2b": GEMMA | {"embedding_scale": 2048**0.5, cycles: [(1, 18)], "mixer.num_kv_heads": 1},
    "gemma-7b": GEMMA | {"embedding_scale": 3072**0.5, cycles: [(1, 28)], "mixer.num_kv_heads": 16},
    "gemma2-2b": {"mixer.mask": [SlidingWindow(4096), Causal()] * 13},
    "gemma2-27b": {"mixer.query_scale": 144**-0.5},
    "gemma3-1b": {
        "mixer.mask": by_period([SlidingWindow(512)] * 5 + [Causal()], 26),
        "mixer.rope": by_period([Rope(theta=10_000.0)] * 5 + [Rope(theta=1e6)], 26)},
    "gemma3-4b": {
        "mixer.mask": by_period([SlidingWindow(1024)] * 5 + [Causal()], 34),
        "mixer.rope": by_period([Rope(theta=10_000.0)] * 5 + [LinearRope(theta=1e6, factor=8.0)], 34),
        cycles: [(6, 5), (1, 4)], "embedding_scale": 2560**0.5},
    "gemma3-27b": {"mixer.query_scale": 168**-0.5},
    # the last layers share the keys and values of the last earlier layer of their type
    "gemma3n-e2b": {
        shares_keys: [False] * 20 + [True] * 10, "shares_kv_as": [None] * 18 + [LOCAL, FULL] + [None] * 10,
        "mixer.mask": [*[SlidingWindow(512)] * 4, Causal()] * 6, "mlp.gate_sparsity": [0.95] * 10 + [0.0] * 20},
    "gemma3n-e4b": {
        shares_keys: [False] * 20 + [True] * 15, "shares_kv_as": [None] * 18 + [LOCAL, FULL] + [None] * 15,
        "mixer.mask": [*[SlidingWindow(512)] * 4, Causal()] * 7, "mlp.gate_sparsity": [0.95] * 10 + [0.0] * 25},
    "gemma4-e2b": {
        "mixer.mask": [*[SlidingWindow(512)] * 4, Causal()] * 7, "mixer.query_scale": 1.0,
        "mixer.rope": [*[Rope(theta=10_000.0)] * 4, GEMMA4_ROPE] * 7, "mixer.num_kv_heads": 1,
        "mixer.head_dim": [256, 256, 256, 256, 512] * 7, traced: 12,
        shares_keys: [False] * 15 + [True] * 20, "shares_kv_as": [None] * 13 + [LOCAL, FULL] + [None] * 20,
        "mlp.mlp_dim": [6144] * 15 + [2 * 6144] * 20},
    "gemma4-e4b": {
        shares_keys: [False] * 24 + [True] * 18, "shares_kv_as": [None] * 22 + [LOCAL, FULL] + [None] * 18,
        "mlp.mlp_dim": 10_240, traced: 15},
    "gemma4-26b": {
        "mixer.mask": [*[SlidingWindow(1024)] * 5, Causal()] * 5, "mixer.query_scale": 1.0,
        "mixer.rope": [*[Rope(theta=10_000.0)] * 5, GEMMA4_ROPE] * 5, traced: 6,
        "mixer.num_kv_heads": [8, 8, 8, 8, 8, 2] * 5, "mixer.head_dim": [256, 256, 256, 256, 256, 512] * 5},
    "gemma4-31b": {
        "mixer.mask": [*[SlidingWindow(1024)] * 5, Causal()] * 10, "mixer.query_scale": 1.0,
        "mixer.rope": [*[Rope(theta=10_000.0)] * 5, GEMMA4_ROPE] * 10, traced: 6,
        "mixer.num_kv_heads": [16, 16, 16, 16, 16, 4] * 10, "mixer.head_dim": [256, 256, 256, 256, 256, 512] * 10},
    **{
        name: GPT3 | {
            cycles: [(1, layers)], "embed_dim": embed, "mlp.mlp_dim": 4 * embed, "mixer.num_heads": heads,
            "mixer.num_kv_heads": heads, "mixer.head_dim": features, "vocab_size": vocab,
            "positions": LearnedPositions(max_positions=length)}
        for name, layers, embed, heads, features, vocab, length in (
            ("gpt3-52k", 1, 16, 2, 8, 1024, 2048), ("gpt3-6b", 48, 3072, 12, 256, 32_768, 16_384),
            ("gpt3-22b", 48, 6144, 24, 256, 32_768, 16_384), ("gpt3-175b", 96, 12_288, 96, 128, 50_304, 16_384),
        )
    },
    "gpt-oss-20b": GPT_OSS_BLOCKS | {"mixer.mask": [SlidingWindow(128), Causal()] * 12, "mlp.num_experts": 32},
    "gpt-oss-120b": GPT_OSS_BLOCKS | {"mixer.mask": [SlidingWindow(128), Causal()] * 18, "mlp.num_experts": 128},
    **{name: LLAMA | {"mixer.rope": Rope(theta=10_000.0)} for name in models("llama2-")},
    **{name: LLAMA | {"mixer.rope": Rope(theta=500_000.0)} for name in models("llama3-")},
    **{name: LLAMA | {"mixer.rope": LLAMA3_ROPE} for name in (*models("llama3.1-"), *models("llama3.3-"))},
    **{name: LLAMA | {"mixer.rope": dataclasses.replace(LLAMA3_ROPE, factor=32.0), "tied": True}
       for name in models("llama3.2-")},
    "tiny": LLAMA | {"mixer.rope": Rope(theta=10_000.0), "tied": True},
    "maxtext-default": MAXTEXT | {
        "pre_mixer_norm": NORM, "post_mixer_norm": None, "pre_mlp_norm": None, "post_mlp_norm": None,
        "mixer": AttentionConfig(num_heads=16, num_kv_heads=16, head_dim=128, rope=Rope(theta=10_000.0)),
        "mlp": MLPConfig(mlp_dim=7168)},
    "maxtext-simple": MAXTEXT,
    "maxtext-simple-mlp": MAXTEXT,
    "mistral-7b": {"mixer.rope.theta": 1e6, "mixer.mask": Causal()},
    "mistral-7b-v0.1": {"mixer.rope.theta": 1e4, "mixer.mask": SlidingWindow(4096)},
    **{
        name: {
            cycles: [(1, layers)], "mlp.num_experts": 8, "mlp.num_experts_per_token": 2, "mlp.shared": None,
            "mlp.router": RouterConfig(order="select_first", score="softmax"), "mixer.rope.theta": 1e6}
        for name, layers in (("mixtral-8x7b", 32), ("mixtral-8x22b", 56))
    },
    "olmo3-7b": {
        "mixer.mask": [*[SlidingWindow(4096)] * 3, Causal()] * 8,
        "mixer.rope": [*[Rope(theta=5e5)] * 3, YarnRope(theta=5e5, factor=8.0, original_length=8192)] * 8},
    **{
        name: {"mixer.mask": Causal(), "mixer.rope.theta": 1e6, "tied": False, "mixer.qkv_bias": True,
               "mixer.out_bias": False, "mixer.qk_norm": None}
        for name, model in qwen.MODELS.items() if model["model_type"] == "qwen2"
    },
    **{
        name: {"mixer.rope.theta": 1e6}
        for name, model in qwen.MODELS.items() if model["model_type"] == "qwen3"
    },
    "qwen3-4b-thinking-2507": {"mixer.rope.theta": 5e6},
    "qwen3-30b-a3b": {"mlp.router.renormalize": True},
    "smollm3-3b": {rotated: [True, True, True, False] * 9},
    "trinity-large-398b-a13b": {sparse_layer_indices: list(range(6, 60))},
    "trinity-nano-6b-a1b": {windows: [2048, 2048, 2048, None] * 14, rotated: [True, True, True, False] * 14},
}
for name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"):
    MODELS[name] |= {"tied": True}
# fmt: on


@pytest.mark.parametrize("name", MODELS)
def test_values_of_published_models(name):
    assert_values(ed.get_config(name), MODELS[name])


@pytest.mark.parametrize("name", [name for name in MODELS if name == "tiny" or name.startswith("llama")])
def test_llama_models_have_equal_layers_and_full_width_heads(name):
    config = ed.get_config(name)
    mixer = config.blocks[0].mixer
    assert cycles(config) == [(1, len(config.blocks))]
    assert mixer.num_heads * mixer.head_dim == config.embed_dim
    assert config.tied == (name == "tiny" or name.startswith("llama3.2-"))
