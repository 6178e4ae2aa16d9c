"""Published sizes: parameters counted to the last one."""

import pytest

import eqx_decoders as ed
from eqx_decoders.layers.mask import Causal, SlidingWindow
from eqx_decoders.layers.rope import LinearRope, Rope, YarnRope


# What the published files hold. Of the Gemmas other sizes of the vocabulary have been published, too: here it is the
# one of Google's own files, 128 more (Gemma, Gemma 2) or 64 fewer (Gemma 3) rows than in those on Hugging Face.
PARAMETERS = {
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
    "olmo3-7b": 7_298_011_136,
    "olmo3-7b-pt": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
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
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_ones(name):
    assert ed.count_parameters(ed.get_config(name)) == PARAMETERS[name]


def mixers(name):
    return [block.mixer for block in ed.get_config(name).blocks]


def test_gemma_2_and_3_have_their_windows_and_scales():
    assert [mixer.mask for mixer in mixers("gemma2-2b")] == [SlidingWindow(4096), Causal()] * 13
    assert {mixer.query_scale for mixer in mixers("gemma2-27b")} == {144**-0.5}
    assert {mixer.query_scale for mixer in mixers("gemma3-27b")} == {168**-0.5}
    for name, window, rope in (
        ("gemma3-1b", 512, Rope(theta=1e6)),
        ("gemma3-4b", 1024, LinearRope(theta=1e6, factor=8.0)),
    ):
        for index, mixer in enumerate(mixers(name)):
            local = (index + 1) % 6 != 0
            assert mixer.mask == (SlidingWindow(window) if local else Causal())
            assert mixer.rope == (Rope(theta=10_000.0) if local else rope)
    config = ed.get_config("gemma3-4b")
    assert len(ed.segments(config.blocks)) == 2  # 34 layers: five times six, and four that are left
    assert config.embedding_scale == 2560**0.5


def test_olmo_3_stretches_the_full_layers_only():
    for index, mixer in enumerate(mixers("olmo3-7b")):
        full = (index + 1) % 4 == 0
        assert mixer.rope == (YarnRope(theta=5e5, factor=8.0, original_length=8192) if full else Rope(theta=5e5))
        assert mixer.mask == (Causal() if full else SlidingWindow(4096))


def test_thetas():
    assert {mixer.rope.theta for mixer in mixers("qwen3-4b")} == {1e6}
    assert {mixer.rope.theta for mixer in mixers("qwen3-4b-thinking-2507")} == {5e6}
    assert {(mixer.rope.theta, mixer.mask) for mixer in mixers("mistral-7b")} == {(1e6, Causal())}
    assert {(mixer.rope.theta, mixer.mask) for mixer in mixers("mistral-7b-v0.1")} == {(1e4, SlidingWindow(4096))}
