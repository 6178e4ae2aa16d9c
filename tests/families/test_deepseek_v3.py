"""DeepSeek's layers of multi-token prediction, which stand behind the others in a checkpoint, read and written."""

import json
import pathlib
import shutil

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqx_decoders as ed
from eqx_decoders.io.huggingface.verify import compare_tensors
from eqx_decoders.model.init import with_mtp
from tests.compare import assert_array_equal, assert_close
from tests.models import filled


FIXTURE = pathlib.Path(__file__).parents[1] / "fixtures" / "deepseek3_groups"
OWN = {"enorm.weight": (24,), "hnorm.weight": (24,), "eh_proj.weight": (24, 48), "shared_head.norm.weight": (24,)}
COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


def written(folder: pathlib.Path, depths: int = 2, fixture=FIXTURE, **tensors) -> dict[str, np.ndarray]:
    """The fixture, which has two layers, with so many layers more in `folder`; None takes a tensor away."""
    shutil.copytree(fixture, folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": depths}
    (folder / "config.json").write_text(json.dumps(config))
    found, generator = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    for layer in range(2, 2 + depths):
        shapes = {name: found[f"model.layers.1.{name}"].shape for name in names_of(found, 1)} | OWN
        for name, shape in shapes.items():
            found[f"model.layers.{layer}.{name}"] = generator.normal(0.3, 0.3, shape).astype(np.float32)
        for name, other in COPIES.items():
            found[f"model.layers.{layer}.{name}"] = found[other]
    found = {name: x for name, x in (found | tensors).items() if x is not None}
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return found


def names_of(tensors, layer: int) -> list[str]:
    prefix = f"model.layers.{layer}."
    return [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]


@pytest.mark.slow
def test_depths_are_read_and_change_no_logit(tmp_path):
    tensors = written(tmp_path / "model")
    model = ed.load_hf(tmp_path / "model")
    mtp, expected = model.mtp, np.load(FIXTURE / "expected.npz")
    assert (mtp.config.num_depths, mtp.config.normed_stream) == (2, True)
    assert mtp.config.block == model.config.blocks[-1]
    for depth, layer in enumerate((2, 3)):
        own = mtp.unstacked()[depth]
        read = {
            "enorm.weight": own.embed_norm.scale,
            "hnorm.weight": own.stream_norm.scale,
            "eh_proj.weight": np.concatenate([own.embed_kernel.T, own.stream_kernel.T], axis=1),
            "shared_head.norm.weight": own.final_norm.scale,
            "input_layernorm.weight": own.block.pre_mixer_norm.scale,
            "mlp.experts.3.up_proj.weight": own.block.mlp.up[3].T,
            "mlp.gate.e_score_correction_bias": own.block.mlp.router.selection_bias,
            "self_attn.kv_b_proj.weight": own.block.mixer.kv_up.reshape(12, -1).T,
        }
        for name, got in read.items():
            assert_array_equal(got, tensors[f"model.layers.{layer}.{name}"])
    logits = eqx.filter_jit(model)(jnp.asarray(expected["input_ids"], jnp.int32)).logits
    assert_close(logits, expected["logits"])


@pytest.mark.slow
def test_depths_that_are_read_guess_and_change_no_token(tmp_path):
    written(tmp_path / "model")
    model, expected = ed.load_hf(tmp_path / "model"), np.load(FIXTURE / "expected.npz")
    prompt = jnp.asarray(expected["prompt_ids"], jnp.int32)
    new = ed.generate(model, prompt, max_new_tokens=expected["generated_ids"].shape[1], num_draft_tokens=1)
    assert_array_equal(new, expected["generated_ids"])


@pytest.mark.slow
def test_export_gives_every_tensor_back(tmp_path):
    tensors = written(tmp_path / "model")
    ed.save_hf(ed.load_hf(tmp_path / "model"), tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    for name, x in tensors.items():
        assert_array_equal(again[name], x)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["num_nextn_predict_layers"] == 2
    count, different = compare_tensors(tmp_path / "again")
    assert count > 0 and not different


@pytest.mark.slow
def test_layers_that_are_not_stored_are_not_there(tmp_path):
    """transformers leaves them out and the setting as it is; of what is stored nothing may lack."""
    names = names_of(written(tmp_path / "all", 1), 2)
    written(tmp_path / "none", 1, **{f"model.layers.2.{name}": None for name in names})
    assert ed.load_hf(tmp_path / "none").mtp is None
    assert ed.abstract_hf(tmp_path / "none").config == ed.abstract_hf(FIXTURE).config
    written(tmp_path / "bare", 1, **{f"model.layers.2.{name}": None for name in COPIES})
    assert ed.abstract_hf(tmp_path / "bare").mtp is not None
    written(tmp_path / "part", 1, **{"model.layers.2.eh_proj.weight": None})
    with pytest.raises(ed.ConversionError, match=r"model\.layers\.2\.eh_proj\.weight is missing"):
        ed.abstract_hf(tmp_path / "part")


def test_a_table_of_their_own_is_refused(tmp_path):
    written(tmp_path / "model", 1, **{"model.layers.2.embed_tokens.weight": np.ones((64, 24), np.float32)})
    with pytest.raises(ed.ConversionError, match=r"model\.layers\.2\.embed_tokens\.weight must hold the same"):
        ed.load_hf(tmp_path / "model")


def test_families_without_them_refuse_them(tmp_path):
    model = filled(with_mtp(ed.abstract_hf(FIXTURE.parent / "llama_rope").config, 1))
    with pytest.raises(ed.ConversionError, match="mtp"):
        ed.save_hf(model, tmp_path / "model", family="llama")
    ed.save_hf(model.without_mtp(), tmp_path / "model", family="llama")
