"""GLM-4.1V and GLM-4.5V against transformers, with file round trips, and videos whose frames are encoded as images."""

import functools
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

import eqx_decoders as ed
from eqx_decoders.encoders.images import from_pixels, learned_positions
from eqx_decoders.encoders.stem import LearnedGrid, PatchStemConfig
from eqx_decoders.families.registry import FAMILIES
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused
from tests.families.samples import FIXTURES, decode


NAMES = ("glm4v", pytest.param("glm4v_moe", marks=pytest.mark.slow))
WEIGHTS = "model.safetensors"


def content_of(directory) -> dict:
    return json.loads((directory / "config.json").read_text())


@functools.cache
def model_and_arrays(name):
    """Return a model, the inputs of transformers' forward pass, and its results."""
    arrays = dict(np.load(FIXTURES / name / "media.npz"))
    inputs = {key.removeprefix("inputs/"): x for key, x in arrays.items() if key.startswith("inputs/")}
    return ed.load_hf(FIXTURES / name), inputs, arrays


@pytest.mark.parametrize("name", NAMES)
def test_features_logits_and_positions_match_transformers(name):
    model, inputs, wanted = model_and_arrays(name)
    media = ed.Media.create(model.config, **inputs)
    features = model.encode(media).features[: len(wanted["features"])]
    assert_allclose(features, wanted["features"], atol=1e-4)
    assert_allclose(model(inputs["input_ids"], media=media).logits, wanted["logits"], atol=5e-4)
    assert np.array_equal(media.rope_positions, wanted["rope_positions"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_match_transformers(name):
    model, inputs, wanted = model_and_arrays(name)
    ids, media, count = inputs["input_ids"], ed.Media.create(model.config, **inputs), wanted["generated_ids"].shape[1]
    assert np.array_equal(
        ed.generate(model, ids, media=media, max_new_tokens=count, sampler=ed.Greedy()), wanted["generated_ids"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_export_is_bit_equal(name, tmp_path):
    directory, model = FIXTURES / name, model_and_arrays(name)[0]
    ed.save_hf(model, tmp_path / "new")
    before, after = (load_file(folder / WEIGHTS) for folder in (directory, tmp_path / "new"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    old, new = content_of(directory), content_of(tmp_path / "new")
    assert decode(new) == model.config and new["video_token_id"] == old["video_token_id"]


@pytest.mark.slow
@pytest.mark.parametrize("name, plain", [("glm4v", "glm4"), ("glm4v_moe", "glm4_moe")])
def test_decoder_without_encoders_belongs_to_the_text_family(name, plain, tmp_path):
    whole, text = model_and_arrays(name)[0], ed.load_hf(FIXTURES / name, text_only=True)
    ids = np.arange(1, 9)[None]
    assert_array_equal(text(ids).logits, whole(ids).logits)
    ed.save_hf(text, tmp_path / "new")
    assert content_of(tmp_path / "new")["model_type"] == plain
    assert ed.load_hf(tmp_path / "new").config == text.config


def test_video_frames_are_encoded_as_images():
    config, (image, *_) = decode(content_of(FIXTURES / "glm4v")), [53]
    numbers = np.random.default_rng(0).normal(size=(3 * 8 + 2 * 4, 24)).astype(np.float32)
    ids = [[1, *[image] * 2, 2, *[image] * 2, 3, *[image] * 2, 4, image, 5, image]]
    frames = [(1, 2, 4)] * 3 + [(1, 2, 2)] * 2
    alone = ed.Media.create(config, ids, pixel_values=numbers, image_grid_thw=frames)
    video = ed.Media.create(config, ids, pixel_values_videos=numbers, video_grid_thw=[(3, 2, 4), (2, 2, 2)])
    assert_array_equal(alone.grid_positions, video.grid_positions)
    assert alone.images is not None and video.images is not None
    for name in ("patches", "positions", "coordinates", "position_index", "position_weights"):
        assert_array_equal(getattr(alone.images, name), getattr(video.images, name))
    with refused(ed.DataError, "images", "videos"):
        both = dict(pixel_values_videos=numbers, video_grid_thw=[(3, 2, 4), (2, 2, 2)])
        ed.Media.create(config, ids, pixel_values=numbers, image_grid_thw=frames, **both)


def dense(rows, columns):
    """Return the interpolation weights of all patches as arrays over the 4 x 4 position table."""
    stem = PatchStemConfig(size=1, positions=LearnedGrid(side=4, resample="bicubic"))
    (image,) = from_pixels(stem, np.ones((1, 3, rows, columns), np.float32))
    found = learned_positions(stem, image)
    assert found is not None and found[0].shape == (rows * columns, 16)
    weights = np.zeros((rows * columns, 16))
    np.add.at(weights, (np.arange(rows * columns)[:, None], found[0]), found[1])
    return weights.reshape(rows, columns, 4, 4)


def test_positions_are_interpolated_bicubically():
    """Cubic convolution with a = -0.75 over 16 positions. Beyond the border, border values are used."""
    assert_allclose(dense(4, 4).reshape(16, 16), np.eye(16), atol=1e-6)
    # halfway between two rows, the weights are 0.59375 for the near rows and -0.09375 for the far rows
    rows = np.array([[0.5, 0.59375, -0.09375, 0], [0, -0.09375, 0.59375, 0.5]])
    assert_allclose(dense(2, 4), np.einsum("ri,cj->rcij", rows, np.eye(4)), atol=1e-6)


PARAMETERS = {"glm4.1v-9b": 10_292_777_472, "glm4.5v-106b-a12b": 107_710_933_120}
PARAMETERS |= {"glm4.6v-flash-9b": PARAMETERS["glm4.1v-9b"], "glm4.6v-106b-a12b": PARAMETERS["glm4.5v-106b-a12b"]}
KINDS = dict(zip(PARAMETERS, ("glm4v", "glm4v_moe", "glm46v", "glm46v"), strict=True))


@pytest.mark.slow(fast=("glm4.1v-9b-glm4v", "glm4.5v-106b-a12b-glm4v_moe"))
@pytest.mark.parametrize("name, kind", KINDS.items())
def test_published_models(name, kind):
    config = ed.get_config(name)
    assert ed.count_parameters(config) == PARAMETERS[name]
    assert decode(FAMILIES[kind].encode(config)) == config


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_glm46v_uses_either_decoder(name, tmp_path):
    """Its files have the same tensors. The inner model_type selects the decoder."""
    content = content_of(FIXTURES / name) | dict(model_type="glm46v", architectures=["Glm46VForConditionalGeneration"])
    (tmp_path / "config.json").write_text(json.dumps(content))
    shutil.copy(FIXTURES / name / WEIGHTS, tmp_path)
    model = ed.load_hf(tmp_path)
    assert model.config == model_and_arrays(name)[0].config
    ed.save_hf(model, tmp_path / "new")
    again = content_of(tmp_path / "new")
    assert again["model_type"] == "glm46v" and decode(again) == model.config
    assert again["text_config"]["model_type"] == f"{name}_text"
    names = load_file(tmp_path / "new" / WEIGHTS)
    fused = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    assert (fused in names) == (name == "glm4v_moe")  # transformers accepts only these under this name
    assert ed.load_hf(tmp_path / "new").config == model.config


def test_legacy_settings_are_equivalent():
    """The first files have the settings of the decoder at the top level, next to the encoder's object."""
    content = FAMILIES["glm4v"].encode(ed.get_config("glm4.1v-9b"))
    text = {key: x for key, x in content["text_config"].items() if key not in ("rope_parameters", "model_type")}
    rope = {"rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}, "partial_rotary_factor": 0.5}
    outer = {key: x for key, x in content.items() if key != "text_config"}
    assert decode({**text, **outer, **rope, "attention_bias": True}) == ed.get_config("glm4.1v-9b")
