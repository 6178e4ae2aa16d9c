"""GPT-NeoX: old names of rotary settings and tensors, and fused matrices that adapters cannot change by parts."""

import jax
import pytest

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from eqx_decoders.training.lora import LoRAConfig
from tests.families.samples import FIXTURES, decode, mixers, sample


def test_a_quarter_of_a_head_is_rotated_by_default():
    config = decode(sample("gpt_neox", "rope_parameters", "rotary_pct", "rotary_emb_base", hidden_size=32))
    assert (mixers(config)[0].rope.fraction, mixers(config)[0].rope.theta) == (0.25, 10_000.0)
    both = dict(rotary_pct=0.25, partial_rotary_factor=0.5)
    with pytest.raises(ed.ConversionError, match=r"rotary_pct=.*partial_rotary_factor="):
        decode(sample("gpt_neox", "rope_parameters", **both))


def test_masks_and_frequencies_of_old_files_are_ignored():
    config = decode(sample("gpt_neox"))
    for name in ("bias", "masked_bias", "rotary_emb.inv_freq"):
        assert FAMILIES["gpt_neox"].is_ignored(f"gpt_neox.layers.1.attention.{name}", config)
    assert not FAMILIES["gpt_neox"].is_ignored("gpt_neox.layers.1.attention.dense.bias", config)


def test_a_part_of_a_fused_matrix_has_no_adapter(tmp_path):
    model = ed.load_hf(FIXTURES / "gpt_neox_partial")
    model = ed.add_lora(model, LoRAConfig(rank=2, targets=("*.mixer.query",)), key=jax.random.key(0))
    with pytest.raises(ed.ConversionError, match=r"PEFT has no module for .*mixer\.query"):
        ed.save_peft(model, tmp_path / "new")
