"""ModernBERT's decoder: half of the window, and the first layer, which has no norm before its attention."""

import dataclasses

import pytest

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from eqx_decoders.io.huggingface.export import TOKEN_IDS, export_plan
from eqx_decoders.model.provenance import Provenance
from tests.families.samples import decode, mixers, sample


KIND, WINDOWS = "modernbert-decoder", ("layer_types", "sliding_window", "local_attention", "global_attn_every_n_layers")


def windows(layers, **keys):
    config = decode(sample(KIND, *WINDOWS, num_hidden_layers=layers, **keys))
    return [getattr(mixer.mask, "size", None) for mixer in mixers(config)]


def test_a_window_is_half_of_what_the_encoder_sees():
    assert windows(4) == [None, 64, 64, None]
    assert windows(4, local_attention=15, global_attn_every_n_layers=2) == [None, 7, None, 7]
    with pytest.raises(ed.ConversionError, match=r"sliding_window=6.*7"):
        windows(4, local_attention=15, sliding_window=6)


def test_the_first_layer_reads_the_norm_of_the_embedding():
    config = decode(sample(KIND))
    assert [block.pre_mixer_norm is None for block in config.blocks] == [True, False, False]
    assert config.embedding_norm == config.blocks[1].pre_mixer_norm == config.head_transform.norm


def test_each_switch_of_the_head_is_read():
    content = sample(KIND, classifier_bias=False, decoder_bias=False, classifier_activation="relu")
    config = decode(content)
    assert (config.head_bias, config.head_transform.bias, config.head_transform.activation) == (False, False, "relu")
    assert FAMILIES[KIND].encode(config).items() >= {"decoder_bias": False, "classifier_bias": False}.items()


def test_ettin_turns_near_and_far_keys_alike():
    config = ed.get_config("ettin-17m")
    assert {mixer.rope.theta for mixer in mixers(config)} == {160_000.0}
    assert [getattr(mixer.mask, "size", None) for mixer in mixers(config)] == [None, 64, 64, None, 64, 64, None]
    assert FAMILIES[KIND].decode(FAMILIES[KIND].encode(config))[0] == config


@pytest.mark.slow(fast=("50368-50283-50281",))
@pytest.mark.parametrize("vocab_size, padding, begin", [(50_368, 50_283, 50_281), (64, 63, 63)])
def test_an_export_has_the_token_ids_that_transformers_needs(vocab_size, padding, begin):
    """Of a new model, and of one whose source has null."""
    config = decode(sample(KIND, vocab_size=vocab_size))
    new = ed.abstract(config)
    nulls = Provenance(family=KIND, settings='{"pad_token_id": null, "bos_token_id": null}')
    for model in (new, dataclasses.replace(new, origin=nulls)):
        written = export_plan(model, family=KIND)[1]
        assert [written[key] for key in TOKEN_IDS] == [begin, None, padding]
    assert export_plan(new, family=KIND, settings={"pad_token_id": 7})[1]["pad_token_id"] == 7
