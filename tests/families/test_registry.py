"""Published models by name: exact parameter counts, and `config.json` as published."""

import dataclasses
import importlib
import json
import pkgutil

import pytest

import eqx_decoders as ed
from eqx_decoders import families
from eqx_decoders.families import registry
from eqx_decoders.families.registry import FAMILIES, MODULES, find_family
from eqx_decoders.io.huggingface.export import export_config
from eqx_decoders.io.huggingface.quantized import read_scheme
from tests.errors import refused
from tests.families.published import FILES
from tests.families.samples import decode


# Parameter counts of the published files. The Gemma models were also published with other vocabulary sizes. These are
# the sizes of Google's own files, with 128 more rows (Gemma, Gemma 2) or 64 fewer (Gemma 3) than on Hugging Face.
PARAMETERS = {
    "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192, "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800, "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496, "llama3.1-405b": 405_853_388_800, "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824, "llama3.3-70b": 70_553_706_496,
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "mistral-7b": 7_241_732_096, "mistral-7b-v0.1": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976,
    "qwen3-1.7b-base": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-4b-base": 4_022_468_096,
    "qwen3-4b-thinking-2507": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-8b-base": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-14b-base": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "gemma-2b": 2_506_172_416 + 128 * 2048, "gemma-7b": 8_537_680_896 + 128 * 3072,
    "gemma2-2b": 2_614_341_888 + 128 * 2304, "gemma2-9b": 9_241_705_984 + 128 * 3584,
    "gemma2-27b": 27_227_128_320 + 128 * 4608, "gemma3-1b": 999_885_952, "gemma3-4b": 3_880_263_168 - 64 * 2560,
    "gemma3-12b": 11_766_034_176 - 64 * 3840, "gemma3-27b": 27_009_346_304 - 64 * 5376,
    "gemma3n-e2b": 4_456_156_768 - 10 * (2 * 2048 * 512 + 256),  # unused keys and values of some layers
    "gemma3n-e4b": 6_866_696_688 - 15 * (2 * 2048 * 512 + 256), "gemma4-e2b": 4_628_569_379,
    "gemma4-e4b": 7_463_013_418, "gemma4-26b": 25_233_141_790, "gemma4-31b": 30_697_345_340,
    "olmo3-7b": 7_298_011_136, "olmo3-7b-pt": 7_298_011_136, "olmo3-32b": 32_233_522_176, "olmo-1b": 1_176_764_416,
    "olmo-7b": 6_888_095_744, "olmo-7b-0724": 6_888_095_744,
    "nanochat-d20": 560_988_160, "nanochat-d32": 1_879_048_192,
    "bitnet-b1.58-2b": 2_412_820_480,
    "ministral3-8b": 8_489_553_920,
    "hunyuan-7b": 7_504_568_320,
    "command-r-plus-104b": 103_810_674_688,
    "lfm2-350m": 354_483_968, "lfm2-700m": 742_489_344, "lfm2-1.2b": 1_170_340_608,
    "olmoe-7b-a1b": 6_919_161_856,
    "hunyuan-80b-a13b": 80_393_183_232,
    "lfm2-8b-a1b": 8_339_930_560,
    "phi3-mini-3.8b": 3_821_079_552, "phi3-medium-14b": 13_960_238_080, "phi4-mini-3.8b": 3_836_021_760,
    "phi4-14b": 14_659_507_200,
    "apertus-8b": 8_053_338_240, "apertus-70b": 70_599_864_640,
    "phi3.5-moe-42b-a7b": 41_873_153_344,
    "longcat-flash-560b-a27b": 560_664_980_480,
    "jetmoe-8b-a2b": 8_522_237_952,
    "diffllama-1b": 1_204_885_504,
    "doge-20m": 13_118_728, "doge-60m": 54_571_552, "doge-160m": 152_676_168, "doge-320m": 335_750_272,
    "dbrx-132b-a36b": 131_596_523_520,
    "opt-125m": 125_239_296, "opt-350m": 331_196_416, "opt-1.3b": 1_315_758_080, "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984, "opt-13b": 12_853_473_280, "opt-30b": 29_974_540_288, "opt-66b": 65_719_701_504,
    "bloom-560m": 559_214_592, "bloom-1b1": 1_065_314_304, "bloom-1b7": 1_722_408_960, "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064, "bloom-176b": 176_247_271_424,
    "mpt-7b": 6_649_286_656, "mpt-30b": 29_957_200_896,
    "olmo2-1b": 1_484_916_736, "olmo2-7b": 7_298_617_344, "olmo2-13b": 13_716_198_400, "olmo2-32b": 32_234_279_936,
    "glm4-9b": 9_399_951_360, "glm4-9b-1m": 9_483_857_920, "glm-edge-1.5b": 1_593_427_968,
    "glm-edge-4b": 4_327_984_128, "glm4-0414-9b": 9_400_279_040, "glm4-0414-32b": 32_566_081_536,
    "youtu-2b": 1_961_560_064,
    "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_630_071_296,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-30b-a3b-base": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-480b-a35b": 480_154_875_392,
    "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
    "llama4-17b-16e": 107_769_861_120, "llama4-17b-128e": 400_711_848_960,
    "deepseek2-16b": 15_706_484_224, "deepseek2-236b": 235_741_434_880, "deepseek3-671b": 671_026_419_200,
    "kimi-k2-1t": 1_026_408_232_448,
    "qwen3-next-80b": 79_674_391_296,
    "nemotron-h-8b": 8_100_852_736, "nemotron-nano2-9b": 8_888_227_328, "nemotron-nano2-12b": 12_310_001_152,
    "nemotron3-nano-30b-a3b": 31_577_940_288,
    "nemotron3-super-120b-a12b": 123_611_033_088 - 2_942_324_736 - 512,  # without multi-token prediction
    "granite4-h-micro": 3_191_396_096, "granite4-h-tiny": 6_939_037_248, "granite4-h-small": 32_207_337_984,
    "kimi-linear-48b-a3b": 49_122_681_728,
    "flexolmo-7x7b": 33_270_665_216,
    "qwen1.5-moe-a2.7b": 14_315_784_192, "qwen2-57b-a14b": 57_408_658_944,
    # without multi-token prediction
    "glm4.5-air-106b-a12b": 106_852_251_264, "glm4.5-355b-a32b": 352_797_829_024, "glm4.6-355b-a32b": 352_797_829_024,
    "glm4.7-355b-a32b": 352_797_829_024, "glm4.7-flash-30b-a3b": 29_943_393_920, "glm5-744b-a40b": 743_911_218_432,
    "deepseek4-flash-284b-a13b": 284_334_567_511,
    "dots1-142b-a14b": 142_774_381_696,
    "hy3-295b-a21b": 295_033_543_488,
    "mimo-7b": 7_622_619_136, "mimo-v2-flash-309b-a15b": 308_778_780_864,
    "solar-open-100b-a12b": 102_651_799_552,
    "qwen4-exp": 176_943_899_520,
    "starcoder2-3b": 3_030_371_328, "starcoder2-7b": 7_173_923_840, "starcoder2-15b": 15_957_889_024,
    "pythia-14m": 14_067_712, "pythia-31m": 30_494_720, "pythia-70m": 70_426_624, "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016, "pythia-1b": 1_011_781_632, "pythia-1.4b": 1_414_647_808, "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016, "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "phi1-1.4b": 1_418_270_720, "phi1.5-1.4b": 1_418_270_720, "phi2-2.8b": 2_779_683_840,
    "gptj-6b": 6_050_882_784,
    "falcon-7b": 7_217_189_760 - 65_024 * 4544,  # the files contain the table twice
    "falcon-40b": 41_835_970_560 - 65_024 * 8192, "falcon-180b": 179_522_565_120 - 65_024 * 14_848,
    "falcon-rw-1b": 1_311_625_216, "falcon-rw-7b": 7_516_020_736, "falcon2-11b": 11_102_822_400,
    "command-r-35b": 34_980_831_232, "command-r-08-2024-32b": 32_296_476_672,
    "aya-23-8b": 8_028_033_024, "aya-23-35b": 34_980_831_232, "aya-expanse-8b": 8_028_033_024,
    "aya-expanse-32b": 32_296_476_672,
    "command-r7b": 8_028_033_024, "command-a-111b": 111_057_580_032,
    "minimax-m2-229b-a10b": 228_689_764_864, "minimax-m3-428b-a23b": 426_174_572_928,
    "minitron-4b": 4_190_509_056, "minitron-8b": 8_271_699_968,
    "stablelm-3b": 2_795_443_200,
    "stable-code-3b": 2_795_443_200,
    "stablelm2-1.6b": 1_644_515_328, "stablelm2-12b": 12_143_185_920,
    "ministral-8b": 8_019_808_256,
    "internlm3-8b": 8_804_241_408,
    "vaultgemma-1b": 1_038_741_120,
    "santacoder-1.1b": 1_124_886_528,
    "starcoder-164m": 164_144_128, "starcoder-1b": 1_137_207_296, "starcoder-3b": 3_043_311_104,
    "starcoder-7b": 7_327_263_232, "starcoder-15b": 15_517_456_384,
    "mamba2-130m": 128_989_632, "mamba2-370m": 368_346_624, "mamba2-780m": 780_161_280, "mamba2-1.3b": 1_343_757_312,
    "mamba2-2.7b": 2_702_599_680, "mamba-codestral-7b": 7_285_403_648,
    "bamba-9b": 9_780_235_392,
    "granite3-2b": 2_533_531_648, "granite3-8b": 8_170_848_256, "granite3.1-2b": 2_533_531_648,
    "granite3.1-8b": 8_170_848_256, "granite3.3-2b": 2_533_539_840, "granite3.3-8b": 8_170_864_640,
    "granite3-1b-a400m": 1_334_628_352, "granite3-3b-a800m": 3_298_793_472, "granite3.1-1b-a400m": 1_334_628_352,
    "granite3.1-3b-a800m": 3_298_793_472,
    "smollm3-3b": 3_075_098_624,
    "exaone4-1.2b": 1_279_391_488, "exaone4-32b": 32_003_216_384,
    "seed-oss-36b": 36_151_104_512,
    "ernie4.5-0.3b": 360_748_032, "ernie4.5-21b-a3b": 21_825_437_888, "ernie4.5-300b-a47b": 299_484_163_264,
    "afm-4.5b": 4_619_189_760,
    "hyperclovax-seed-think-14b": 14_748_112_896,
    "helium1-2b-preview": 2_172_643_840,
    "trinity-nano-6b-a1b": 6_120_003_328, "trinity-mini-26b-a3b": 26_123_974_400,
    "trinity-large-398b-a13b": 398_635_286_016,
    "mamba-130m": 129_135_360, "mamba-370m": 371_516_416, "mamba-790m": 793_204_224, "mamba-1.4b": 1_372_178_432,
    "mamba-2.8b": 2_768_345_600,
    "falcon-mamba-7b": 7_272_665_088,
    "jamba-52b-a12b": 51_570_323_328, "jamba-398b-a94b": 398_555_145_696,
    "olmo-hybrid-7b": 7_430_870_688,
    "recurrentgemma-2b": 2_682_862_080, "recurrentgemma-9b": 8_579_977_216,
    "ettin-17m": 16_913_600, "ettin-32m": 32_081_344, "ettin-68m": 68_457_664, "ettin-150m": 149_655_232,
    "ettin-400m": 395_881_664, "ettin-1b": 1_031_314_112,
    "zamba2-1.2b": 1_215_064_704, "zamba2-2.7b": 2_662_214_560, "zamba2-7b": 7_356_749_648,
    "falcon-h1-0.5b": 521_411_104, "falcon-h1-7b": 7_585_519_712, "falcon-h1-34b": 33_642_516_224,
    "minimax-text-01-456b-a46b": 456_089_659_776,
    "xlstm-7b": 6_865_424_896,
    "rwkv4-169m": 169_342_464, "rwkv4-430m": 430_397_440, "rwkv4-1.5b": 1_515_106_304, "rwkv4-3b": 2_984_627_200,
    "rwkv4-7b": 7_392_649_216, "rwkv4-14b": 14_148_597_760,
}  # fmt: skip


FAST = (
    "llama2-7b", "llama3.2-1b", "qwen2.5-0.5b", "qwen3-1.7b-base", "gemma-2b", "gemma3n-e2b", "olmo-1b",
    "lfm2-350m", "phi4-14b", "doge-160m", "opt-30b", "mpt-30b", "glm4-0414-9b", "gpt-oss-20b", "nemotron-h-8b",
    "flexolmo-7x7b", "deepseek4-flash-284b-a13b", "starcoder2-15b", "pythia-6.9b", "falcon-180b",
    "aya-expanse-32b", "stablelm2-1.6b", "starcoder-7b", "granite3-2b", "granite3.1-3b-a800m", "mamba-2.8b",
    "ettin-68m", "hyperclovax-seed-think-14b", "falcon-h1-34b",
)  # fmt: skip
FAST_WITH_ENCODERS = ("gemma4-26b-vision", "internvl3.5-1b", "llava1.6-mistral-7b", "qwen3-vl-30b-a3b", "qwen3.5-9b")


@pytest.mark.slow(fast=FAST)
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_of_published_models(name):
    assert ed.count_parameters(ed.get_config(name)) == PARAMETERS[name]


@pytest.mark.slow(fast=(*FAST, *FAST_WITH_ENCODERS))
@pytest.mark.parametrize("name", ed.list_models())
def test_listed_configs_are_hashable_values(name):
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
    with refused(ed.ConfigError, f"name='{name}'", f"'{near}'"):
        ed.get_config(name)
    with refused(ed.ConfigError, "name=''", "list_models()"):
        ed.get_config("")


def test_tiny_has_few_parameters():
    assert 4_500_000 < ed.count_parameters(ed.get_config("tiny")) < 5_500_000


def test_active_parameters_of_tiny_moe_equal_tiny():
    dense, sparse = ed.get_config("tiny"), ed.get_config("tiny-moe")
    experts = sparse.blocks[0].mlp
    assert experts.shared.mlp_dim + experts.num_experts_per_token * experts.mlp_dim == dense.blocks[0].mlp.mlp_dim
    blocks = tuple(dataclasses.replace(block, mlp=dense.blocks[0].mlp) for block in sparse.blocks)
    assert dataclasses.replace(sparse, blocks=blocks) == dense
    assert experts.router.selection_bias and experts.router.bias_update_rate > 0


def without_mtp(config) -> ed.DecoderConfig:
    """Remove multi-token prediction, which transformers ignores."""
    return dataclasses.replace(config, mtp=None)


@pytest.mark.parametrize("repository", FILES)
def test_published_config_gives_the_listed_model(repository):
    name, content = FILES[repository]
    family = find_family(content["model_type"])
    config, kept = family.decode(json.loads(json.dumps(content)))
    assert without_mtp(config) == without_mtp(ed.get_config(name))
    assert not {"auto_map", "quantization_config", "architectures", "model_type"} & kept.keys()
    assert kept.get("eos_token_id") == content.get("eos_token_id")
    again = family.encode(config)
    assert again["model_type"] in FAMILIES
    assert decode(kept | again) == config
    read_scheme(content)


@pytest.mark.parametrize("name", ["olmo2-7b", "olmo3-7b"])
def test_save_hf_finds_the_family_of_a_listed_model(name):
    """It is one of the families that can express the model: Olmo 3 can express OLMo 2 as layers without windows."""
    model = ed.abstract(ed.get_config(name))
    assert export_config(model)[0].model_type == name.partition("-")[0]


def test_an_alias_is_not_written():
    assert find_family("kimi_k2") is FAMILIES["deepseek_v3"]
    assert "kimi_k2" not in FAMILIES
    with refused(ed.ConversionError, "model_type='kimi_k3'", "'kimi_k2'"):
        find_family("kimi_k3")


def test_index_lists_all_families_and_models():
    """`MODULES` lists the model types, with aliases, and the prefixes of model names of each module."""
    found = {}
    for info in pkgutil.walk_packages(families.__path__, f"{families.__name__}."):
        module = importlib.import_module(info.name)
        if hasattr(module, "MODELS"):
            own = getattr(module, "FAMILIES", None) or ([module.FAMILY] if hasattr(module, "FAMILY") else [])
            types = [name for family in own for name in (family.model_type, *family.aliases)]
            words = dict.fromkeys(name.partition("-")[0] for name in module.MODELS)
            found[info.name.removeprefix(f"{families.__name__}.")] = (set(types), set(words))
    assert found == {name: (set(types.split()), set(words.split())) for name, (types, words) in MODULES.items()}


def test_register_family(monkeypatch):
    for name in ("_families", "_registered"):  # restores the registry
        monkeypatch.setattr(registry.FAMILIES, name, dict(getattr(registry.FAMILIES, name)))
    monkeypatch.setattr(registry, "_REGISTERED_MODELS", {})
    llama = find_family("llama")
    own = dataclasses.replace(llama, model_type="own", aliases=("older",))
    settings = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
    models = {"own-1b": lambda: ed.get_config("tiny"), "own-2b": dict(model_type="own", **settings)}
    ed.register_family(own, models)
    assert ed.get_config("own-1b") == ed.get_config("tiny") and len(ed.get_config("own-2b").blocks) == 2
    assert find_family("older") is FAMILIES["own"] is own and "own-1b" in ed.list_models()
    again = dataclasses.replace(own, architecture="OwnForCausalLM", aliases=())
    ed.register_family(again)  # a notebook cell may run again
    assert find_family("own") is again and not registry.is_known("older")
    ed.register_family(own, {"qwen3": lambda: ed.get_config("tiny")})  # a model may have the same name as a family
    for wrong, models, name in (
        (dataclasses.replace(llama, model_type="qwen3"), {}, "'qwen3'"),
        (llama, {}, "'llama'"),
        (dataclasses.replace(own, aliases=("kimi_k2",)), {}, "'kimi_k2'"),
        (own, {"tiny": lambda: ed.get_config("tiny")}, "tiny"),
    ):
        with refused(ed.ConfigError, name):
            ed.register_family(wrong, models)
