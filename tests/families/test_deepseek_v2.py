"""DeepSeek-V2: how experts are chosen, and queries with and without latents."""

import eqx_decoders as ed
from eqx_decoders.layers.moe.router import RouterConfig
from tests.families.samples import decode, sample


def test_groups_count_only_where_the_method_says_so():
    def router(method):
        return decode(sample("deepseek_v2", topk_method=method)).blocks[-1].mlp.router

    common = dict(order="score_first", scaling_factor=3.0)
    assert router("greedy") == RouterConfig(**common)
    assert router("group_limited_greedy") == RouterConfig(num_groups=4, groups_per_token=1, group_score="max", **common)


def test_weights_are_never_divided_by_their_sum():
    assert decode(sample("deepseek_v2", norm_topk_prob=True)) == decode(sample("deepseek_v2", norm_topk_prob=False))


def test_biases_of_mlps_are_those_of_dense_and_shared_ones():
    dense, sparse = decode(sample("deepseek_v2", mlp_bias=True)).blocks
    assert dense.mlp.bias and sparse.mlp.shared.bias and not sparse.mlp.bias


def test_published_models():
    for name, rank, experts in (("deepseek2-16b", None, 64), ("deepseek2-236b", 1536, 160)):
        dense, *others = ed.get_config(name).blocks
        (sparse,) = set(others)
        assert dense.mixer == sparse.mixer
        assert (sparse.mixer.q_rank, sparse.mixer.kv_rank, sparse.mixer.rope_dim) == (rank, 512, 64)
        assert (sparse.mlp.num_experts, sparse.mlp.shared.mlp_dim) == (experts, 2 * sparse.mlp.mlp_dim)
