"""Mistral 3, SmolVLM, InternVL, LFM2-VL, LLaVA and Llama 4 with images against transformers: settings and tensors."""

import json
import math
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqx_decoders as ed
from eqx_decoders.encoders.images import from_pixels, learned_positions
from eqx_decoders.encoders.stem import LearnedGrid, PatchStemConfig
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.llama4.text import llama4
from eqx_decoders.families.llama4.vision import llama4_encoder
from eqx_decoders.families.multimodal import with_images
from eqx_decoders.families.registry import FAMILIES, find_family
from eqx_decoders.families.vision_fields import EncoderSizes
from eqx_decoders.layers.mask import Causal, Chunked
from eqx_decoders.layers.rope import Rope
from eqx_decoders.sharding.axes import named_leaves
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused
from tests.families.published import WITH_ENCODERS
from tests.families.samples import FIXTURES, decode, settings
from tests.models import filled


WEIGHTS = "model.safetensors"


def same_weights(one, other) -> bool:
    one, other = named_leaves(one), named_leaves(other)
    return one.keys() == other.keys() and all(np.array_equal(one[path], other[path]) for path in one)


# --- comparison with transformers ---


MADE = ["mistral3", "smolvlm", "internvl", "lfm2_vl", pytest.param("llava", marks=pytest.mark.slow), "llava_next"]


@pytest.fixture(scope="module", params=MADE)
def stored(request):
    """Return a directory, its model, the inputs of transformers' forward pass, and its results."""
    directory = FIXTURES / request.param
    arrays = dict(np.load(directory / "media.npz"))
    inputs = {name.removeprefix("inputs/"): x for name, x in arrays.items() if name.startswith("inputs/")}
    return directory, ed.load_hf(directory), inputs, arrays


@pytest.mark.slow(fast=("mistral3",))
def test_features_and_logits_match_transformers(stored):
    _, model, inputs, wanted = stored
    media = ed.Media.create(model.config, **inputs)
    features = np.asarray(model.encode(media).features)[: len(wanted["features"])]
    assert_allclose(features, wanted["features"], atol=1e-4)
    # transformers ignores the divisor of logits in this model with an encoder, although the decoder was trained with it
    logits = model(inputs["input_ids"], media=media).logits * model.config.logit_divisor
    assert_allclose(logits, wanted["logits"], atol=3e-4)


@pytest.mark.slow
def test_greedy_tokens_match_transformers(stored):
    _, model, inputs, wanted = stored
    ids, media, count = inputs["input_ids"], ed.Media.create(model.config, **inputs), wanted["generated_ids"].shape[1]
    made = ed.generate(model, ids, media=media, max_new_tokens=count, sampler=ed.Greedy(), stop_ids=())
    assert np.array_equal(made, wanted["generated_ids"])


def model_settings(settings):
    """Return the settings without dtypes and without the version of the writer."""
    missing = ("dtype", "torch_dtype", "transformers_version", "_pad_token_id")
    missing += ("block_ffn_dim_multiplier", "block_multiple_of", "full_attn_idxs")  # other keys of LFM2 for sizes
    square = {"image_size": "patch_size"} | {"patch_size": "image_size"}
    return {
        key: model_settings(x) if isinstance(x, dict) else x[0] if key in square and isinstance(x, list) else x
        for key, x in settings.items()
        if key not in missing
    }


def within(one, other) -> bool:
    """Return whether the second object contains all keys and values of the first one."""
    return all(within(x, other[key]) if isinstance(x, dict) else x == other[key] for key, x in one.items())


@pytest.mark.slow(fast=("mistral3",))
def test_export_is_bit_equal(stored, tmp_path):
    directory, model, *_ = stored
    ed.save_hf(model, tmp_path / "new")
    before, after = (load_file(folder / WEIGHTS) for folder in (directory, tmp_path / "new"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (directory, tmp_path / "new"))
    # the inner object has the value that is used
    old["text_config"]["tie_word_embeddings"] = old["tie_word_embeddings"]
    assert within(model_settings(old), new)
    assert decode(new) == model.config


@pytest.mark.slow
def test_decoder_without_encoders(stored, tmp_path):
    directory, model, inputs, _ = stored
    text = ed.load_hf(directory, text_only=True)
    assert text.config.media is None and text.config.blocks == model.config.blocks
    ids = np.where(inputs["input_ids"] > 50, 1, inputs["input_ids"])
    assert_array_equal(text(ids).logits, model(ids).logits)
    ed.save_hf(text, tmp_path / "new")
    again = ed.load_hf(tmp_path / "new")
    assert again.config == text.config
    assert same_weights(again, text)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["model_type"] in (
        "mistral",
        "llama",
        "qwen3",
        "lfm2",
        "granite",
    )


def test_both_versions_of_tensor_names_are_read(tmp_path):
    """transformers 4.52 and later order the parts of names differently in memory, and in some files."""
    directory = FIXTURES / "mistral3"
    shutil.copy(directory / "config.json", tmp_path)
    tensors = {
        "lm_head.weight" if "lm_head" in name else f"model.{name.replace('language_model.model', 'language_model')}": x
        for name, x in load_file(directory / WEIGHTS).items()
    }
    assert "model.language_model.norm.weight" in tensors and "model.vision_tower.ln_pre.weight" in tensors
    save_file(tensors, tmp_path / WEIGHTS)
    assert same_weights(ed.load_hf(tmp_path), ed.load_hf(directory))


# --- Llama 4 against formulas in NumPy ---

SIDE, SIZE, MERGE, WIDTH, HEADS = 4, 3, 2, 16, 2
IMAGE = 29
SHAPE = DecoderSizes(
    vocab_size=32, embed_dim=12, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16, eps=1e-5
)
TINY = with_images(
    llama4(
        SHAPE,
        num_experts=2,
        dense_dim=20,
        sparse=(0, 1),
        rotated=(0,),
        masks=(Chunked(4), Causal()),
        rope=Rope(theta=100.0, pairing="interleaved"),
    ),
    llama4_encoder(
        EncoderSizes(
            embed_dim=WIDTH, layers=2, heads=HEADS, mlp_dim=WIDTH * MERGE**2, out_dim=12, size=SIZE, merge=MERGE,
            activation="gelu",
        ),
        feature_dim=10, side=SIDE, theta=50.0,
    ),
    image_token=IMAGE,
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    return filled(TINY, attention="dot")


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def layer_norm(x, norm):
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return y * norm["scale"] + norm["bias"]


def rotated(x):
    """Rotate neighboring pairs: half of a head by the column, half by the row, counted from 1; the last token by 0."""
    count = x.shape[-1] // 4
    frequencies = 50.0 ** (-2 * np.arange(count) / (2 * count))
    index = np.arange(SIDE**2)
    angles = np.stack([index % SIDE + 1, index // SIDE + 1])[:, :, None] * frequencies
    angles = np.concatenate([np.concatenate([*angles], axis=-1), np.zeros((1, 2 * count))])
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def attention_by_hand(x, mixer):
    query, key, value = (
        np.einsum("le,ehd->lhd", x, mixer[name]) + mixer[f"{name}_bias"] for name in ("query", "key", "value")
    )
    scores = np.einsum("lhd,mhd->hlm", rotated(query), rotated(key)) / math.sqrt(WIDTH // HEADS)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    seen = np.einsum("hlm,mhd->lhd", weights / weights.sum(-1, keepdims=True), value)
    return np.einsum("lhd,hde->le", seen, mixer["out"]) + mixer["out_bias"]


def expected_features(model, image):
    """Return the encoder's features of one tile, and their projections, computed from the weights."""
    tree: dict = {}
    for path, leaf in named_leaves(model.vision).items():
        *parts, last = path.split(".")
        inner = tree
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[last] = np.asarray(leaf, np.float64)
    cut = image.reshape(3, SIDE, SIZE, SIDE, SIZE).transpose(1, 3, 0, 2, 4).reshape(SIDE**2, -1)
    stem = tree["stem"]
    x = np.concatenate([cut @ stem["kernel"].reshape(-1, WIDTH), stem["class_embedding"][None]])
    x = layer_norm(x + stem["positions"]["table"], tree["pre_norm"])
    unit = tree["scanned_layers"]["0"]["unit"]["0"]
    for layer in range(2):
        block = jax.tree.map(lambda leaf: leaf[layer], unit)  # noqa: B023
        x = x + attention_by_hand(layer_norm(x, block["pre_mixer_norm"]), block["mixer"])
        mlp, inner = block["mlp"], layer_norm(x, block["pre_mlp_norm"])
        x = x + gelu(inner @ mlp["up"] + mlp["up_bias"]) @ mlp["down"] + mlp["down_bias"]
    x = layer_norm(x, tree["post_norm"])[:-1].reshape(SIDE // MERGE, MERGE, SIDE // MERGE, MERGE, WIDTH)
    x = x.swapaxes(1, 2).reshape((SIDE // MERGE) ** 2, -1)
    for number in ("0", "1"):
        x = gelu(x @ tree["projector"]["layers"][number]["kernel"])
    return x, x @ tree["into"]["kernel"]


@pytest.mark.slow
def test_features_of_tiles_match_the_formulas(tiny):
    images = np.random.default_rng(0).normal(size=(3, 3, 12, 12)).astype(np.float32)
    ids = np.asarray([[1, *[IMAGE] * 8, 2], [*[IMAGE] * 4, 3, 4, 5, 6, 7, 8]], np.int32)
    encoded = tiny.encode(ed.Media.create(TINY, ids, pixel_values=images))
    features, rows = (np.concatenate(x) for x in zip(*(expected_features(tiny, x) for x in images), strict=True))
    assert_allclose(encoded.features[:12], features, atol=2e-5)
    assert_allclose(encoded.by_group[0, :12], rows, atol=2e-5)


@pytest.mark.slow
def test_llama4_round_trips(tiny, tmp_path):
    ed.save_hf(tiny, tmp_path / "new")
    assert same_weights(ed.load_hf(tmp_path / "new"), tiny)
    names = load_file(tmp_path / "new" / WEIGHTS)
    assert names["vision_model.positional_embedding_vlm"].shape == (SIDE**2 + 1, WIDTH)
    assert names["multi_modal_projector.linear_1.weight"].shape == (12, 10)
    assert "language_model.model.layers.1.feed_forward.router.weight" in names
    text = ed.load_hf(tmp_path / "new", text_only=True)
    ids = np.asarray([[1, 2, 3, 4, 5]])
    assert_array_equal(text(ids).logits, ed.load_hf(tmp_path / "new")(ids).logits)


# --- published models ---

PARAMETERS = {
    "smolvlm2-256m": 256_484_928, "smolvlm2-500m": 507_482_304, "smolvlm2-2.2b": 2_246_784_880,
    "mistral-small-3.1-24b": 24_011_361_280,
    "ministral3-8b-vision": 8_918_026_240,
    "internvl3-1b": 938_193_024, "internvl3-2b": 2_088_957_440, "internvl3-8b": 7_944_373_760,
    "internvl3-14b": 15_117_256_704, "internvl3-38b": 38_388_164_992, "internvl3-78b": 78_408_318_336,
    "internvl3.5-1b": 1_060_897_792, "internvl3.5-2b": 2_348_347_392, "internvl3.5-4b": 4_732_489_216,
    "internvl3.5-8b": 8_528_318_464, "internvl3.5-14b": 15_119_523_840, "internvl3.5-38b": 38_390_405_504,
    "internvl3.5-30b-a3b": 30_848_730_112, "internvl3.5-241b-a28b": 240_699_370_368,
    "lfm2-vl-450m": 450_822_656, "lfm2-vl-1.6b": 1_584_804_000,
    "llama4-17b-16e-vision": 108_641_793_536, "llama4-17b-128e-vision": 401_583_781_376,
}  # fmt: skip


FAST = (
    "smolvlm2-256m", "smolvlm2-500m", "smolvlm2-2.2b", "mistral-small-3.1-24b", "ministral3-8b-vision",
    "internvl3-1b", "internvl3-2b", "internvl3-8b", "internvl3-14b", "internvl3-38b", "internvl3-78b",
    "internvl3.5-1b", "internvl3.5-2b", "internvl3.5-4b", "internvl3.5-8b", "internvl3.5-14b", "internvl3.5-38b",
)  # fmt: skip


@pytest.mark.slow(fast=FAST)
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_of_published_models(name):
    assert ed.count_parameters(ed.get_config(name)) == PARAMETERS[name]


PUBLISHED = ("lfm2-vl-450m", "smolvlm2-500m", "mistral-small-3.1-24b", "internvl3-1b", "llama4-17b-128e-vision")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configuration(name):
    content = settings(name, {})
    family = find_family(content["model_type"])
    config, kept = family.decode(content)
    assert config == ed.get_config(name)
    assert not {"architectures", "model_type", "perceiver_config"} & kept["text_config"].keys()
    again = family.encode(config)
    assert decode(again) == config
    assert again["text_config"]["model_type"] == WITH_ENCODERS[name]["text_config"]["model_type"]


def test_idefics_3_settings_equal_smolvlm_settings():
    keys = dict(architectures=["Idefics3ForConditionalGeneration"], model_type="idefics3")
    assert decode(settings("smolvlm2-500m", keys)) == ed.get_config("smolvlm2-500m")
    written = FAMILIES["idefics3"].encode(ed.get_config("smolvlm2-2.2b"))
    assert written["vision_config"]["model_type"] == "idefics3_vision"
    assert decode(written) == ed.get_config("smolvlm2-2.2b")


@pytest.mark.parametrize(
    "name, kind, text",
    [
        ("internvl3-1b", "internvl", "qwen2"),
        ("internvl3.5-1b", "internvl", "qwen3"),
        ("internvl3.5-30b-a3b", "internvl", "qwen3_moe"),
        ("ministral3-8b-vision", "mistral3", "ministral3"),
    ],
)
def test_decoders_of_several_families(name, kind, text):
    config = ed.get_config(name)
    written = FAMILIES[kind].encode(config)
    assert written["text_config"]["model_type"] == text and decode(written) == config
    chosen = FAMILIES[kind].for_config(written)
    assert chosen.text is not None and chosen.text.model_type == text


def test_outer_key_determines_tied_embeddings():
    for key in ("tie_embedding", "tie_word_embeddings"):
        assert not decode(settings("lfm2-vl-450m", {key: False, "text_config.tie_embedding": True})).tied
    assert decode(settings("lfm2-vl-450m", {})).tied


# --- images of several sizes ---

STEM = PatchStemConfig(size=2, merge=2)


def separate_images(images) -> list:
    return [image for pixels in images for image in from_pixels(STEM, pixels[None])]


def check_same(found, wanted):
    assert [image.grid for image in found] == [image.grid for image in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert_array_equal(one.patches, other.patches)


def test_padded_images_equal_images_without_padding():
    """Sizes from `image_sizes` or a mask. Pixels that do not fill a patch are dropped."""
    pixels = np.random.default_rng(0).normal(size=(3, 3, 9, 12)).astype(np.float32)
    sizes = [(8, 12), (4, 4), (9, 8)]
    wanted = separate_images([x[:, : h // 4 * 4, : w // 4 * 4] for x, (h, w) in zip(pixels, sizes, strict=True)])
    check_same(from_pixels(STEM, pixels, sizes=np.asarray(sizes)), wanted)
    mask = np.zeros((3, 9, 12), int)
    for one, (height, width) in zip(mask, sizes, strict=True):
        one[: height - 1, :width] = 1  # a patch with one real pixel is real
    check_same(from_pixels(STEM, pixels, mask=mask), wanted)


def test_images_of_zeros_are_padding():
    pixels = np.random.default_rng(0).normal(size=(2, 3, 3, 4, 8)).astype(np.float32)
    pixels[0, 2] = pixels[1, :2] = 0
    mask = pixels.any(axis=2)
    wanted = separate_images([pixels[0, 0], pixels[0, 1], pixels[1, 2]])
    check_same(from_pixels(STEM, pixels), wanted)
    check_same(from_pixels(STEM, pixels, mask=mask), wanted)
    assert len(from_pixels(STEM, pixels[0])) == 3  # without a batch dimension, all are images


ONES = np.ones((2, 3, 8, 8), np.float32)
HOLE = np.ones((2, 8, 8))
HOLE[0, 2:4, 2:4] = 0
BAD_SIZES = {
    "count": (dict(sizes=[[8, 8]]), ["image_sizes=[[8, 8]]", 2]),
    "larger": (dict(sizes=[[8, 8], [12, 4]]), ["image_sizes", "[8, 8]"]),
    "empty": (dict(sizes=[[8, 8], [0, 4]]), ["image_sizes"]),
    "odd": (dict(sizes=[[8, 8], [6, 4]]), ["3 rows", "2 columns", "2 x 2"]),
    "no_patch": (dict(sizes=[[8, 8], [1, 4]]), ["0 rows", "2 columns"]),
    "mask_shape": (dict(mask=np.ones((2, 8))), ["pixel_attention_mask", "(2, 8)", "(2, 8, 8)"]),
    "mask_hole": (dict(mask=HOLE), ["pixel_attention_mask", "rectangle"]),
    "mask_empty": (dict(mask=np.zeros((2, 8, 8))), ["pixel_attention_mask", "rectangle"]),
    "mask_late": (dict(mask=np.ones((2, 8, 8)) * (np.arange(8) > 1)), ["first row"]),
}


@pytest.mark.parametrize("given, names", BAD_SIZES.values(), ids=BAD_SIZES)
def test_refuses_inconsistent_sizes(given, names):
    with refused(ed.DataError, *names):
        from_pixels(STEM, ONES, **given)


def test_positions_are_resized_with_antialiasing():
    """With fewer patches than positions, each patch gets an average with weights that decrease with distance."""
    stem = PatchStemConfig(size=1, positions=LearnedGrid(side=4, resample="antialias"))
    (image,) = from_pixels(stem, np.ones((1, 3, 2, 8), np.float32))
    found = learned_positions(stem, image)
    assert found is not None
    whole = np.zeros((2, 8, 4, 4))
    for patch, (places, weights) in enumerate(zip(*found, strict=True)):
        np.add.at(whole[patch // 8, patch % 8].reshape(-1), places, weights)
    rows = np.array([[3, 3, 1, 0], [0, 1, 3, 3]]) / 7
    columns = np.maximum(1 - np.abs((np.arange(8)[:, None] + 0.5) / 2 - 0.5 - np.arange(4)), 0)
    columns /= columns.sum(axis=1, keepdims=True)
    assert_allclose(whole, np.einsum("ri,cj->rcij", rows, columns), atol=1e-6)


PADDED = dict(input_ids=[[53] * 2], pixel_values=np.ones((2, 8, 12), np.float32))
BAD_SHAPES = {
    "count": (dict(spatial_shapes=[[2, 2]]), ["spatial_shapes"]),
    "larger": (dict(spatial_shapes=[[2, 2], [2, 6]]), ["12", "8"]),
    "mask": (
        dict(spatial_shapes=[[2, 2], [2, 2]], pixel_attention_mask=np.ones((2, 8))),
        ["pixel_attention_mask", "spatial_shapes"],
    ),
}


@pytest.mark.parametrize("given, names", BAD_SHAPES.values(), ids=BAD_SHAPES)
def test_refuses_inconsistent_spatial_shapes(given, names):
    config = decode(json.loads((FIXTURES / "lfm2_vl" / "config.json").read_text()))
    with refused(ed.DataError, *names):
        ed.Media.create(config, **{**PADDED, **given})


@pytest.mark.parametrize("side, count", [(26, 26), (27, 27), (32, 32), (6, 8), (9, 4), (4, 12)])
def test_positions_are_selected_by_fractions_of_the_side(side, count):
    """With published sizes, every position is used once. With other sizes, quotients are rounded down exactly."""
    stem = PatchStemConfig(size=2, positions=LearnedGrid(side=side, resample="fraction"))
    (image,) = from_pixels(stem, np.ones((1, 3, 2 * count, 4), np.float32))
    found = learned_positions(stem, image)
    assert found is not None
    wanted = [side * (row * side // count) + column * side // 2 for row in range(count) for column in range(2)]
    assert found[0][:, 0].tolist() == wanted
