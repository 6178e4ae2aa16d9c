"""Families with DeepSeek-V3's experts beside other attention, and Qwen2 with experts: windows, dense layers, files."""

import pytest

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from eqx_decoders.families.moe import sparse_layers
from tests.families.samples import decode, sample, windows


def test_windows_of_dots_begin_at_a_layer():
    assert windows("dots1", 4, sliding_window=5, max_window_layers=2) == [None, None, 5, 5]
    assert windows("dots1", 4, sliding_window=5) == [None] * 4
    assert windows("dots1", 2, sliding_window=None, max_window_layers=0) == [None] * 2


def test_windows_of_qwen2_with_experts_alternate_and_end_at_a_layer():
    on = dict(use_sliding_window=True, sliding_window=5)
    assert windows("qwen2_moe", 5, **on, max_window_layers=4) == [5, None, 5, None, None]
    assert windows("qwen2_moe", 3, **on) == [5, None, 5]
    assert windows("qwen2_moe", 3, sliding_window=5) == windows("qwen2_moe", 3, sliding_window=0) == [None] * 3
    off = FAMILIES["qwen2_moe"].encode(ed.get_config("qwen2-57b-a14b"))
    assert (off["use_sliding_window"], off["sliding_window"]) == (False, 0)


@pytest.mark.parametrize("kind", ["hy_v3", "glm4_moe_lite"])
def test_dense_layers_are_listed_or_counted(kind):
    names = ("mlp_layer_types", "first_k_dense_replace", "num_hidden_layers")
    three = dict(num_hidden_layers=3)
    assert sparse_layers(decode(sample(kind, *names, **three))) == [1, 2]
    assert sparse_layers(decode(sample(kind, *names, **three, first_k_dense_replace=2))) == [2]
    listed = decode(sample(kind, *names, **three, mlp_layer_types=["sparse", "dense", "sparse"]))
    assert sparse_layers(listed) == [0, 2]
    assert FAMILIES[kind].encode(listed)["mlp_layer_types"] == ["sparse", "dense", "sparse"]
    with pytest.raises(ed.ConversionError, match="no layer has experts"):
        decode(sample(kind, *names, **three, mlp_layer_types=["dense"] * 3))


def test_choices_of_glm5_are_shared_by_a_list_a_pattern_or_a_period():
    def chooses(**keys) -> str:
        content = sample("glm_moe_dsa", "indexer_types", "mlp_layer_types", "layer_types", **keys)
        config = decode(content | dict(num_hidden_layers=6))
        assert FAMILIES["glm_moe_dsa"].decode(FAMILIES["glm_moe_dsa"].encode(config))[0] == config
        names = [(block.mixer.indexer.shares_as, block.mixer.indexer.shared_from) for block in config.blocks]
        return "".join({(None, None): "f", ("choice", None): "F", (None, "choice"): "s"}[each] for each in names)

    assert chooses() == "ffffff"
    assert chooses(index_topk_freq=3) == "fFssFs"
    assert chooses(index_topk_freq=2, index_skip_topk_offset=3) == "ffFsFs"
    assert (
        chooses(index_topk_pattern="FFSSFS")
        == chooses(index_topk_pattern=["full", "full", *["shared"] * 2, "full", "shared"])
        == "fFssFs"
    )
    assert chooses(indexer_types=["full"] + ["shared"] * 5, index_topk_freq=2) == "Fsssss"
    assert decode(sample("glm_moe_dsa", num_nextn_predict_layers=1)).mtp.block.mixer.indexer.shared_from is None
    with pytest.raises(ed.ConversionError, match=r"blocks\[0\].mixer.indexer.shared_from='choice'"):
        chooses(indexer_types=["shared"] * 6)
    with pytest.raises(ed.ConversionError, match="indexer_rope_interleave"):
        chooses(indexer_rope_interleave=False)


def test_settings_of_hy3_that_transformers_does_not_read_are_checked():
    config = decode(sample("hy_v3"))
    for key in ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        assert decode(sample("hy_v3", **{key: True})) == config
        with pytest.raises(ed.ConversionError, match=key):
            decode(sample("hy_v3", **{key: False}))
