"""Command R: scaled logits, layers without positions, and files as published."""

import pytest

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from eqx_decoders.layers.mask import SlidingWindow
from tests.families.samples import decode, mixers, sample


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


def test_the_published_configuration_is_ours():
    assert decode(R7B) == ed.get_config("command-r7b")


@pytest.mark.parametrize("keys", [dict(use_parallel_block=False), dict(rotary_pct=0.5), dict(head_dim=64)], ids=str)
def test_what_transformers_does_not_read_may_not_differ(keys):
    (key,) = keys
    with pytest.raises(ed.ConversionError, match=key):
        decode(R7B | keys)


def test_only_windows_have_positions():
    for mixer in mixers(ed.get_config("command-a-111b")):
        assert (mixer.rope is None) == (not isinstance(mixer.mask, SlidingWindow))


def test_r_plus_has_a_scale_for_each_head():
    (first, *_), plain = mixers(ed.get_config("command-r-plus-104b")), mixers(ed.get_config("command-r-35b"))[0]
    assert first.qk_norm.over == "each_head" and plain.qk_norm is None


@pytest.mark.slow(fast=("cohere",))
@pytest.mark.parametrize("kind", ["cohere", "cohere2"])
def test_the_scale_of_logits_is_written_as_it_was(kind):
    for step in range(1, 200):
        config = decode(sample(kind, logit_scale=step / 100))
        assert FAMILIES[kind].encode(config)["logit_scale"] == step / 100
