"""GLM: its biases, multi-token prediction that is stored as DeepSeek's, and adapters of its fused MLPs."""

import dataclasses
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from eqx_decoders.training.lora_config import LoRAConfig
from tests.adapters import trained
from tests.compare import assert_array_equal
from tests.families.samples import decode, mixers, sample
from tests.families.test_deepseek_v3 import written


FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"


@pytest.mark.parametrize("kind", ["glm", "glm4", "glm4_moe", "solar_open"])
def test_the_output_of_attention_never_has_a_bias(kind):
    config = decode(sample(kind, attention_bias=True))
    assert all(mixer.qkv_bias and not mixer.out_bias for mixer in mixers(config))
    mixer = dataclasses.replace(config.blocks[0].mixer, out_bias=True)
    blocks = tuple(dataclasses.replace(block, mixer=mixer) for block in config.blocks)
    with pytest.raises(ed.ConversionError, match="out_bias"):
        FAMILIES[kind].encode(dataclasses.replace(config, blocks=blocks))


def test_pairs_are_neighbors_in_dense_models_only():
    pairing = {kind: mixers(decode(sample(kind)))[0].rope.pairing for kind in ("glm", "glm4", "glm4_moe")}
    assert pairing == {"glm": "interleaved", "glm4": "interleaved", "glm4_moe": "half"}


@pytest.mark.slow
def test_multi_token_prediction_is_read_and_written(tmp_path):
    tensors = written(tmp_path / "model", 1, FIXTURES / "glm4_moe")
    model = ed.load_hf(tmp_path / "model")
    assert model.mtp.config.block == model.config.blocks[-1]
    kernels = [getattr(model.mtp.unstacked()[0], f"{kind}_kernel").T for kind in ("embed", "stream")]
    assert_array_equal(np.concatenate(kernels, axis=1), tensors["model.layers.2.eh_proj.weight"])
    ed.save_hf(model, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(np.array_equal(again[name], x) for name, x in tensors.items())


def test_adapters_of_fused_mlps_are_whole(tmp_path):
    model = trained(ed.load_hf(FIXTURES / "glm4"), LoRAConfig(rank=2, targets=("*.gate_up",)))
    ed.save_peft(model, tmp_path)
    shapes = {name: x.shape for name, x in load_file(tmp_path / "adapter_model.safetensors").items()}
    module = "base_model.model.model.layers.{}.mlp.gate_up_proj.lora_{}.weight"
    assert shapes == {
        module.format(layer, letter): shape for layer in (0, 1) for letter, shape in (("A", (2, 24)), ("B", (80, 2)))
    }
