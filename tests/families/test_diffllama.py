"""DiffLlama: what no file holds, and heads that make no pairs."""

import equinox as eqx
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.sharding.axes import named_leaves
from tests.families.samples import FIXTURES, decode, sample


NUMBER = "segments.0.unit.0.mixer.layer_number"


def test_numbers_of_layers_are_computed_and_never_lost(tmp_path):
    model = ed.load_hf(FIXTURES / "diffllama")
    assert named_leaves(model)[NUMBER].ravel().tolist() == [0, 1, 2]
    other = eqx.tree_at(lambda model: model.segments[0].unit[0].mixer.layer_number, model, replace_fn=lambda x: x + 1)
    with pytest.raises(ed.ConversionError, match=rf"{NUMBER} must be what follows from the configuration"):
        ed.save_hf(other, tmp_path / "other")


@pytest.mark.slow
def test_numbers_of_layers_on_a_mesh():
    model = ed.load_hf(FIXTURES / "diffllama", layout=ed.Layout.create(fsdp=4, tensor=2))
    assert np.asarray(named_leaves(model)[NUMBER]).ravel().tolist() == [0, 1, 2]


def test_odd_key_heads_are_refused():
    content = sample("diffllama") | dict(num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(ed.ConversionError, match="num_key_value_heads=3"):
        decode(content)
