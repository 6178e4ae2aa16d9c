"""`config.json` of published models, key by key as on Hugging Face."""

from eqx_decoders.families.phi.text import _LONG


COMMON = dict(
    attention_dropout=0.0, hidden_act="silu", initializer_range=0.02, tie_word_embeddings=False, use_cache=True,
    torch_dtype="bfloat16",
)  # fmt: skip
FP8 = dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128])

MIXTRAL = COMMON | dict(
    architectures=["MixtralForCausalLM"], model_type="mixtral", bos_token_id=1, eos_token_id=2, hidden_size=4096,
    intermediate_size=14336, max_position_embeddings=32768, num_attention_heads=32, num_experts_per_tok=2,
    num_hidden_layers=32, num_key_value_heads=8, num_local_experts=8, output_router_logits=False, rms_norm_eps=1e-05,
    rope_theta=1000000.0, router_aux_loss_coef=0.02, sliding_window=None, transformers_version="4.36.0.dev0",
    vocab_size=32000,
)  # fmt: skip
MIXTRAL_LARGE = MIXTRAL | dict(
    hidden_size=6144, intermediate_size=16384, max_position_embeddings=65536, num_attention_heads=48,
    num_hidden_layers=56, router_aux_loss_coef=0.001, router_jitter_noise=0.0, transformers_version="4.38.0",
    vocab_size=32768,
)  # fmt: skip

QWEN3 = COMMON | dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", attention_bias=False, bos_token_id=151643,
    eos_token_id=151645, decoder_sparse_step=1, head_dim=128, hidden_size=2048, intermediate_size=6144,
    max_position_embeddings=40960, max_window_layers=48, mlp_only_layers=[], moe_intermediate_size=768,
    norm_topk_prob=True, num_attention_heads=32, num_experts=128, num_experts_per_tok=8, num_hidden_layers=48,
    num_key_value_heads=4, output_router_logits=False, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=1000000.0,
    router_aux_loss_coef=0.001, sliding_window=None, transformers_version="4.51.0", use_sliding_window=False,
    vocab_size=151936,
)  # fmt: skip
QWEN3_2507 = QWEN3 | dict(max_position_embeddings=262144, rope_theta=10000000)
QWEN3_FP8 = QWEN3_2507 | dict(
    quantization_config=FP8
    | dict(modules_to_not_convert=["lm_head"] + [f"model.layers.{index}.mlp.gate" for index in range(48)])
)
QWEN3_LARGE = QWEN3 | dict(
    hidden_size=4096, intermediate_size=12288, max_position_embeddings=262144, max_window_layers=94,
    moe_intermediate_size=1536, num_attention_heads=64, num_hidden_layers=94, rope_theta=5000000,
)  # fmt: skip
QWEN3_CODER = {key: value for key, value in QWEN3.items() if key != "bos_token_id"} | dict(
    hidden_size=6144, intermediate_size=8192, max_position_embeddings=262144, max_window_layers=62,
    moe_intermediate_size=2560, num_attention_heads=96, num_experts=160, num_hidden_layers=62, num_key_value_heads=8,
    qkv_bias=False, rope_theta=10000000, router_aux_loss_coef=0.0, shared_expert_intermediate_size=0, use_qk_norm=True,
)  # fmt: skip

GPT_OSS = COMMON | dict(
    architectures=["GptOssForCausalLM"], model_type="gpt_oss", attention_bias=True, eos_token_id=200002,
    experts_per_token=4, head_dim=64, hidden_size=2880, initial_context_length=4096, intermediate_size=2880,
    layer_types=["sliding_attention", "full_attention"] * 12, max_position_embeddings=131072, num_attention_heads=64,
    num_experts_per_tok=4, num_hidden_layers=24, num_key_value_heads=8, num_local_experts=32,
    output_router_logits=False, pad_token_id=199999,
    quantization_config=dict(
        modules_to_not_convert=[
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
        ],
        quant_method="mxfp4",
    ),
    rms_norm_eps=1e-05,
    rope_scaling=dict(
        beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096, rope_type="yarn",
        truncate=False,
    ),
    rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0,
    transformers_version="4.55.0.dev0", vocab_size=201088,
)  # fmt: skip
GPT_OSS_LARGE = GPT_OSS | dict(
    layer_types=["sliding_attention", "full_attention"] * 18, num_hidden_layers=36, num_local_experts=128
)

# the text part of meta-llama/Llama-4-Scout-17B-16E, as text-only copies of it have it at the top
SCOUT = COMMON | dict(
    architectures=["Llama4ForCausalLM"], model_type="llama4_text", _attn_implementation_autoset=True,
    attention_bias=False, attention_chunk_size=8192, attn_scale=0.1, attn_temperature_tuning=4, bos_token_id=200000,
    cache_implementation="hybrid", eos_token_id=[200001, 200007, 200008], floor_scale=8192, for_llm_compressor=False,
    head_dim=128, hidden_size=5120, interleave_moe_layer_step=1, intermediate_size=8192, intermediate_size_mlp=16384,
    max_position_embeddings=10485760, moe_layers=list(range(48)), no_rope_layers=[1, 1, 1, 0] * 12,
    num_attention_heads=40, num_experts_per_tok=1, num_hidden_layers=48, num_key_value_heads=8, num_local_experts=16,
    output_router_logits=False, pad_token_id=200018, rms_norm_eps=1e-05,
    rope_scaling=dict(
        factor=16.0, high_freq_factor=1.0, low_freq_factor=1.0, original_max_position_embeddings=8192,
        rope_type="llama3",
    ),
    rope_theta=500000.0, router_aux_loss_coef=0.001, router_jitter_noise=0.0, transformers_version="4.51.0.dev0",
    use_qk_norm=True, vocab_size=202048,
)  # fmt: skip
QWEN3_NEXT = COMMON | dict(
    architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", bos_token_id=151643, decoder_sparse_step=1,
    eos_token_id=151645, full_attention_interval=4, head_dim=256, hidden_size=2048, intermediate_size=5120,
    linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
    linear_value_head_dim=128, max_position_embeddings=262144, mlp_only_layers=[], moe_intermediate_size=512,
    norm_topk_prob=True, num_attention_heads=16, num_experts=512, num_experts_per_tok=10, num_hidden_layers=48,
    num_key_value_heads=2, output_router_logits=False, partial_rotary_factor=0.25, rms_norm_eps=1e-06,
    rope_scaling=None, rope_theta=10000000, router_aux_loss_coef=0.001, shared_expert_intermediate_size=512,
    vocab_size=151936,
)  # fmt: skip
KIMI_LINEAR = COMMON | dict(
    architectures=["KimiLinearForCausalLM"], model_type="kimi_linear", eos_token_id=163586, first_k_dense_replace=1,
    head_dim=72, hidden_size=2304, intermediate_size=9216, kv_lora_rank=512,
    linear_attn_config=dict(
        full_attn_layers=[4, 8, 12, 16, 20, 24, 27], head_dim=128, num_heads=32, short_conv_kernel_size=4,
        kda_layers=[1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
    ),
    mla_use_nope=True, model_max_length=1048576, moe_intermediate_size=1024, moe_layer_freq=1, moe_renormalize=True,
    moe_router_activation_func="sigmoid", num_attention_heads=32, num_expert_group=1, num_experts=256,
    num_experts_per_token=8, num_hidden_layers=27, num_key_value_heads=32, num_nextn_predict_layers=0,
    num_shared_experts=1, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-05,
    rope_scaling=None, rope_theta=10000.0, routed_scaling_factor=2.446, topk_group=1, use_grouped_topk=True,
    v_head_dim=128, vocab_size=163840,
)  # fmt: skip
MAVERICK = {key: value for key, value in SCOUT.items() if key != "moe_layers"} | dict(
    attn_temperature_tuning=True, interleave_moe_layer_step=2, max_position_embeddings=1048576, no_rope_layers=[],
    num_local_experts=128, rope_scaling=None, use_qk_norm=False,
)  # fmt: skip

AUTO_MAP = {
    "AutoConfig": "configuration_deepseek.DeepseekConfig",
    "AutoModel": "modeling_deepseek.DeepseekModel",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM",
}
V2_LITE = COMMON | dict(
    architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", attention_bias=False, auto_map=AUTO_MAP,
    aux_loss_alpha=0.001, bos_token_id=100000, eos_token_id=100001, first_k_dense_replace=1, hidden_size=2048,
    intermediate_size=10944, kv_lora_rank=512, max_position_embeddings=163840, moe_intermediate_size=1408,
    moe_layer_freq=1, n_group=1, n_routed_experts=64, n_shared_experts=2, norm_topk_prob=False, num_attention_heads=16,
    num_experts_per_tok=6, num_hidden_layers=27, num_key_value_heads=16, pretraining_tp=1, q_lora_rank=None,
    qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-06,
    rope_scaling=dict(
        beta_fast=32, beta_slow=1, factor=40, mscale=0.707, mscale_all_dim=0.707,
        original_max_position_embeddings=4096, type="yarn",
    ),
    rope_theta=10000, routed_scaling_factor=1.0, scoring_func="softmax", seq_aux=True, topk_group=1,
    topk_method="greedy", transformers_version="4.33.1", v_head_dim=128, vocab_size=102400,
)  # fmt: skip
V2 = V2_LITE | dict(
    ep_size=1, hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536, n_group=8, n_routed_experts=160,
    num_attention_heads=128, num_hidden_layers=60, num_key_value_heads=128, q_lora_rank=1536,
    routed_scaling_factor=16.0, topk_group=3, topk_method="group_limited_greedy", transformers_version="4.39.3",
)  # fmt: skip
V3 = V2 | dict(
    architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", bos_token_id=0, eos_token_id=1,
    first_k_dense_replace=3, hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
    n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8, num_hidden_layers=61,
    num_nextn_predict_layers=1, quantization_config=FP8,
    rope_scaling=V2["rope_scaling"] | dict(mscale=1.0, mscale_all_dim=1.0),
    routed_scaling_factor=2.5, scoring_func="sigmoid", topk_group=4, topk_method="noaux_tc", vocab_size=129280,
)  # fmt: skip
V3_1 = {key: value for key, value in V3.items() if key not in ("aux_loss_alpha", "seq_aux", "pretraining_tp")} | dict(
    quantization_config=FP8 | dict(scale_fmt="ue8m0"), transformers_version="4.44.2"
)
KIMI = V3 | dict(
    model_type="kimi_k2", bos_token_id=163584, eos_token_id=163585, first_k_dense_replace=1,
    max_position_embeddings=131072, n_group=1, n_routed_experts=384, num_attention_heads=64, num_key_value_heads=64,
    num_nextn_predict_layers=0,
    rope_scaling=V3["rope_scaling"] | dict(beta_fast=1.0, beta_slow=1.0, factor=32.0),
    rope_theta=50000.0, routed_scaling_factor=2.827, topk_group=1, transformers_version="4.48.3", vocab_size=163840,
)  # fmt: skip

GLM4_9B = COMMON | dict(
    architectures=["GlmForCausalLM"], model_type="glm", attention_bias=True, eos_token_id=[151329, 151336, 151338],
    head_dim=128, hidden_size=4096, intermediate_size=13696, max_position_embeddings=131072, num_attention_heads=32,
    num_hidden_layers=40, num_key_value_heads=2, pad_token_id=151329, rms_norm_eps=1.5625e-07, rope_theta=10000.0,
    transformers_version="4.46.0.dev0", vocab_size=151552,
)  # fmt: skip
GLM4_32B = GLM4_9B | dict(
    architectures=["Glm4ForCausalLM"], model_type="glm4", attention_bias=False, hidden_size=6144,
    intermediate_size=23040, max_position_embeddings=32768, num_attention_heads=48, num_hidden_layers=61,
    partial_rotary_factor=0.5, rms_norm_eps=1e-05, transformers_version="4.51.3",
)  # fmt: skip
GLM4_AIR = GLM4_9B | dict(
    architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", first_k_dense_replace=1, intermediate_size=10944,
    moe_intermediate_size=1408, n_group=1, n_routed_experts=128, n_shared_experts=1, norm_topk_prob=True,
    num_attention_heads=96, num_experts_per_tok=8, num_hidden_layers=46, num_key_value_heads=8,
    num_nextn_predict_layers=1, partial_rotary_factor=0.5, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=1000000,
    routed_scaling_factor=1.0, topk_group=1, transformers_version="4.54.0", use_qk_norm=False,
    auto_map={"AutoConfig": "configuration_glm4_moe.Glm4MoeConfig"},
)  # fmt: skip
GLM4_7 = GLM4_AIR | dict(
    first_k_dense_replace=3, hidden_size=5120, intermediate_size=12288, max_position_embeddings=202752,
    moe_intermediate_size=1536, moe_router_dtype="float32", n_routed_experts=160, num_hidden_layers=92,
    routed_scaling_factor=2.5, scoring_func="sigmoid", topk_method="noaux_tc", use_qk_norm=True,
)  # fmt: skip
QWEN15_MOE = COMMON | dict(
    architectures=["Qwen2MoeForCausalLM"], model_type="qwen2_moe", bos_token_id=151643, decoder_sparse_step=1,
    eos_token_id=151645, hidden_size=2048, intermediate_size=5632, max_position_embeddings=32768, max_window_layers=21,
    moe_intermediate_size=1408, norm_topk_prob=False, num_attention_heads=16, num_experts=60, num_experts_per_tok=4,
    num_hidden_layers=24, num_key_value_heads=16, output_router_logits=False, rms_norm_eps=1e-06,
    rope_theta=1000000.0, router_aux_loss_coef=0.001, shared_expert_intermediate_size=5632, sliding_window=32768,
    transformers_version="4.40.0.dev0", use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
QWEN2_57B = QWEN15_MOE | dict(
    eos_token_id=151643, hidden_size=3584, intermediate_size=18944, max_position_embeddings=131072,
    max_window_layers=28, mlp_only_layers=[], moe_intermediate_size=2560, num_attention_heads=28, num_experts=64,
    num_experts_per_tok=8, num_hidden_layers=28, num_key_value_heads=4, shared_expert_intermediate_size=20480,
    sliding_window=131072, transformers_version="4.42.4",
)  # fmt: skip
SOLAR = dict(
    architectures=["SolarOpenForCausalLM"], model_type="solar_open", bos_token_id=1, eos_token_id=2,
    auto_map={"AutoConfig": "configuration_solar_open.SolarOpenConfig"}, first_k_dense_replace=0, head_dim=128,
    hidden_size=4096, intermediate_size=10240, max_position_embeddings=131072, moe_intermediate_size=1280,
    n_routed_experts=128, n_shared_experts=1, norm_topk_prob=True, num_attention_heads=64, num_experts_per_tok=8,
    num_hidden_layers=48, num_key_value_heads=8, pad_token_id=2, partial_rotary_factor=1.0, rms_norm_eps=1e-05,
    rope_scaling=dict(factor=2.0, original_max_position_embeddings=65536, type="yarn"), rope_theta=1000000,
    routed_scaling_factor=1.0, tie_word_embeddings=False, torch_dtype="bfloat16", transformers_version="4.57.1",
    use_cache=True, vocab_size=196608,
)  # fmt: skip
GRANITE_MOE = COMMON | dict(
    architectures=["GraniteMoeForCausalLM"], model_type="granitemoe", attention_bias=False,
    attention_multiplier=0.015625, bos_token_id=0, embedding_multiplier=12.0, eos_token_id=0, hidden_size=1536,
    intermediate_size=512, logits_scaling=6.0, max_position_embeddings=131072, num_attention_heads=24,
    num_experts_per_tok=8, num_hidden_layers=32, num_key_value_heads=8, num_local_experts=40,
    output_router_logits=False, pad_token_id=0, residual_multiplier=0.22, rms_norm_eps=1e-06, rope_scaling=None,
    rope_theta=10000000.0, router_aux_loss_coef=0.0, tie_word_embeddings=True, transformers_version="4.47.0",
    vocab_size=49155,
)  # fmt: skip
TRINITY = COMMON | dict(
    architectures=["AfmoeForCausalLM"], model_type="afmoe",
    auto_map={
        "AutoConfig": "configuration_afmoe.AfmoeConfig",
        "AutoModel": "modeling_afmoe.AfmoeModel",
        "AutoModelForCausalLM": "modeling_afmoe.AfmoeForCausalLM",
    },
    global_attn_every_n_layers=4, head_dim=128, hidden_size=1024, intermediate_size=3072,
    max_position_embeddings=131072, moe_intermediate_size=256, mup_enabled=True, n_group=1, num_attention_heads=8,
    num_dense_layers=2, num_expert_groups=1, num_experts=128, num_experts_per_tok=8, num_hidden_layers=56,
    num_key_value_heads=2, num_limited_groups=1, num_shared_experts=1, rms_norm_eps=1e-05, rope_scaling=None,
    rope_theta=10000, route_norm=True, route_scale=2.826, score_func="sigmoid", sliding_window=2048, topk_group=1,
    transformers_version="4.57.3", use_grouped_mm=True, vocab_size=200192,
)  # fmt: skip

R7B = dict(
    architectures=["Cohere2ForCausalLM"], model_type="cohere2", _sliding_window_pattern=4, attention_bias=False,
    attention_dropout=0.0, bos_token_id=5, cache_implementation="hybrid", eos_token_id=255001, head_dim=128,
    hidden_act="silu", hidden_size=4096, initializer_range=0.02, intermediate_size=14336, layer_norm_eps=1e-05,
    layer_switch=4, logit_scale=0.25, max_position_embeddings=132096, num_attention_heads=32, num_hidden_layers=32,
    num_key_value_heads=8, order_of_interleaved_layers="local_attn_first", pad_token_id=0,
    position_embedding_type="rope_gptj", rope_scaling=None, rope_theta=50000, rotary_pct=1.0, sliding_window=4096,
    sliding_window_pattern=4, torch_dtype="bfloat16", use_cache=True, use_embedding_sharing=True,
    use_gated_activation=True, use_parallel_block=True, use_parallel_embedding=True, vocab_size=256000,
)  # fmt: skip
M2 = dict(
    architectures=["MiniMaxM2ForCausalLM"], model_type="minimax_m2", attention_dropout=0.0, attn_type_list=[1] * 62,
    auto_map={"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"}, eos_token_id=None, head_dim=128,
    hidden_act="silu", hidden_size=3072, initializer_range=0.02, intermediate_size=1536,
    layernorm_full_attention_beta=1.0, layernorm_linear_attention_beta=1.0, layernorm_mlp_beta=1.0,
    max_position_embeddings=196608, mlp_intermediate_size=8192, mtp_transformer_layers=1, num_attention_heads=48,
    num_experts_per_tok=8, num_hidden_layers=62, num_key_value_heads=8, num_local_experts=256, num_mtp_modules=3,
    output_router_logits=False, qk_norm_type="per_layer", rms_norm_eps=1e-06, rope_theta=5000000, rotary_dim=64,
    router_aux_loss_coef=0.001, router_jitter_noise=0.0, scoring_func="sigmoid", shared_intermediate_size=0,
    shared_moe_mode="sigmoid", sliding_window=None, tie_word_embeddings=False, use_cache=True, use_mtp=True,
    use_qk_norm=True, use_routing_bias=True, vocab_size=200064,
)  # fmt: skip

# repository: name of the model in this library, and its `config.json`
FILES = {
    "THUDM/glm-4-9b-chat-hf": ("glm4-9b", GLM4_9B),
    "THUDM/GLM-4-32B-0414": ("glm4-0414-32b", GLM4_32B),
    "PrimeIntellect/INTELLECT-3-Base": ("glm4.5-air-106b-a12b", GLM4_AIR),
    "zai-org/GLM-4.7": ("glm4.7-355b-a32b", GLM4_7),
    "Qwen/Qwen1.5-MoE-A2.7B": ("qwen1.5-moe-a2.7b", QWEN15_MOE),
    "Qwen/Qwen2-57B-A14B": ("qwen2-57b-a14b", QWEN2_57B),
    "upstage/Solar-Open-100B": ("solar-open-100b-a12b", SOLAR),
    "mistralai/Mixtral-8x7B-v0.1": ("mixtral-8x7b", MIXTRAL),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": ("mixtral-8x22b", MIXTRAL_LARGE),
    "Qwen/Qwen3-30B-A3B": ("qwen3-30b-a3b-base", QWEN3),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": ("qwen3-30b-a3b", QWEN3_2507),
    "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8": ("qwen3-30b-a3b", QWEN3_FP8),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": ("qwen3-235b-a22b", QWEN3_LARGE),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": ("qwen3-480b-a35b", QWEN3_CODER),
    "openai/gpt-oss-20b": ("gpt-oss-20b", GPT_OSS),
    "openai/gpt-oss-120b": ("gpt-oss-120b", GPT_OSS_LARGE),
    "meta-llama/Llama-4-Scout-17B-16E": ("llama4-17b-16e", SCOUT),
    "meta-llama/Llama-4-Maverick-17B-128E": ("llama4-17b-128e", MAVERICK),
    "deepseek-ai/DeepSeek-V2-Lite": ("deepseek2-16b", V2_LITE),
    "deepseek-ai/DeepSeek-V2": ("deepseek2-236b", V2),
    "deepseek-ai/DeepSeek-V3": ("deepseek3-671b", V3),
    "deepseek-ai/DeepSeek-V3.1": ("deepseek3-671b", V3_1),
    "moonshotai/Kimi-K2-Instruct": ("kimi-k2-1t", KIMI),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ("qwen3-next-80b", QWEN3_NEXT),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": ("kimi-linear-48b-a3b", KIMI_LINEAR),
    "ibm-granite/granite-3.1-3b-a800m-instruct": ("granite3.1-3b-a800m", GRANITE_MOE),
    "arcee-ai/Trinity-Nano-Preview": ("trinity-nano-6b-a1b", TRINITY),
    "CohereLabs/c4ai-command-r7b-12-2024": ("command-r7b", R7B),
    "MiniMaxAI/MiniMax-M2": ("minimax-m2-229b-a10b", M2),
}


# --- models with encoders: sizes of published files, and further keys of the kind that such files hold ---

SMOLVLM = dict(
    architectures=["SmolVLMForConditionalGeneration"], model_type="smolvlm", image_token_id=49_190,
    pad_token_id=128_002, scale_factor=4, tie_word_embeddings=False, torch_dtype="float32",
    transformers_version="4.50.0.dev0",
    use_cache=False, use_reentrant_checkpointing=False, vocab_size=49_280,
    text_config=dict(
        _flash_attn_2_enabled=True, _name_or_path="None", architectures=["VLlama3ForCausalLM"], attention_bias=False,
        attention_dropout=0.0, head_dim=64, hidden_act="silu", hidden_size=960, initializer_range=0.02,
        intermediate_size=2560, is_llama_config=True, max_position_embeddings=8192, mlp_bias=False, model_type="llama",
        neftune_noise_alpha=0.0, num_attention_heads=15, num_hidden_layers=32, num_key_value_heads=5, pad_token_id=2,
        perceiver_config=dict(model_type="vllama3", resampler_depth=6), pixel_shuffle_factor=4, pretraining_tp=1,
        qk_layer_norms=False, rms_norm_eps=1e-05, rope_interleaved=False, rope_scaling=None, rope_theta=100_000,
        torch_dtype="bfloat16", use_cache=True, use_resampler=False, vocab_size=49_280,
        **{"transformers.js_config": dict(kv_cache_dtype=dict(fp16="float16"))},
    ),
    vision_config=dict(
        hidden_size=768, image_size=512, max_image_size=dict(longest_edge=512), model_type="smolvlm_vision",
        num_attention_heads=12, patch_size=16, size=dict(longest_edge=2048), tie_word_embeddings=False,
        use_base_siglip=True,
    ),
)  # fmt: skip
MISTRAL3 = dict(
    architectures=["Mistral3ForConditionalGeneration"], model_type="mistral3", image_token_index=10,
    multimodal_projector_bias=False, projector_hidden_act="gelu", spatial_merge_size=2, vision_feature_layer=-1,
    torch_dtype="bfloat16", transformers_version="4.50.0.dev0",
    text_config=dict(
        attention_dropout=0.0, head_dim=128, hidden_act="silu", hidden_size=5120, initializer_range=0.02,
        intermediate_size=32_768, max_position_embeddings=131_072, model_type="mistral", num_attention_heads=32,
        num_hidden_layers=40, num_key_value_heads=8, rms_norm_eps=1e-05, rope_theta=1_000_000_000.0,
        sliding_window=None, use_cache=True, vocab_size=131_072,
    ),
    vision_config=dict(
        attention_dropout=0.0, head_dim=64, hidden_act="silu", hidden_size=1024, image_size=1540,
        initializer_range=0.02, intermediate_size=4096, model_type="pixtral", num_attention_heads=16, num_channels=3,
        num_hidden_layers=24, patch_size=14, rope_theta=10_000.0,
    ),
)  # fmt: skip
MAVERICK_VISION = dict(
    architectures=["Llama4ForConditionalGeneration"], model_type="llama4", boi_token_index=200_080,
    eoi_token_index=200_081, image_token_index=200_092, torch_dtype="bfloat16", transformers_version="4.51.0.dev0",
    text_config=dict(
        _attn_implementation_autoset=True, attention_bias=False, attention_chunk_size=8192, attention_dropout=0.0,
        bos_token_id=200_000, eos_token_id=[200_001, 200_007, 200_008], for_llm_compressor=False, head_dim=128,
        hidden_act="silu", hidden_size=5120, initializer_range=0.02, interleave_moe_layer_step=2,
        intermediate_size=8192, intermediate_size_mlp=16_384, max_position_embeddings=1_048_576,
        model_type="llama4_text", no_rope_layers=[], num_attention_heads=40, num_experts_per_tok=1,
        num_hidden_layers=48, num_key_value_heads=8, num_local_experts=128, output_router_logits=False,
        pad_token_id=200_018, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=500_000.0,
        router_aux_loss_coef=0.001, router_jitter_noise=0.0, torch_dtype="bfloat16", use_cache=True,
        use_qk_norm=False, vocab_size=202_048, attn_temperature_tuning=4,
    ),
    vision_config=dict(
        _attn_implementation_autoset=True, attention_dropout=0.0, hidden_act="gelu", hidden_size=1408, image_size=336,
        initializer_range=0.02, intermediate_size=5632, model_type="llama4_vision_model",
        multi_modal_projector_bias=False, norm_eps=1e-05, num_attention_heads=16, num_channels=3, num_hidden_layers=34,
        patch_size=14, pixel_shuffle_ratio=0.5, projector_dropout=0.0, projector_input_dim=4096,
        projector_output_dim=4096, rope_theta=10_000, vision_feature_layer=-1,
        vision_feature_select_strategy="default", vision_output_dim=4096,
    ),
)  # fmt: skip
INTERNVL = dict(
    architectures=["InternVLForConditionalGeneration"], model_type="internvl", downsample_ratio=0.5,
    image_seq_length=256, image_token_id=151_667, projector_hidden_act="gelu", torch_dtype="bfloat16",
    transformers_version="4.52.0.dev0", vision_feature_layer=-1, vision_feature_select_strategy="default",
    tie_word_embeddings=False,
    text_config=dict(
        _attn_implementation_autoset=True, attention_dropout=0.0, bos_token_id=151_643, eos_token_id=151_643,
        hidden_act="silu", hidden_size=896, initializer_range=0.02, intermediate_size=4864,
        max_position_embeddings=32_768, max_window_layers=70, model_type="qwen2", num_attention_heads=14,
        num_hidden_layers=24, num_key_value_heads=2, rms_norm_eps=1e-06,
        rope_scaling=dict(factor=2.0, rope_type="dynamic", type="dynamic"), rope_theta=1_000_000.0,
        sliding_window=None, torch_dtype="bfloat16", use_cache=True, use_sliding_window=False, vocab_size=151_674,
    ),
    vision_config=dict(
        architectures=["InternVisionModel"], attention_bias=True, attention_dropout=0.0, hidden_act="gelu",
        hidden_dropout_prob=0.0, hidden_size=1024, image_size=[448, 448], initializer_range=1e-10,
        intermediate_size=4096, layer_norm_eps=1e-06, layer_scale_init_value=0.1, model_type="internvl_vision",
        norm_type="layer_norm", num_attention_heads=16, num_channels=3, num_hidden_layers=24, patch_size=[14, 14],
        projection_dropout=0.0, use_absolute_position_embeddings=True, use_mask_token=False, use_mean_pooling=True,
        use_qk_norm=False,
    ),
)  # fmt: skip
LFM2_VL = dict(
    architectures=["Lfm2VlForConditionalGeneration"], model_type="lfm2_vl", do_image_splitting=True,
    downsample_factor=2, encoder_patch_size=16, image_token_index=396, max_image_tokens=256, max_num_patches=1024,
    max_pixels_tolerance=2.0, max_tiles=10, min_image_tokens=64, min_tiles=2, projector_bias=True,
    projector_hidden_act="gelu", projector_hidden_size=2560, tile_size=512, torch_dtype="bfloat16",
    transformers_version="4.56.0.dev0", use_image_special_tokens=True, use_thumbnail=True, vision_feature_layer=-1,
    text_config=dict(
        architectures=["Lfm2ForCausalLM"], block_auto_adjust_ff_dim=True, block_dim=1024, block_ff_dim=6656,
        block_ffn_dim_multiplier=1.0, block_mlp_init_scale=1.0, block_multiple_of=256, block_norm_eps=1e-05,
        block_out_init_scale=1.0, block_use_swiglu=True, block_use_xavier_init=True, conv_L_cache=3, conv_bias=False,
        conv_dim=1024, conv_dim_out=1024, conv_use_xavier_init=True, eos_token_id=7, hidden_size=1024,
        initializer_range=0.02, max_position_embeddings=128_000, model_type="lfm2", norm_eps=1e-05,
        num_attention_heads=16, num_heads=16, num_hidden_layers=16, num_key_value_heads=8, rope_theta=1_000_000.0,
        layer_types=[
            "full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)
        ], use_cache=True, use_pos_enc=True, vocab_size=65_536,
    ),
    vision_config=dict(
        attention_dropout=0.0, hidden_act="gelu_pytorch_tanh", hidden_size=768, intermediate_size=3072,
        layer_norm_eps=1e-06, model_type="siglip2_vision_model", num_attention_heads=12, num_channels=3,
        num_hidden_layers=12, num_patches=256, patch_size=16, torch_dtype="bfloat16", vision_use_head=False,
    ),
)  # fmt: skip
GRIDS = [(1, most) for most in range(1, 11)] + [(2, most) for most in range(1, 6)] + [(3, most) for most in (1, 2, 3)]
GRIDS += [(4, 1), (4, 2), (5, 1), (5, 2), *((rows, 1) for rows in range(6, 11))]
GRANITE_VISION = dict(
    architectures=["LlavaNextForConditionalGeneration"], model_type="llava_next", image_seq_length=576,
    image_grid_pinpoints=[[384 * rows, 384 * columns] for rows, columns in GRIDS], image_token_index=49_155,
    multimodal_projector_bias=True, projector_hidden_act="gelu", tie_word_embeddings=True, torch_dtype="bfloat16",
    transformers_version="4.49.0", use_image_newline_parameter=True, vision_feature_layer=[-24, -20, -12, -1],
    vision_feature_select_strategy="full",
    text_config=dict(
        _name_or_path="ibm-granite/granite-3.1-2b-instruct", architectures=["GraniteForCausalLM"],
        attention_bias=False, attention_dropout=0.1, attention_multiplier=0.015625, bos_token_id=0,
        embedding_multiplier=12.0, eos_token_id=0, hidden_act="silu", hidden_size=2048, intermediate_size=8192,
        logits_scaling=8.0, max_position_embeddings=131_072, mlp_bias=False, model_type="granite",
        num_attention_heads=32, num_hidden_layers=40, num_key_value_heads=8, pad_token_id=0, residual_multiplier=0.22,
        rms_norm_eps=1e-05, rope_theta=300_000, tie_word_embeddings=True, torch_dtype="bfloat16", vocab_size=49_156,
    ),
    vision_config=dict(
        hidden_act="gelu_pytorch_tanh", hidden_size=1152, image_size=384, intermediate_size=4304, layer_norm_eps=1e-06,
        model_type="siglip_vision_model", num_attention_heads=16, num_channels=3, num_hidden_layers=27, patch_size=14,
        torch_dtype="bfloat16",
    ),
)  # fmt: skip
LLAVA = dict(
    architectures=["LlavaForConditionalGeneration"], model_type="llava", ignore_index=-100, image_token_index=32_000,
    pad_token_id=32_001, projector_hidden_act="gelu", tie_word_embeddings=False, torch_dtype="float16",
    transformers_version="4.36.0.dev0", vision_feature_layer=-2, vision_feature_select_strategy="default",
    text_config=dict(
        _name_or_path="lmsys/vicuna-7b-v1.5", architectures=["LlamaForCausalLM"], max_position_embeddings=4096,
        model_type="llama", rms_norm_eps=1e-05, torch_dtype="float16", vocab_size=32_064,
    ),
    vision_config=dict(
        hidden_size=1024, image_size=336, intermediate_size=4096, model_type="clip_vision_model",
        num_attention_heads=16, num_hidden_layers=24, patch_size=14, projection_dim=768, vocab_size=32_000,
    ),
)  # fmt: skip
LLAVA_TEXT = dict(
    architectures=["MistralForCausalLM"], intermediate_size=14_336, max_position_embeddings=32_768,
    model_type="mistral", num_key_value_heads=8, rms_norm_eps=1e-05, rope_theta=1_000_000.0, sliding_window=None,
    vocab_size=32_064,
)  # fmt: skip
LLAVA_NEXT = LLAVA | dict(
    architectures=["LlavaNextForConditionalGeneration"], model_type="llava_next", text_config=LLAVA_TEXT,
    image_grid_pinpoints=[[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    use_image_newline_parameter=True,
)  # fmt: skip
PHI4 = dict(
    architectures=["Phi4MultimodalForCausalLM"], model_type="phi4_multimodal", attention_dropout=0.0,
    bos_token_id=199_999, embd_pdrop=0.0, eos_token_id=[199_999, 200_020], hidden_act="silu", hidden_size=3072,
    initializer_range=0.02, intermediate_size=8192, max_position_embeddings=131_072, num_attention_heads=24,
    num_hidden_layers=32, num_key_value_heads=8, original_max_position_embeddings=4096, pad_token_id=199_999,
    partial_rotary_factor=0.75, resid_pdrop=0.0, rms_norm_eps=1e-05, rope_theta=10_000.0, sliding_window=262_144,
    rope_scaling=dict(long_factor=list(_LONG), short_factor=[1.0] * 48, rope_type="longrope"), tie_word_embeddings=True,
    torch_dtype="bfloat16", transformers_version="4.51.0.dev0", use_cache=True, vocab_size=200_064,
    audio_config=dict(
        activation="swish", audio_token_id=200_011, bias_max_distance=1000, bias_symmetric=False, chunk_size=-1,
        conv_activation="swish", conv_glu_type="swish", depthwise_multiplier=1, depthwise_separable_out_channel=1024,
        downsample_rate=1, dropout_rate=0.0, ext_pw_out_channel=1024, feature_layer=-2, hidden_size=1024,
        initializer_range=0.02, input_size=80, intermediate_size=1536, kernel_size=3, left_chunk=18,
        model_type="phi4_multimodal_audio", nemo_activation="relu", nemo_conv_channels=1024, nemo_final_size=10,
        num_attention_heads=16, num_blocks=24, time_reduction=8,
    ),
    vision_config=dict(
        attention_dropout=0.0, crop_size=448, feature_layer=-2, hidden_act="gelu_pytorch_tanh", hidden_size=1152,
        image_size=448, image_token_id=200_010, intermediate_size=4304, layer_norm_eps=1e-06,
        model_type="phi4_multimodal_vision", num_attention_heads=16, num_channels=3, num_hidden_layers=27,
        patch_size=14,
    ),
)  # fmt: skip

# name of the model in this library: its `config.json`
WITH_ENCODERS = {
    "granite-vision-3.2-2b": GRANITE_VISION,
    "internvl3-1b": INTERNVL,
    "lfm2-vl-450m": LFM2_VL,
    "llama4-17b-128e-vision": MAVERICK_VISION,
    "llava1.5-7b": LLAVA,
    "llava1.6-mistral-7b": LLAVA_NEXT,
    "mistral-small-3.1-24b": MISTRAL3,
    "phi4-multimodal-4.7b": PHI4,
    "smolvlm2-500m": SMOLVLM,
}
