"""LLaVA, LLaVA-NeXT and Granite Vision: tiles of an image, order of tokens, and settings.

For the comparison with transformers, see `test_image_families.py`.
"""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.media_documents import SyntheticReader
from eqx_decoders.encoders.common_shapes import array_shapes, merge_shapes, pad_to_shapes
from eqx_decoders.encoders.geometry import TilesConfig, best_size, grid_of, token_order
from eqx_decoders.families.registry import FAMILIES
from eqx_decoders.io.huggingface.directory import Directory
from eqx_decoders.io.processors.processor import read_settings
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.planning.traced_memory import abstract_media
from eqx_decoders.serving.engine.multimodal_prefill import with_rounded_rows
from tests.compare import assert_allclose
from tests.errors import refused
from tests.families.samples import FIXTURES, decode, settings


SIZES = ((4, 8), (8, 4), (8, 8), (12, 4), (4, 12))
TILES = TilesConfig(side=4, sizes=SIZES)


def best_size_by_hand(height, width):
    """Return the size that keeps most pixels of an image, and of these the one that wastes least."""
    best, most, least = SIZES[0], 0, float("inf")
    for down, across in SIZES:
        scale = min(across / width, down / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        waste = down * across - kept
        if kept > most or (kept == most and waste < least):
            best, most, least = (down, across), kept, waste
    return best


def line_order(height, width, side):
    """Yield the token indices of the tiles line by line. Tiles follow the tokens of the overview; -1 ends a line."""
    down, across = (length // TILES.side for length in best_size_by_hand(height, width))
    rows, columns = down * side, across * side
    if width / height > columns / rows:
        padding = (rows - int(round(height * (columns / width), 7))) // 2
        shown = range(padding, rows - padding), range(columns)
    else:
        padding = (columns - int(round(width * (rows / height), 7))) // 2
        shown = range(rows), range(padding, columns - padding)
    for row in shown[0]:
        for column in shown[1]:
            tile = row // side * across + column // side
            yield side**2 * (1 + tile) + row % side * side + column % side
        yield -1


@pytest.mark.parametrize("side", [1, 3])
@pytest.mark.parametrize("size", [(8, 8), (5, 30), (30, 5), (7, 6), (3, 4), (100, 61), (61, 100), (9, 27)])
def test_token_order_is_line_by_line_without_padding(size: tuple[int, int], side):
    assert best_size(*size, SIZES) == best_size_by_hand(*size)
    order = token_order(TILES, *size, side)
    assert order.tolist() == [*range(side**2), *line_order(*size, side)]
    assert grid_of(TILES, *size) == tuple(length // TILES.side for length in best_size_by_hand(*size))


# --- a model ---


@pytest.fixture(scope="module")
def stored():
    arrays = dict(np.load(FIXTURES / "llava_next" / "media.npz"))
    inputs = {name.removeprefix("inputs/"): x for name, x in arrays.items() if name.startswith("inputs/")}
    return ed.load_hf(FIXTURES / "llava_next"), inputs


def test_tiles_of_all_images_may_be_concatenated(stored):
    model, inputs = stored
    pixels = np.concatenate([x[:count] for x, count in zip(inputs["pixel_values"], (5, 5, 2), strict=True)])
    media, other = (ed.Media.create(model.config, **inputs | more) for more in ({}, dict(pixel_values=pixels)))
    assert jax.tree.all(jax.tree.map(np.array_equal, media, other))


@pytest.mark.slow
def test_line_ends_are_found_in_padded_rows(stored):
    """Rows that are padded for several processes, for microbatches, and for an engine."""
    model, inputs = stored
    wanted = np.asarray(model.encode(ed.Media.create(model.config, **inputs)).features)
    media = ed.Media.create(model.config, **inputs, groups=2)
    shapes = array_shapes(media)
    patches = shapes["images"]
    longer = {key: [[x[0][0] + 1, x[0][1] + 4, *x[0][2:]], x[1]] for key, x in patches.items() if isinstance(x, list)}
    longer = pad_to_shapes(media, merge_shapes([shapes, {**shapes, "images": patches | longer}]))
    parts = np.asarray(model.encode(longer).by_group)
    assert_allclose(np.concatenate([parts[0, :16], parts[1, :24]]), wanted[:40], atol=1e-4)
    alone = {key: x[:1] for key, x in inputs.items()}
    rounded = with_rounded_rows(ed.Media.create(model.config, **alone))
    assert_allclose(model.encode(rounded).features[:16], wanted[:16], atol=1e-4)


def test_features_are_scaled_like_embeddings(stored):
    media = stored[0].config.media
    assert media is not None and media.feature_scale == stored[0].config.embedding_scale == 3.0


REFUSED_INPUTS = {
    "no_sizes": (dict(image_sizes=None), ["image_sizes", "[images, 2]"]),
    "tile_size": (dict(pixel_values=np.zeros((3, 5, 3, 6, 5))), ["5 x 5"]),
    "few_tiles": (dict(pixel_values=np.zeros((3, 4, 3, 5, 5))), ["pixel_values", "[3, at least 5, ...]"]),
    "tiles": (dict(pixel_values=np.zeros((11, 3, 5, 5))), ["image_sizes", 11, 12]),
    "rows": (dict(image_sizes=[(10, 6), (6, 10), (3, 8)]), ["40 image placeholders", "3 images", 48]),
    "grid": (dict(image_grid_thw=[[1, 2, 2]]), ["image_grid_thw"]),
}


@pytest.mark.parametrize("given, names", REFUSED_INPUTS.values(), ids=REFUSED_INPUTS)
def test_refuses_inconsistent_tiles(stored, given, names):
    model, inputs = stored
    with refused(ed.DataError, *names):
        ed.Media.create(model.config, **inputs | given)


def test_planned_images_have_one_size(stored):
    model, _ = stored
    with refused(ed.ConfigError, "images"):
        SyntheticReader.of(model.config)
    media = abstract_media(model.config, ed.Layout(), 2, 40, images=1, side=9)
    assert media.order.shape == (2, 24) and (media.index.shape == (2, 40))


# --- settings ---

PARAMETERS = {
    "granite-vision-3.2-2b": 2_960_158_576,  # without the pooling head of SigLIP, which is unused
    "llava1.5-7b": 7_063_427_072,
    "llava1.5-13b": 13_351_494_656,
    "llava1.6-vicuna-7b": 7_063_431_168,
    "llava1.6-vicuna-13b": 13_351_499_776,
    "llava1.6-mistral-7b": 7_566_747_648,
}


@pytest.mark.parametrize("name", ["granite-vision-3.2-2b", "llava1.5-7b", "llava1.6-mistral-7b"])
def test_published_configuration(name):
    content = settings(name, {})
    assert decode(content) == ed.get_config(name)
    again = FAMILIES[content["model_type"]].encode(ed.get_config(name))
    assert decode(again) == ed.get_config(name)
    assert again["vision_feature_layer"] == content["vision_feature_layer"]
    assert again["vision_config"]["model_type"] == content["vision_config"]["model_type"]
    assert again["text_config"]["model_type"] == content["text_config"]["model_type"].replace("mistral", "llama")


@pytest.mark.slow(fast=("granite-vision-3.2-2b", "llava1.5-7b"))
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_of_published_models(name):
    assert ed.count_parameters(ed.get_config(name)) == PARAMETERS[name]


def test_a_model_without_tiles_is_llava(stored):
    model, _ = stored
    media = model.config.media
    assert media is not None and media.vision is not None
    whole = dataclasses.replace(media, vision=dataclasses.replace(media.vision, tiles=None))
    with refused(ed.ConversionError, "LLaVA"):
        FAMILIES["llava_next"].encode(dataclasses.replace(model.config, media=whole))
    with refused(ed.ConversionError, "LlavaForConditionalGeneration"):
        FAMILIES["llava"].encode(model.config)


# --- processors ---

RULES = dict(
    size=dict(height=384, width=384), crop_size=dict(height=384, width=384), do_center_crop=True, image_mean=[0.5] * 3,
    image_std=[0.5] * 3, image_grid_pinpoints=[[384, 384], [384, 768]],
)  # fmt: skip
WORDS = dict(processor_class="LlavaNextProcessor", patch_size=14, vision_feature_select_strategy="full")


def rules(folder, images, words):
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "processor_config.json").write_text(json.dumps(words))
    family, settings = read_settings(Directory(folder))
    assert family.images is not None
    made: Any = family.images(settings)
    return made


def test_images_have_one_placeholder_per_token(stored, tmp_path):
    model, _ = stored
    sides = dict.fromkeys(("height", "width"), 5)
    images = RULES | dict(size=sides, crop_size=sides, image_grid_pinpoints=[[5, 5], [10, 5], [5, 15], [10, 10]])
    pixels = [np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8) for size in ((9, 4), (20, 31))]
    pytest.importorskip("PIL")
    read = rules(tmp_path, images, WORDS | dict(patch_size=2))
    files = [read.process(one, MediaLimits(), "x") for one in pixels]
    ids = np.full((1, sum(one.text.count("<image>") for one in files)), 53)
    media = ed.Media.create(model.config, ids, **read.join(files))
    assert media.images is not None and media.images.patches.shape[1:] == (4, 12)


def test_settings_of_processors_are_checked(tmp_path):
    assert rules(tmp_path, RULES, WORDS).tiles == TilesConfig(side=384, sizes=((384, 384), (384, 768)))
    clip = dict(num_additional_image_tokens=1, vision_feature_select_strategy="default")
    plain = WORDS | clip | dict(processor_class="LlavaProcessor")
    cropped = dict(size=dict(shortest_edge=336), crop_size=dict(height=336, width=336))
    assert (rules(tmp_path, cropped, plain).size, rules(tmp_path, cropped, plain).center_crop) == (336, True)
    with refused(ed.ConversionError, "num_additional_image_tokens=1"):
        rules(tmp_path, RULES, WORDS | dict(num_additional_image_tokens=1))
    with refused(ed.ConversionError, "crop_size"):
        rules(tmp_path, RULES | dict(crop_size=dict(height=384, width=380)), WORDS)
    with refused(ed.ConversionError, "do_center_crop=false"):
        rules(tmp_path, cropped | dict(do_center_crop=False), plain)
    with refused(ed.ConversionError, "patch_size"):
        rules(tmp_path, RULES, {key: value for key, value in WORDS.items() if key != "patch_size"})
