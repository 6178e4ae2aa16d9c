"""Trinity: rotary embeddings, embeddings and dense layers."""

import eqx_decoders as ed
from eqx_decoders.families import moe
from eqx_decoders.layers.mask import Causal
from tests.families.samples import decode, mixers, sample, windows


def test_layers_with_windows_alone_have_rope():
    config = ed.get_config("trinity-nano-6b-a1b")
    assert [index for index, mixer in enumerate(mixers(config)) if mixer.rope is None] == list(range(3, 56, 4))
    assert all((mixer.rope is None) == (mixer.mask == Causal()) for mixer in mixers(config))
    assert windows("afmoe", 3, global_attn_every_n_layers=3) == [1024, 1024, None]


def test_embeddings_are_scaled_if_it_says_so():
    assert decode(sample("afmoe")).embedding_scale == 24**0.5
    assert decode(sample("afmoe", "mup_enabled")).embedding_scale == 1.0


def test_the_first_layers_have_no_experts():
    assert moe.sparse_layers(ed.get_config("trinity-large-398b-a13b")) == list(range(6, 60))
    assert moe.sparse_layers(decode(sample("afmoe", num_dense_layers=0))) == [0, 1, 2]
