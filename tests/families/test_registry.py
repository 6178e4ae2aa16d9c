"""Every published model by name: parameters counted to the last one, and `config.json` as published."""

import ast
import dataclasses
import json
from pathlib import Path

import pytest

import eqx_decoders as ed
from eqx_decoders import families
from eqx_decoders.families import FAMILIES, find_family
from eqx_decoders.io.huggingface.quantized import read_scheme


# What the published files hold. Of the Gemmas other sizes of the vocabulary have been published, too: here it is the
# one of Google's own files, 128 more (Gemma, Gemma 2) or 64 fewer (Gemma 3) rows than in those on Hugging Face.
PARAMETERS = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.1": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-1.7b-base": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-4b-base": 4_022_468_096,
    "qwen3-4b-thinking-2507": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-8b-base": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-14b-base": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma-2b": 2_506_172_416 + 128 * 2048,
    "gemma-7b": 8_537_680_896 + 128 * 3072,
    "gemma2-2b": 2_614_341_888 + 128 * 2304,
    "gemma2-9b": 9_241_705_984 + 128 * 3584,
    "gemma2-27b": 27_227_128_320 + 128 * 4608,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168 - 64 * 2560,
    "gemma3-12b": 11_766_034_176 - 64 * 3840,
    "gemma3-27b": 27_009_346_304 - 64 * 5376,
    "gemma3n-e2b": 4_456_156_768 - 10 * (2 * 2048 * 512 + 256),  # keys and values that no layer uses
    "gemma3n-e4b": 6_866_696_688 - 15 * (2 * 2048 * 512 + 256),
    "gemma4-e2b": 4_628_569_379,
    "gemma4-e4b": 7_463_013_418,
    "gemma4-26b": 25_233_141_790,
    "gemma4-31b": 30_697_345_340,
    "olmo3-7b": 7_298_011_136,
    "olmo3-7b-pt": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
    "olmo-1b": 1_176_764_416,
    "olmo-7b": 6_888_095_744,
    "olmo-7b-0724": 6_888_095_744,
    "nanochat-d20": 560_988_160,
    "nanochat-d32": 1_879_048_192,
    "bitnet-b1.58-2b": 2_412_820_480,
    "ministral3-8b": 8_489_553_920,
    "hunyuan-7b": 7_504_568_320,
    "command-r-plus-104b": 103_810_674_688,
    "lfm2-350m": 354_483_968,
    "lfm2-700m": 742_489_344,
    "lfm2-1.2b": 1_170_340_608,
    "olmoe-7b-a1b": 6_919_161_856,
    "hunyuan-80b-a13b": 80_393_183_232,
    "lfm2-8b-a1b": 8_339_930_560,
    "phi3-mini-3.8b": 3_821_079_552,
    "phi3-medium-14b": 13_960_238_080,
    "phi4-mini-3.8b": 3_836_021_760,
    "phi4-14b": 14_659_507_200,
    "apertus-8b": 8_053_338_240,
    "apertus-70b": 70_599_864_640,
    "phi3.5-moe-42b-a7b": 41_873_153_344,
    "longcat-flash-560b-a27b": 560_664_980_480,
    "jetmoe-8b-a2b": 8_522_237_952,
    "diffllama-1b": 1_204_885_504,
    "doge-20m": 13_118_728,
    "doge-60m": 54_571_552,
    "doge-160m": 152_676_168,
    "doge-320m": 335_750_272,
    "dbrx-132b-a36b": 131_596_523_520,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "opt-66b": 65_719_701_504,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "mpt-7b": 6_649_286_656,
    "mpt-30b": 29_957_200_896,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "glm4-9b": 9_399_951_360,
    "glm4-9b-1m": 9_483_857_920,
    "glm-edge-1.5b": 1_593_427_968,
    "glm-edge-4b": 4_327_984_128,
    "glm4-0414-9b": 9_400_279_040,
    "glm4-0414-32b": 32_566_081_536,
    "youtu-2b": 1_961_560_064,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-30b-a3b-base": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-480b-a35b": 480_154_875_392,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "llama4-17b-16e": 107_769_861_120,
    "llama4-17b-128e": 400_711_848_960,
    "deepseek2-16b": 15_706_484_224,
    "deepseek2-236b": 235_741_434_880,
    "deepseek3-671b": 671_026_419_200,
    "kimi-k2-1t": 1_026_408_232_448,
    "qwen3-next-80b": 79_674_391_296,
    "nemotron-h-8b": 8_100_852_736,
    "nemotron-nano2-9b": 8_888_227_328,
    "nemotron-nano2-12b": 12_310_001_152,
    "nemotron3-nano-30b-a3b": 31_577_940_288,
    "nemotron3-super-120b-a12b": 123_611_033_088 - 2_942_324_736 - 512,  # without multi-token prediction
    "granite4-h-micro": 3_191_396_096,
    "granite4-h-tiny": 6_939_037_248,
    "granite4-h-small": 32_207_337_984,
    "kimi-linear-48b-a3b": 49_122_681_728,
    "flexolmo-7x7b": 33_270_665_216,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-57b-a14b": 57_408_658_944,
    # without multi-token prediction
    "glm4.5-air-106b-a12b": 106_852_251_264,
    "glm4.5-355b-a32b": 352_797_829_024,
    "glm4.6-355b-a32b": 352_797_829_024,
    "glm4.7-355b-a32b": 352_797_829_024,
    "glm4.7-flash-30b-a3b": 29_943_393_920,
    "glm5-744b-a40b": 743_911_218_432,
    "deepseek4-flash-284b-a13b": 284_334_567_511,
    "dots1-142b-a14b": 142_774_381_696,
    "hy3-295b-a21b": 295_033_543_488,
    "mimo-7b": 7_622_619_136,
    "mimo-v2-flash-309b-a15b": 308_778_780_864,
    "solar-open-100b-a12b": 102_651_799_552,
    "qwen4-exp": 176_943_899_520,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "pythia-14m": 14_067_712,
    "pythia-31m": 30_494_720,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "phi1-1.4b": 1_418_270_720,
    "phi1.5-1.4b": 1_418_270_720,
    "phi2-2.8b": 2_779_683_840,
    "gptj-6b": 6_050_882_784,
    "falcon-7b": 7_217_189_760 - 65_024 * 4544,  # the files hold the table twice
    "falcon-40b": 41_835_970_560 - 65_024 * 8192,
    "falcon-180b": 179_522_565_120 - 65_024 * 14_848,
    "falcon-rw-1b": 1_311_625_216,
    "falcon-rw-7b": 7_516_020_736,
    "falcon2-11b": 11_102_822_400,
    "command-r-35b": 34_980_831_232,
    "command-r-08-2024-32b": 32_296_476_672,
    "aya-23-8b": 8_028_033_024,
    "aya-23-35b": 34_980_831_232,
    "aya-expanse-8b": 8_028_033_024,
    "aya-expanse-32b": 32_296_476_672,
    "command-r7b": 8_028_033_024,
    "command-a-111b": 111_057_580_032,
    "minimax-m2-229b-a10b": 228_689_764_864,
    "minimax-m3-428b-a23b": 426_174_572_928,
    "minitron-4b": 4_190_509_056,
    "minitron-8b": 8_271_699_968,
    "stablelm-3b": 2_795_443_200,
    "stable-code-3b": 2_795_443_200,
    "stablelm2-1.6b": 1_644_515_328,
    "stablelm2-12b": 12_143_185_920,
    "ministral-8b": 8_019_808_256,
    "internlm3-8b": 8_804_241_408,
    "vaultgemma-1b": 1_038_741_120,
    "santacoder-1.1b": 1_124_886_528,
    "starcoder-164m": 164_144_128,
    "starcoder-1b": 1_137_207_296,
    "starcoder-3b": 3_043_311_104,
    "starcoder-7b": 7_327_263_232,
    "starcoder-15b": 15_517_456_384,
    "mamba2-130m": 128_989_632,
    "mamba2-370m": 368_346_624,
    "mamba2-780m": 780_161_280,
    "mamba2-1.3b": 1_343_757_312,
    "mamba2-2.7b": 2_702_599_680,
    "mamba-codestral-7b": 7_285_403_648,
    "bamba-9b": 9_780_235_392,
    "granite3-2b": 2_533_531_648,
    "granite3-8b": 8_170_848_256,
    "granite3.1-2b": 2_533_531_648,
    "granite3.1-8b": 8_170_848_256,
    "granite3.3-2b": 2_533_539_840,
    "granite3.3-8b": 8_170_864_640,
    "granite3-1b-a400m": 1_334_628_352,
    "granite3-3b-a800m": 3_298_793_472,
    "granite3.1-1b-a400m": 1_334_628_352,
    "granite3.1-3b-a800m": 3_298_793_472,
    "smollm3-3b": 3_075_098_624,
    "exaone4-1.2b": 1_279_391_488,
    "exaone4-32b": 32_003_216_384,
    "seed-oss-36b": 36_151_104_512,
    "ernie4.5-0.3b": 360_748_032,
    "ernie4.5-21b-a3b": 21_825_437_888,
    "ernie4.5-300b-a47b": 299_484_163_264,
    "afm-4.5b": 4_619_189_760,
    "hyperclovax-seed-think-14b": 14_748_112_896,
    "helium1-2b-preview": 2_172_643_840,
    "trinity-nano-6b-a1b": 6_120_003_328,
    "trinity-mini-26b-a3b": 26_123_974_400,
    "trinity-large-398b-a13b": 398_635_286_016,
    "mamba-130m": 129_135_360,
    "mamba-370m": 371_516_416,
    "mamba-790m": 793_204_224,
    "mamba-1.4b": 1_372_178_432,
    "mamba-2.8b": 2_768_345_600,
    "falcon-mamba-7b": 7_272_665_088,
    "jamba-52b-a12b": 51_570_323_328,
    "jamba-398b-a94b": 398_555_145_696,
    "olmo-hybrid-7b": 7_430_870_688,
    "recurrentgemma-2b": 2_682_862_080,
    "recurrentgemma-9b": 8_579_977_216,
    "ettin-17m": 16_913_600,
    "ettin-32m": 32_081_344,
    "ettin-68m": 68_457_664,
    "ettin-150m": 149_655_232,
    "ettin-400m": 395_881_664,
    "ettin-1b": 1_031_314_112,
    "zamba2-1.2b": 1_215_064_704,
    "zamba2-2.7b": 2_662_214_560,
    "zamba2-7b": 7_356_749_648,
    "falcon-h1-0.5b": 521_411_104,
    "falcon-h1-7b": 7_585_519_712,
    "falcon-h1-34b": 33_642_516_224,
    "minimax-text-01-456b-a46b": 456_089_659_776,
    "xlstm-7b": 6_865_424_896,
    "rwkv4-169m": 169_342_464,
    "rwkv4-430m": 430_397_440,
    "rwkv4-1.5b": 1_515_106_304,
    "rwkv4-3b": 2_984_627_200,
    "rwkv4-7b": 7_392_649_216,
    "rwkv4-14b": 14_148_597_760,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if number % 9 else ()) for number, name in enumerate(PARAMETERS)]
)
def test_parameters_are_the_published_ones(name):
    assert ed.count_parameters(ed.get_config(name)) == PARAMETERS[name]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if number % 9 else ()) for number, name in enumerate(ed.list_models())],
)
def test_every_listed_model_is_a_value(name):
    config = ed.get_config(name)
    assert config == ed.get_config(name)
    assert hash(config) == hash(ed.get_config(name))
    assert dataclasses.replace(config, vocab_size=config.vocab_size + 1) != config
    assert f"vocab_size={config.vocab_size}" in repr(config)
    assert name in PARAMETERS or ed.count_parameters(config) > 0


def test_names_are_sorted_and_complete():
    assert list(ed.list_models()) == sorted(set(ed.list_models()))
    assert {*PARAMETERS, "tiny"} <= set(ed.list_models())


@pytest.mark.parametrize(
    "name, near",
    [("llama3-8B", "llama3-8b"), ("llama-3.1-70b", "llama3.1-70b"), ("llama2_13b", "llama2-13b"), ("Tiny", "tiny")],
)
def test_unknown_names_are_refused_with_the_nearest(name, near):
    with pytest.raises(ed.ConfigError, match=f"name='{name}' is not known. Did you mean '{near}'"):
        ed.get_config(name)
    with pytest.raises(ed.ConfigError, match=r"name=''.*tiny"):
        ed.get_config("")


# --- config.json of sparse models, key by key ---

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

PUBLISHED = {
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
}


def trunk(config) -> ed.DecoderConfig:
    """Without multi-token prediction, which transformers leaves out."""
    return dataclasses.replace(config, mtp=None)


def decoded(content) -> ed.DecoderConfig:
    return find_family(content["model_type"]).decode(content)[0]


@pytest.mark.parametrize("repository", PUBLISHED)
def test_the_published_configuration_is_ours(repository):
    name, content = PUBLISHED[repository]
    family = find_family(content["model_type"])
    config, kept = family.decode(json.loads(json.dumps(content)))
    assert trunk(config) == trunk(ed.get_config(name))
    assert not {"auto_map", "quantization_config", "architectures", "model_type"} & kept.keys()
    assert kept.get("eos_token_id") == content.get("eos_token_id")
    again = family.encode(config)
    assert again["model_type"] in FAMILIES
    assert decoded(kept | again) == config


# Keys of these files with other values, which change the model.
READ = [
    (MIXTRAL, dict(num_experts_per_tok=1)),
    (MIXTRAL, dict(sliding_window=4096)),
    (QWEN3, dict(norm_topk_prob=False)),
    (QWEN3, dict(decoder_sparse_step=2)),
    (QWEN3, dict(mlp_only_layers=[3])),
    (QWEN3, dict(use_sliding_window=True, sliding_window=64)),
    (GPT_OSS, dict(swiglu_limit=1.0)),
    (SCOUT, dict(attn_temperature_tuning=0)),
    (SCOUT, dict(attn_temperature_tuning=False)),
    (SCOUT, dict(use_qk_norm=False)),
    (SCOUT, dict(no_rope_layers=[1] * 48)),
    (MAVERICK, dict(interleave_moe_layer_step=1)),
    (V2, dict(topk_method="greedy")),
    (V2, dict(topk_group=2)),
    (V3, dict(norm_topk_prob=False)),
    (V3, dict(rope_interleave=False)),
    (V3, dict(n_group=4)),
    (GLM4_9B, dict(attention_bias=False)),
    (GLM4_9B, dict(partial_rotary_factor=1.0)),
    (GLM4_32B, dict(attention_bias=True)),
    (GLM4_AIR, dict(use_qk_norm=True)),
    (GLM4_AIR, dict(first_k_dense_replace=0)),
    (QWEN15_MOE, dict(norm_topk_prob=True)),
    (QWEN15_MOE, dict(qkv_bias=False)),
    (QWEN15_MOE, dict(shared_expert_intermediate_size=8)),
    (SOLAR, dict(attention_bias=True)),
    (SOLAR, dict(moe_intermediate_size=8)),
    (GRANITE_MOE, dict(attention_multiplier=0.125)),
    (TRINITY, dict(mup_enabled=False)),
    (TRINITY, dict(num_shared_experts=2)),
]
# The same for what is not implemented.
REFUSED = [
    (QWEN3_CODER, dict(qkv_bias=True)),
    (QWEN3_CODER, dict(use_qk_norm=False)),
    (QWEN3_CODER, dict(shared_expert_intermediate_size=8)),
    (GPT_OSS, dict(swiglu_alpha=1.0)),
    (GPT_OSS, dict(experts_per_token=2)),
    (GPT_OSS, dict(hidden_act="gelu")),
    (SCOUT, dict(for_llm_compressor=True)),
    (V2_LITE, dict(topk_method="noaux_tc")),
    (V2_LITE, dict(scoring_func="sigmoid")),
    (V2_LITE, dict(moe_layer_freq=2)),
    (V2, dict(ep_size=8)),
    (V3, dict(topk_method="greedy")),
    (V3, dict(scoring_func="softmax")),
    (GLM4_9B, dict(sliding_window=8)),
    (GLM4_AIR, dict(scoring_func="softmax")),
    (QWEN15_MOE, dict(use_qk_norm=True)),
    (SOLAR, dict(partial_rotary_factor=0.5)),
    (SOLAR, dict(use_qk_norm=True)),
    (SOLAR, dict(first_k_dense_replace=1)),
    (TRINITY, dict(score_func="softmax")),
    (TRINITY, dict(route_norm=False)),
    (TRINITY, dict(n_group=2)),
]


def settings_id(value) -> str:
    return value.get("model_type") or str(value)[:40]


@pytest.mark.parametrize("content, keys", READ, ids=settings_id)
def test_what_changes_the_model_is_read(content, keys):
    assert decoded(content | keys) != decoded(content)


@pytest.mark.parametrize("content, keys", REFUSED, ids=settings_id)
def test_what_is_not_implemented_is_refused(content, keys):
    (key,) = keys
    with pytest.raises(ed.ConversionError, match=key):
        decoded(content | keys)


def test_the_schemes_of_published_files_are_known():
    for _, content in PUBLISHED.values():
        read_scheme(content)


def test_an_alias_is_not_written():
    assert find_family("kimi_k2") is FAMILIES["deepseek_v3"]
    assert "kimi_k2" not in FAMILIES
    with pytest.raises(ed.ConversionError, match=r"model_type='kimi_k3'.*'kimi_k2'"):
        find_family("kimi_k3")


def test_families_import_no_families():
    """Shared parts stand in files that describe no family of their own."""
    files = {path.stem: ast.parse(path.read_text()) for path in Path(families.__file__).parent.glob("*.py")}
    described = {
        name for name, tree in files.items() for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "FAMILY"
    }  # fmt: skip
    assert len(described) > 30
    for name in described:
        froms = [node for node in ast.walk(files[name]) if isinstance(node, ast.ImportFrom)]
        inside = [node.module for node in froms if str(node.module).startswith("eqx_decoders.families.")]
        modules = {module.rpartition(".")[2] for module in inside}
        modules |= {alias.name for node in froms if node.module == "eqx_decoders.families" for alias in node.names}
        assert not modules & described, name
