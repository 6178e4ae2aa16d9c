"""MiMo-V2-Flash: what layers with windows have of their own, and older keys."""

from tests.families.samples import decode, mixers, sample


def test_layers_with_windows_have_more_key_heads_and_sinks():
    full, local, _ = mixers(decode(sample("mimo_v2_flash")))
    assert (full.num_kv_heads, full.sinks, local.num_kv_heads, local.sinks) == (1, False, 2, True)
    assert full.rope.theta > local.rope.theta and full.value_dim == local.value_dim == 6


def test_an_older_key_counts_the_tokens_before_the_query():
    kinds = ("mlp_layer_types", "sliding_window_size")
    found = decode(sample("mimo_v2_flash", *kinds, "sliding_window", sliding_window_size=7))
    assert mixers(found)[1].mask.size == 8


def test_every_sixth_layer_and_the_first_are_full():
    keys = ("layer_types", "mlp_layer_types", "sliding_window", "sliding_window_size")
    found = mixers(decode(sample("mimo_v2_flash", *keys, num_hidden_layers=8)))
    assert [getattr(mixer.mask, "size", None) for mixer in found] == [None, 129, 129, 129, 129, None, 129, 129]
