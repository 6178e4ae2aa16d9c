"""Qwen 4 Exp: which layers find n-grams, numbers of hashes in files, ends of texts, and what is refused."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from tests.families.samples import FIXTURES, decode, mixers, sample


KIND = "qwen4_exp_text"


def engrams(config) -> dict:
    return {index: extra.layer for index, block in enumerate(config.blocks) for extra in block.pre_layers}


def test_layers_are_named_in_both_ways_and_by_a_period():
    words = ("indexed_attention", "full_attention")
    both = [decode(sample(KIND, layer_types=["linear_attention", word])) for word in words]
    assert both[0] == both[1] and mixers(both[0])[1].selection.top_k == 2
    config = decode(sample(KIND, "layer_types", num_hidden_layers=4))
    assert [hasattr(mixer, "selection") for mixer in mixers(config)] == [False, False, False, True]


def test_layers_of_ngrams_are_counted_from_one_and_end_where_texts_do():
    config = decode(sample(KIND, ple_layer_ids=[2, 1], eos_token_id=[7, 3]))
    assert list(engrams(config)) == [0, 1]
    first, second = engrams(config).values()
    assert (first.layers, first.layer, second.layer, first.end_token, first.pad_token) == ((0, 1), 0, 1, 7, 7)
    assert FAMILIES[KIND].encode(config)["ple_layer_ids"] == [1, 2]
    assert not engrams(decode(sample(KIND, ple_layer_ids=[]))) and not engrams(decode(sample(KIND, ple_layer_ids=None)))


@pytest.mark.slow
def test_several_ends_stay_in_an_export(tmp_path):
    shutil.copytree(FIXTURES / "qwen4_exp", tmp_path / "model")
    content = json.loads((tmp_path / "model" / "config.json").read_text()) | {"eos_token_id": [2, 5]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(content))
    ed.save_hf(ed.load_hf(tmp_path / "model"), tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["eos_token_id"] == [2, 5]


def test_of_files_with_an_encoder_the_decoder_is_read(tmp_path):
    shutil.copytree(FIXTURES / "qwen4_exp", tmp_path / "model")
    inner = json.loads((tmp_path / "model" / "config.json").read_text())
    outer = {"model_type": "qwen4_exp", "architectures": ["Qwen4ExpForConditionalGeneration"], "image_token_id": 60}
    outer |= {"text_config": inner, "vision_config": {"model_type": "qwen4_exp", "depth": 27}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(outer))
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model."): x for name, x in tensors.items()}
    tensors |= {"model.visual.pos_embed.weight": np.zeros((4, 2)), "mtp.fc_hidden.weight": np.zeros((2, 2))}
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    assert ed.abstract_hf(tmp_path / "model").config == decode(sample(KIND))


def test_other_numbers_of_hashes_are_refused(tmp_path):
    shutil.copytree(FIXTURES / "qwen4_exp", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    name = "model.layers.0.ple.ple_embedding.layer_multipliers"
    assert tensors[name].dtype == np.int64 and tensors[name].min() > 2**53  # a float would not hold them
    tensors[name][0] += 2
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ed.ConversionError, match="layer_multipliers must hold the numbers that follow from config"):
        ed.abstract_hf(tmp_path / "model")


@pytest.mark.parametrize(
    "keys, sentence",
    [
        (dict(ple_layer_ids=[0]), r"ple_layer_ids=\[0\] must be numbers of layers from 1 to 2"),
        (dict(eos_token_id=None), "eos_token_id is missing"),
        (dict(ple_embed_dim=10), r"ple_embed_dim=10 must be a multiple of .*=4"),
        (dict(indexer_budget=7), "indexer_budget=7 must be a multiple of indexer_compress_ratio=3"),
        (dict(indexer_kv_heads=2), "indexer_kv_heads=2"),
        (dict(output_gate_type="tanh"), "output_gate_type=tanh is not known"),
        (dict(split_ngram_parts=7), "table_parts=7 must divide the rows"),
    ],
    ids=str,
)
def test_what_is_not_there_is_refused(keys, sentence):
    with pytest.raises(ed.ConversionError, match=sentence):
        decode(sample(KIND, **keys))
