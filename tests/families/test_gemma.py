"""Gemma: scales stored as w - 1, the embeddings' scale, and an activation that is called gelu and is not."""

import eqx_decoders as ed
from eqx_decoders.layers.norm import RMSNormConfig
from tests.families.samples import decode, sample


def test_gelu_means_its_tanh_approximation():
    for keys in (dict(hidden_act="gelu"), dict(hidden_act="gelu_pytorch_tanh"), dict(hidden_activation="relu")):
        config = decode(sample("gemma", "hidden_act", "hidden_activation") | keys)
        assert {block.mlp.activation for block in config.blocks} == {"gelu_tanh"}


def test_norms_and_embeddings_of_published_models():
    for name, width, kv_heads in (("gemma-2b", 2048, 1), ("gemma-7b", 3072, 16)):
        config = ed.get_config(name)
        (block,) = set(config.blocks)
        assert (config.embedding_scale, config.tied) == (width**0.5, True)
        assert block.pre_mixer_norm == block.pre_mlp_norm == config.final_norm == RMSNormConfig(eps=1e-6, offset=1.0)
        assert block.post_mixer_norm is block.post_mlp_norm is None
        assert (block.mixer.num_kv_heads, block.mixer.head_dim, block.mixer.query_scale) == (kv_heads, 256, None)
