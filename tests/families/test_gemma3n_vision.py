"""Gemma 3n with images and audio against transformers and timm: settings, tensors, and padding of clips."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import eqx_decoders as ed
from eqx_decoders.context import ForwardContext
from eqx_decoders.encoders.audio.frame_stem import CumulativeNormConfig
from eqx_decoders.encoders.common_shapes import array_shapes, merge_shapes, pad_to_shapes
from eqx_decoders.families.gemma.mobilenet import (
    EdgeResidualConfig,
    InvertedResidualConfig,
    MobileNetConfig,
    PlaneAttentionConfig,
    build_depthwise,
)
from eqx_decoders.families.gemma.mobilenet_config import architectures
from eqx_decoders.families.registry import FAMILIES
from eqx_decoders.planning.traced_memory import abstract_media
from eqx_decoders.serving.engine.multimodal_prefill import with_rounded_rows
from eqx_decoders.sharding.rules import WEIGHTS
from tests.compare import assert_allclose
from tests.errors import refused
from tests.families.samples import FIXTURES, decode


DIRECTORY = FIXTURES / "gemma3n_vision"
ARRAYS = dict(np.load(DIRECTORY / "media.npz"))
INPUTS = {name.removeprefix("inputs/"): x for name, x in ARRAYS.items() if name.startswith("inputs/")}
IDS = INPUTS["input_ids"]
CONTENT = json.loads((DIRECTORY / "config.json").read_text())
IMAGE, AUDIO = CONTENT["image_token_id"], CONTENT["audio_token_id"]
ARGS = CONTENT["vision_config"]["model_args"]


@pytest.fixture(scope="module")
def model():
    return ed.load_hf(DIRECTORY, attention="dot")


def changed(part: str, **keys) -> dict:
    return CONTENT | {part: CONTENT[part] | keys}


# --- comparison with transformers ---


@pytest.mark.slow
def test_logits_match_transformers(model):
    """With images, audio, tokens from the vocabularies of the encoders, and clips padded with a special token."""
    media = ed.Media.create(model.config, **INPUTS)
    assert_allclose(model(IDS, media=media).logits, ARRAYS["logits"], atol=1e-4)


@pytest.mark.slow
def test_features_and_greedy_tokens_match_transformers(model):
    media, count = ed.Media.create(model.config, **INPUTS), ARRAYS["generated_ids"].shape[1]
    features = np.asarray(model.encode(media).features)[: len(ARRAYS["features"])]
    assert_allclose(features, ARRAYS["features"], atol=2e-5)
    made = ed.generate(model, IDS, media=media, max_new_tokens=count, sampler=ed.Greedy(), stop_ids=())
    assert np.array_equal(made, ARRAYS["generated_ids"])


@pytest.mark.slow
def test_images_and_audio_of_other_rows_have_no_effect(model):
    """Rows with only images or only audio, also with other lengths."""
    of_audio = {name: INPUTS[name] for name in ("input_features", "input_features_mask")}
    media = ed.Media.create(model.config, IDS[1:], **of_audio)
    assert_allclose(model(IDS[1:], media=media).logits, ARRAYS["logits"][1:], atol=1e-4)
    media = ed.Media.create(model.config, IDS[:1], pixel_values=INPUTS["pixel_values"])
    assert_allclose(model(IDS[:1], media=media).logits, ARRAYS["logits"][:1], atol=1e-4)


@pytest.mark.slow
def test_padded_media_arrays_give_equal_features(model):
    """As in a run with several processes, or in an engine. Audio clips are still padded by their special token."""
    media, count = ed.Media.create(model.config, **INPUTS), len(ARRAYS["features"])
    long = dict(input_features=np.zeros((3, 40, 6)), input_features_mask=np.ones((3, 40)))
    other = ed.Media.create(model.config, np.full((1, 15), AUDIO), **long)
    shapes = merge_shapes([array_shapes(media), array_shapes(other)])
    shapes["images"]["patches"][0][1] += 1
    for name in ("positions", "coordinates"):
        shapes["images"][name][0][1] += 1
    for again in (pad_to_shapes(media, shapes), with_rounded_rows(media)):
        features = np.asarray(model.encode(again).features)[:count]
        assert_allclose(features, ARRAYS["features"], atol=2e-5)


@pytest.mark.slow
def test_export_is_bit_equal(tmp_path):
    model = ed.load_hf(DIRECTORY, dtype=None)
    ed.save_hf(model, tmp_path / "new")
    before, after = (load_file(folder / "model.safetensors") for folder in (DIRECTORY, tmp_path / "new"))
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    new = json.loads((tmp_path / "new" / "config.json").read_text())
    assert decode(new) == decode(CONTENT) == model.config
    assert new["boa_token_id"] == CONTENT["boa_token_id"]
    for part in ("vision_config", "audio_config"):
        for key, value in new[part].items():
            assert CONTENT[part].get(key, value) == value or key == "model_args", key
    blocks = zip(new["vision_config"]["model_args"]["block_args"], ARGS["block_args"], strict=True)
    assert [[one | other for one, other in zip(*each, strict=True)] for each in blocks] == ARGS["block_args"]


def test_decoder_without_encoders(model):
    text = ed.abstract_hf(DIRECTORY, text_only=True)
    assert text.config == dataclasses.replace(model.config, media=None)
    assert text.origin.family == "gemma3n_text"


@pytest.mark.slow
def test_execution_options_do_not_change_the_result(model):
    """With and without scan and remat, and with sharded rows and heads."""
    for options in (dict(scan=False), dict(remat="full")):
        media = ed.Media.create(model.config, **INPUTS)
        assert_allclose(
            model.replace(**options)(IDS, media=media).logits, ARRAYS["logits"], atol=1e-4, err_msg=str(options)
        )
    placed = model.place(ed.Layout.create(data=2, fsdp=2, tensor=2, weights=WEIGHTS | {"kv_heads": ()}))
    media = ed.Media.create(model.config, **INPUTS)
    assert_allclose(placed(IDS, media=media).logits, ARRAYS["logits"], atol=2e-4)


@pytest.mark.slow
def test_decoding_accepts_tokens_of_the_encoder_vocabularies(model):
    """One token at a time."""
    ids = np.asarray([[3, 52, 54, 58, 56, 7]], np.int32)
    whole = model(ids).logits
    cache = ed.init_cache(model.config, 1, 8, dtype=jnp.float32)
    for index in range(ids.shape[1]):
        out = model(ids[:, index : index + 1], cache=cache)
        cache = out.cache
        assert_allclose(out.logits[:, 0], whole[:, index], atol=1e-5)


# --- layers ---


def test_cumulative_norm_restarts_at_each_clip():
    x, first = np.random.default_rng(0).normal(size=(1, 5, 3, 2)).astype(np.float32), np.asarray([[1, 0, 0, 1, 0]]) > 0
    norm = dataclasses.replace(CumulativeNormConfig(eps=0.1).build(2), scale=jnp.asarray([0.5, 2.0]))
    found = eqx.filter_jit(norm)(jnp.asarray(x), first)
    for begin, end in ((0, 3), (3, 5)):
        squares = []
        for frame in range(begin, end):
            mean = x[0, begin : frame + 1].mean()
            squares.append(np.square(x[0, frame] - mean).mean())
            wanted = (x[0, frame] - mean) / np.sqrt(np.mean(squares) + 0.1) * [0.5, 2.0]
            assert_allclose(found[0, frame], wanted, atol=1e-5)


@pytest.mark.slow(fast=("same-0",))
@pytest.mark.parametrize("edges, before", [("same", 0), ("equal", 1)])
def test_convolution_pads_after_the_image_or_on_both_sides(edges, before):
    layer = build_depthwise(2, 3, stride=2, edges=edges, key=jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(1, 4, 4, 2)).astype(np.float32)
    wide = np.pad(x[0], ((before, 2), (before, 2), (0, 0)))
    places = [(row, column) for row in (0, 2) for column in (0, 2)]
    windows = np.stack([wide[row : row + 3, column : column + 3] for row, column in places])
    wanted = np.einsum("prcf,rcf->pf", windows, np.asarray(layer.kernel)).reshape(1, 2, 2, 2)
    assert_allclose(layer(jnp.asarray(x)), layer.norm(jnp.asarray(wanted)), atol=1e-5)


@pytest.mark.slow
def test_attention_over_pixels_matches_the_formula():
    config = PlaneAttentionConfig(dim=6, num_heads=2, head_dim=3)
    block = config.build(6, edges="same", layer_scale=0.5, key=jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(1, 2, 3, 6)).astype(np.float32)
    rows = x.reshape(6, 6)
    normed = rows / np.sqrt(np.square(rows).mean(-1, keepdims=True) + 1e-6)
    query, key, value, out = (np.asarray(getattr(block, name)) for name in ("query", "key", "value", "out"))
    wanted = np.zeros((6, 6))
    for head in range(2):
        scores = normed @ query[:, head] @ (normed @ key).T / np.sqrt(3)
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        wanted += weights @ (normed @ value) @ out[head]
    found = block(jnp.asarray(x), ForwardContext(positions=jnp.zeros((1, 6), jnp.int32)))
    assert_allclose(found, x + 0.5 * wanted.reshape(x.shape), atol=1e-5)


@pytest.mark.slow
def test_gradients_reach_every_weight_of_the_encoders(model):
    media = ed.Media.create(model.config, **INPUTS)
    wanted = jnp.asarray(ARRAYS["logits"])
    loss = eqx.filter_jit(eqx.filter_grad(lambda model: jnp.mean(jnp.abs(model(IDS, media=media).logits - wanted - 1))))
    for part in ("vision", "audio"):
        for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(loss(model), part)):
            assert bool(jnp.all(jnp.isfinite(leaf))) and float(jnp.max(jnp.abs(leaf))) > 0, path


# --- settings ---


@pytest.mark.slow
def test_published_settings():
    """Files without explicit settings; and the parameter count of the published network in timm."""
    config = ed.get_config("gemma3n-e4b-vision")
    written = FAMILIES["gemma3n"].encode(config)
    assert written["vision_config"]["model_args"] is None
    parts = dict(vision_config={}, audio_config={})
    again = {key: written[key] for key in ("model_type", "architectures", "text_config")} | parts
    assert decode(again) == decode(written) == config
    model = eqx.filter_eval_shape(config.media.vision.stem.build, 2048, key=jax.random.key(0))
    network = sum(leaf.size for leaf in jax.tree.leaves(model))
    assert network == 294_126_912
    base = decode(written | {"vision_config": {"architecture": "mobilenetv5_base"}}).media.vision.stem
    assert base == architectures()["mobilenetv5_base"] != architectures()["mobilenetv5_300m"]


def test_settings_of_another_network_round_trip():
    stages = (
        (EdgeResidualConfig(dim=16, kernel=5, stride=2, expansion=1.5), EdgeResidualConfig(dim=16)),
        (
            InvertedResidualConfig(dim=24, start=3, stride=2),
            PlaneAttentionConfig(dim=24, num_heads=3, head_dim=4, kernel=5),
        ),
    )
    network = MobileNetConfig(
        stem_dim=8, stages=stages, fused=(1,), side=2, channels=1, edges="equal", layer_scale=None
    )
    config = decode(CONTENT)
    vision = dataclasses.replace(config.media.vision, stem=network)
    config = dataclasses.replace(config, media=dataclasses.replace(config.media, vision=vision))
    assert decode(json.loads(json.dumps(FAMILIES["gemma3n"].encode(config)))) == config
    assert ed.DecoderConfig.from_json(config.to_json()) == config


# --- arrays ---


def created(**given):
    whole = dict(input_ids=np.asarray([[*[IMAGE] * 4, *[AUDIO] * 5]]), pixel_values=np.zeros((1, 3, 16, 16)))
    whole |= dict(input_features=np.zeros((1, 40, 6)), input_features_mask=np.ones((1, 40)))
    return ed.Media.create(decode(CONTENT), **whole | given)


REFUSED = {
    "wide": (dict(pixel_values=np.zeros((1, 3, 16, 32))), ["16 x 32", 16]),
    "side": (dict(pixel_values=np.zeros((1, 3, 24, 24))), ["24 x 24", 16]),
    "grid": (dict(image_grid_thw=[[1, 2, 2]]), ["image_grid_thw"]),
    "frames": (
        dict(input_features=np.zeros((1, 41, 6)), input_features_mask=np.ones((1, 41))),
        ["41 frames", "6 features"],
    ),
    "placeholders": (dict(input_ids=np.full((1, 4), AUDIO), pixel_values=None), ["4 audio placeholders", "1 audio", 5]),
}


@pytest.mark.parametrize(("given", "names"), REFUSED.values(), ids=REFUSED)
def test_refuses_inconsistent_arrays(given, names):
    with refused(ed.DataError, *names):
        created(**given)


def test_images_of_a_planned_step_have_a_supported_size():
    """The largest supported size up to the given one."""
    config = decode(CONTENT)
    media = abstract_media(config, ed.Layout(), 2, 10, images=2, side=40)
    assert media.images.patches.shape == (4, 4, 3 * 16 * 16) and media.index.shape == (2, 10)
    with refused(ed.ConfigError, "images=3", "seq_len=10"):
        abstract_media(config, ed.Layout(), 2, 10, images=3, side=40)
