"""Llama 4: the temperature of queries, and files that say they have a vision encoder."""

import json

import pytest

import eqx_decoders as ed
from eqx_decoders.io.huggingface.load import read_config
from tests.families.samples import decode, mixers, sample


def test_a_temperature_may_be_given_as_a_number():
    """Scout was published with 4."""
    on, off = (mixers(decode(sample("llama4_text", attn_temperature_tuning=number))) for number in (4, 0))
    assert {mixer.temperature for mixer in off} == {None}
    assert mixers(decode(sample("llama4_text"))) == on != off


def test_text_may_stand_inside_of_a_model_that_sees(tmp_path):
    text = sample("llama4_text")
    content = dict(architectures=["Llama4ForConditionalGeneration"], model_type="llama4", text_config=text)
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert read_config(tmp_path, text_only=True)[0] == decode(text)
    with pytest.raises(ed.ConversionError, match="vision_config is missing"):
        read_config(tmp_path)
