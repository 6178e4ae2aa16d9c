"""DeepSeek-V4: kinds of layers, their rotary embeddings and the experts of token ids, in new and old spellings."""

import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from eqx_decoders.families.deepseek_v4 import CHOSEN, HEAVY, SLIDING
from eqx_decoders.layers.rope import Rope, YarnRope
from tests.families.samples import FIXTURES, decode, mixers, sample


KIND = "deepseek_v4"


def kinds(**keys) -> list[str]:
    config = decode(sample(KIND, "layer_types", "compress_rates", "mlp_layer_types", num_hidden_layers=4, **keys))
    assert FAMILIES[KIND].decode(FAMILIES[KIND].encode(config))[0] == config
    return [
        f"{0 if mixer.compression is None else mixer.compression.size}{'' if mixer.indexer is None else ' chosen'}"
        for mixer in mixers(config)
    ]


def test_kinds_of_layers_are_listed_or_follow_from_ratios():
    assert kinds(layer_types=[SLIDING, CHOSEN, HEAVY, CHOSEN]) == ["0", "4 chosen", "128", "4 chosen"]
    assert kinds(compress_ratios=[0, 4, 128, 0, 0]) == ["0", "4 chosen", "128", "0"]
    assert kinds() == ["128", "128", "128", "4 chosen"]
    rates = {CHOSEN: 2, HEAVY: 6}
    assert kinds(compress_rates=rates) == kinds(compress_rate_csa=2, compress_rate_hca=6) == ["6", "6", "6", "2 chosen"]


def test_layers_without_compressed_keys_have_a_rotary_embedding_of_their_own():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    old = sample(KIND, "rope_parameters", rope_scaling=yarn, rope_theta=7.0, compress_rope_theta=8.0)
    for content in (old, FAMILIES[KIND].encode(decode(old))):
        first, second, _ = (mixer.rope for mixer in mixers(decode(content)))
        assert first == Rope(theta=7.0, pairing="interleaved")
        assert isinstance(second, YarnRope) and second.theta == 8.0 and second.magnitude == 1.0


@pytest.mark.slow
def test_experts_of_token_ids_are_listed_or_counted():
    def hashed(**keys) -> list[bool]:
        content = sample(KIND, "mlp_layer_types", **keys)
        return [block.mlp.router.hashed_tokens is not None for block in decode(content).blocks]

    assert hashed() == [True] * 3 and hashed(num_hash_layers=2) == [True, True, False]
    assert hashed(mlp_layer_types=["moe", "hash_moe", "moe"]) == [False, True, False]
    model = ed.load_hf(FIXTURES / KIND, dtype="bfloat16")
    routers = [block.mlp.router for segment in model.segments for block in segment.unit]
    (table,) = (router.table for router in routers if router.table is not None)
    assert table.dtype == np.int32 and set(np.unique(table)) == {0, 1, 2, 3}
    with pytest.raises(ed.ConfigError, match="not with model"):
        model(embeds=model.embed_tokens(np.ones((1, 2), np.int32)))


def test_what_is_not_implemented_is_refused():
    for keys in (dict(n_shared_experts=2), dict(num_key_value_heads=2), dict(norm_topk_prob=False)):
        with pytest.raises(ed.ConversionError, match=next(iter(keys))):
            decode(sample(KIND, **keys))
