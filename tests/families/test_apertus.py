"""Apertus: without a word on rotary embeddings a file has those of Llama 3.1."""

from eqx_decoders.layers.rope import Llama3Rope
from tests.families.samples import decode, mixers, sample


def test_default_rotary_embedding():
    config = decode(sample("apertus", "rope_parameters", "rope_scaling", "rope_theta"))
    assert {mixer.rope for mixer in mixers(config)} == {Llama3Rope(theta=12e6)}
