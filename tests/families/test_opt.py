"""OPT: where the norms stand, and an embedding that is narrower than the stream."""

import eqx_decoders as ed
from eqx_decoders.blocks.residual.residual import PostNorm
from eqx_decoders.families import FAMILIES
from eqx_decoders.layers.norm import LayerNormConfig
from tests.families.samples import decode, sample


def narrow(*missing, **keys):
    return decode(sample("opt", *missing, do_layer_norm_before=False, word_embed_proj_dim=16, **keys))


def test_norms_stand_before_layers_or_behind_sums():
    before, behind = decode(sample("opt")), narrow()
    assert before.final_norm == before.blocks[0].pre_mlp_norm == LayerNormConfig()
    assert behind.final_norm is behind.blocks[0].pre_mlp_norm is None
    assert behind.residual == PostNorm(norm=LayerNormConfig(eps=1e-5))
    assert narrow("layer_norm_elementwise_affine") == behind
    bare = narrow(layer_norm_elementwise_affine=False).residual
    assert bare == PostNorm(norm=LayerNormConfig(scale=False, bias=False))


def test_the_last_norm_may_be_missing():
    config = decode(sample("opt", _remove_final_layer_norm=True))
    assert config.final_norm is None and FAMILIES["opt"].encode(config)["_remove_final_layer_norm"]
    assert not FAMILIES["opt"].encode(narrow(_remove_final_layer_norm=True))["_remove_final_layer_norm"]


def test_the_embedding_may_be_narrower():
    assert (narrow().embedding_rank, narrow().head_features) == (16, 16)
    same = decode(sample("opt", word_embed_proj_dim=None))
    assert same == decode(sample("opt", word_embed_proj_dim=24)) and same.embedding_rank is same.head_transform is None
    config = ed.get_config("opt-350m")
    assert FAMILIES["opt"].decode(FAMILIES["opt"].encode(config))[0] == config
