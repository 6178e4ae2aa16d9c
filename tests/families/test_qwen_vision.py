"""Qwen models with encoders against transformers: features, positions, logits and tokens, with file round trips."""

import dataclasses
import functools
import itertools
import json
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqx_decoders as ed
from eqx_decoders.encoders.rope_positions import AUDIO, IMAGE, TEXT, VIDEO, grid_positions
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.qwen import omni
from eqx_decoders.families.qwen.hybrid import delta_net, qwen3_5, with_depths
from eqx_decoders.families.qwen.text import qwen3_moe
from eqx_decoders.families.qwen.vision import qwen3_5_vision, qwen3_vl, qwen_vision
from eqx_decoders.families.registry import FAMILIES, find_family
from eqx_decoders.families.vision_fields import EncoderSizes
from eqx_decoders.layers.mask import Bidirectional
from eqx_decoders.layers.rope import Rope
from eqx_decoders.sharding.axes import named_leaves
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused
from tests.families.samples import FIXTURES, decode


NAMES = ("qwen2_5_vl", "qwen3_omni")
WEIGHTS = "model.safetensors"


def content_of(directory) -> dict:
    return json.loads((directory / "config.json").read_text())


def same_weights(one, other) -> bool:
    first, second = named_leaves(one), named_leaves(other)
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def tiny(model: str):
    """A decoder with a small image encoder."""
    rope = Rope(theta=100.0, sections=(2, 1, 1))
    sizes = EncoderSizes(embed_dim=8, layers=2, heads=2, mlp_dim=12, size=2, out_dim=12)
    shape = DecoderSizes(vocab_size=32, embed_dim=12, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=6)
    if model == "moe":
        text = qwen3_moe(shape, expert_dim=6, num_experts=3, num_experts_per_token=2, rope=rope)
        return qwen3_vl(text, qwen_vision(sizes, side=3, deepstack=(0, 1)))
    delta = delta_net(shape, num_key_heads=1, num_heads=2, key_dim=4, value_dim=4)
    rope = dataclasses.replace(rope, fraction=0.5, sections=(1, 1, 0))
    text = qwen3_5(shape, delta=delta, mlp=shape.mlp(), rope=rope)
    return qwen3_5_vision(with_depths(text), qwen_vision(sizes, side=3))


def filled(config):
    """Return a model with random weights, without compilation."""
    numbers = np.random.default_rng(0)
    shapes, static = eqx.partition(ed.abstract(config), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    made = jax.tree.map(lambda leaf: jnp.asarray(numbers.normal(size=leaf.shape), jnp.float32), shapes)
    return eqx.combine(made, static)


@functools.cache
def model_and_arrays(name):
    """Return a model, its media, the media as arrays, and the results of transformers."""
    arrays = dict(np.load(FIXTURES / name / "media.npz"))
    inputs = {key.removeprefix("inputs/"): x for key, x in arrays.items() if key.startswith("inputs/")}
    model = ed.load_hf(FIXTURES / name)
    return model, ed.Media.create(model.config, **inputs), inputs, arrays


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_features_logits_and_positions_match_transformers(name):
    model, media, inputs, wanted = model_and_arrays(name)
    features = model.encode(media).features[: len(wanted["features"])]
    assert_allclose(features, wanted["features"], atol=1e-4)
    assert_allclose(model(inputs["input_ids"], media=media).logits, wanted["logits"], atol=5e-4)
    assert np.array_equal(media.rope_positions, wanted["rope_positions"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_match_transformers(name):
    model, media, inputs, wanted = model_and_arrays(name)
    count = wanted["generated_ids"].shape[1]
    made = ed.generate(model, inputs["input_ids"], media=media, max_new_tokens=count, sampler=ed.Greedy())
    assert np.array_equal(made, wanted["generated_ids"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_export_is_bit_equal(name, tmp_path):
    directory, model = FIXTURES / name, model_and_arrays(name)[0]
    ed.save_hf(model, tmp_path / "new")
    before, after = (load_file(folder / WEIGHTS) for folder in (directory, tmp_path / "new"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    old, new = content_of(directory), content_of(tmp_path / "new")
    assert decode(new) == decode(old) == model.config
    assert new["vision_start_token_id"] == old["vision_start_token_id"]  # keys that transformers needs


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plain"), [("qwen2_5_vl", "qwen2"), ("qwen3_omni", "qwen3_moe")])
def test_decoder_without_encoders_belongs_to_the_text_family(name, plain, tmp_path):
    whole, text = model_and_arrays(name)[0], ed.load_hf(FIXTURES / name, text_only=True)
    assert text.config.media is None and text.vision is None
    ids = np.arange(1, 9)[None]
    assert_array_equal(text(ids).logits, whole(ids).logits)
    ed.save_hf(text, tmp_path / "new")
    assert content_of(tmp_path / "new")["model_type"] == plain
    again = ed.load_hf(tmp_path / "new")
    assert again.config == text.config
    assert same_weights(again, text)


# --- positions -------------------------------------------------------------------------------------------


def time_of(name, frame, seconds):
    return float(int(frame * 3 * seconds)) if name == "qwen2_5" else frame * seconds * 13


def positions_by_hand(name, ids, grids, seconds):
    """Return the positions of a row by the rules of the families; ids are token types, 9 and 8 start and end media."""
    positions, place, at = [], 0.0, 0
    images, videos = iter(grids.get(IMAGE, ())), iter(zip(grids.get(VIDEO, ()), seconds, strict=True))
    while at < len(ids):
        if ids[at] not in (IMAGE, VIDEO):
            positions.append([place] * 3)
            place, at = place + 1, at + 1
            continue
        (frames, rows, columns), every = (next(images), 1.0) if ids[at] == IMAGE else next(videos)
        tokens = [
            (time_of(name, frame, every), row, column)
            for frame, row, column in itertools.product(range(frames), range(rows // 2), range(columns // 2))
        ]
        heard, before, stretch = 0, None, []
        while at < len(ids) and (tokens or ids[at] == AUDIO):
            own, heard = ([heard] * 3, heard + 1) if ids[at] == AUDIO else (tokens.pop(0), heard)
            # the position after media follows the last run of tokens of one type
            stretch = [*stretch, own] if ids[at] == before else [own]
            positions.append([place + number for number in own])
            before, at = ids[at], at + 1
        place += max(number for own in stretch for number in (own if name == "omni" else own[1:])) + 1
    return np.asarray(positions).T


CLIP = [VIDEO] * 4
CASES = [
    # an image in text; an image of one token; images that are next to text only
    ([TEXT, 9, *[IMAGE] * 6, 8, TEXT, 9, IMAGE, 8], {IMAGE: [(1, 4, 6), (1, 2, 2)]}, ()),
    # videos: short intervals, long intervals, one frame
    ([9, *CLIP * 3, 8, TEXT], {VIDEO: [(3, 4, 4)]}, (0.25,)),
    ([9, *CLIP * 2, 8, TEXT, 9, *CLIP, 8], {VIDEO: [(2, 2, 8), (1, 4, 4)]}, (5.0, 2.0)),
    # audio without video
    ([TEXT, 9, *[AUDIO] * 5, 8, 9, *[IMAGE] * 2, 8, 9, AUDIO, 8, TEXT], {IMAGE: [(1, 4, 2)]}, ()),
]
MIXED = [
    # audio between video frames and after them; then videos that are wider than the audio is long
    ([9, *CLIP, *[AUDIO] * 7, *CLIP, *[AUDIO] * 9, 8, TEXT], {VIDEO: [(2, 4, 4)]}, (0.5,)),
    ([9, *CLIP, *[AUDIO] * 2, *CLIP, 8, TEXT], {VIDEO: [(2, 2, 8)]}, (0.125,)),
    ([9, *CLIP, AUDIO, 8, TEXT, TEXT], {VIDEO: [(1, 2, 8)]}, (0.5,)),
]
RULES = {name: decode(content_of(FIXTURES / fixture)).media.positions
         for name, fixture in zip(("qwen2_5", "omni"), NAMES, strict=True)}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "case"), [*itertools.product(("qwen2_5",), CASES[:3]), *itertools.product(("omni",), CASES + MIXED)]
)
def test_positions_match_the_rules(name, case):
    ids, grids, seconds = case
    wanted = positions_by_hand(name, list(ids), grids, seconds)
    kinds = np.where(np.isin(ids, (8, 9)), TEXT, ids)
    # the same row after padding, and again as a second document
    row = np.concatenate([[TEXT] * 2, kinds, kinds])
    segments = np.concatenate([[0] * 2, [1] * len(ids), [2] * len(ids)])
    twice = {kind: [*own] * 2 for kind, own in grids.items()}
    found = grid_positions(RULES[name], row[None], segments[None], twice, 2, np.asarray(seconds * 2, np.float32))
    assert np.array_equal(found[0].T, np.concatenate([np.zeros((3, 2)), wanted, wanted], axis=1))


def test_number_of_times_must_equal_the_number_of_videos():
    config = decode(content_of(FIXTURES / "qwen2_5_vl"))
    ids, patches = np.full((1, 4), config.media.video_token), np.zeros((16, 24), np.float32)
    given = dict(input_ids=ids, pixel_values_videos=patches, video_grid_thw=[[1, 4, 4]])
    ed.Media.create(config, **given, second_per_grid_ts=[0.5])
    with refused(ed.DataError, "2 values", "1 videos"):
        ed.Media.create(config, **given, second_per_grid_ts=[0.5, 0.5])


def test_audio_is_padded_to_the_longest_clip():
    """As in transformers: convolutions read the zeros after a clip."""
    config = decode(content_of(FIXTURES / "qwen3_omni"))
    token = config.media.audio_token

    def frames(*lengths):
        tokens = sum(length // 100 * 13 + -(-(length % 100) // 8) for length in lengths)
        mask = np.arange(max(lengths))[None] < np.asarray(lengths)[:, None]
        audio = np.ones((len(lengths), 8, max(lengths)), np.float32)
        media = ed.Media.create(config, [[token] * tokens], input_features=audio, feature_attention_mask=mask)
        return media.audio.chunks.shape[-1]

    assert frames(37, 60) == 60
    assert frames(37, 100) == frames(137) == 100


# --- files -----------------------------------------------------------------------------------------------


def flat_config(content) -> dict:
    """Write the config like the first files: the settings of the decoder are at the top level."""
    text, vision = content["text_config"], content["vision_config"]
    rope = text["rope_parameters"]
    outer = {key: x for key, x in content.items() if key not in ("text_config", "vision_config")}
    inner = {key: x for key, x in text.items() if key not in ("rope_parameters", "model_type", "layer_types", "dtype")}
    vision = {
        key: x for key, x in vision.items() if key not in ("rope_parameters", "model_type", "in_channels", "dtype")
    }
    return {**{key: x for key, x in inner.items() if x is not None}, **outer, "rope_theta": rope["rope_theta"],
            "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}, "sliding_window": 32_768,
            "use_sliding_window": False, "max_window_layers": 1, "vision_token_id": 7, "torch_dtype": "bfloat16",
            "vision_config": {**vision, "in_chans": 3, "spatial_patch_size": 2}}  # fmt: skip


def duplicated_config(content) -> dict:
    """Write the config like later files: settings in both places, and the outer model_type in the decoder."""
    settings = flat_config(content)
    text = {**content["text_config"], "architectures": content["architectures"], "image_token_id": None,
            "vision_start_token_id": 7, "tie_word_embeddings": settings.pop("tie_word_embeddings")}  # fmt: skip
    text |= {"rope_theta": settings["rope_theta"], "rope_scaling": {**text.pop("rope_parameters"), "type": "mrope"}}
    vision = {**settings["vision_config"], "model_type": "qwen2_5_vl"}
    return {**settings, "text_config": text, "vision_config": vision, "hidden_size": 99}


@pytest.mark.parametrize("spelling", [flat_config, duplicated_config], ids=["flat", "doubled"])
def test_legacy_settings_are_equivalent(spelling):
    content = content_of(FIXTURES / "qwen2_5_vl")
    assert decode(spelling(content)) == decode(content)


@pytest.mark.slow
def test_tensor_names_in_the_memory_of_transformers_are_read(tmp_path):
    directory = FIXTURES / "qwen2_5_vl"
    (tmp_path / "config.json").write_text(json.dumps(flat_config(content_of(directory))))
    tensors = load_file(directory / WEIGHTS)
    inner = {name: f"model.{name.replace('model.', 'language_model.')}" for name in tensors}
    save_file({inner[name]: x for name, x in tensors.items()}, tmp_path / WEIGHTS)
    assert same_weights(ed.load_hf(tmp_path), ed.load_hf(directory))
    text = ed.load_hf(tmp_path, text_only=True)
    assert same_weights(text, ed.load_hf(directory, text_only=True))


@pytest.mark.slow
def test_thinker_is_read_from_a_complete_model(tmp_path):
    directory = FIXTURES / "qwen3_omni"
    inner = {key: x for key, x in content_of(directory).items() if key not in ("architectures", "dtype")}
    whole = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "enable_audio_output": True,
        "thinker_config": inner,
        "talker_config": {"text_config": {}},
        "code2wav_config": {},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = {f"thinker.{name}": x for name, x in load_file(directory / WEIGHTS).items()}
    spoken = {f"{name}.weight": np.zeros((2, 2), np.float32) for name in ("talker.lm_head", "code2wav.decoder.0")}
    save_file(tensors | spoken, tmp_path / WEIGHTS)
    model = ed.load_hf(tmp_path)
    assert model.config == decode(content_of(directory))
    assert same_weights(model, ed.load_hf(directory))
    assert same_weights(ed.load_hf(tmp_path, text_only=True), ed.load_hf(directory, text_only=True))
    ed.save_hf(model, tmp_path / "new")
    assert content_of(tmp_path / "new")["model_type"] == "qwen3_omni_moe_thinker"
    assert load_file(tmp_path / "new" / WEIGHTS).keys() == load_file(directory / WEIGHTS).keys()
    with refused(ed.ConversionError, "architectures"):
        find_family("qwen3_omni_moe").decode(whole | {"architectures": ["Qwen3OmniMoeTalker"]})


@pytest.mark.slow
def test_expert_matrices_of_both_orientations_are_read(tmp_path):
    """Published files of Qwen3-VL have `[in, out]`. transformers 5 writes `[out, in]`."""
    model = filled(tiny("moe"))
    ed.save_hf(model, tmp_path / "new", family="qwen3_vl_moe")
    tensors = load_file(tmp_path / "new" / WEIGHTS)
    name = "model.language_model.layers.0.mlp.experts."
    assert (tensors[f"{name}gate_up_proj"].shape, tensors[f"{name}down_proj"].shape) == ((3, 12, 12), (3, 12, 6))
    shutil.copytree(tmp_path / "new", tmp_path / "published")
    turned = {name: np.ascontiguousarray(x.swapaxes(1, 2)) if ".experts." in name else x for name, x in tensors.items()}
    save_file(turned, tmp_path / "published" / WEIGHTS)
    for directory in ("new", "published"):
        again = ed.load_hf(tmp_path / directory)
        assert again.config == model.config
        assert same_weights(again, model)
        text = ed.load_hf(tmp_path / directory, text_only=True)
        assert_array_equal(text.scanned_layers[0].unit[0].mlp.gate[:2], model.scanned_layers[0].unit[0].mlp.gate)


@pytest.mark.slow
def test_multi_token_prediction_with_an_encoder(tmp_path):
    model = filled(tiny("hybrid"))
    ed.save_hf(model, tmp_path / "new", family="qwen3_5")
    names = load_file(tmp_path / "new" / WEIGHTS).keys()
    assert {"mtp.fc.weight", "model.visual.merger.norm.weight", "model.language_model.norm.weight"} <= names
    again, text = (ed.load_hf(tmp_path / "new", text_only=alone) for alone in (False, True))
    assert again.config == model.config and same_weights(again, model)
    assert text.config == dataclasses.replace(model.config, media=None)
    ed.save_hf(text, tmp_path / "text")
    assert same_weights(ed.load_hf(tmp_path / "text"), text)


def test_new_thinker_has_the_token_ids_that_transformers_needs():
    assert not set(FAMILIES["qwen3_omni_moe_thinker"].default_settings) - set(omni.FAMILY.ignored_keys)
    written = FAMILIES["qwen3_omni_moe_thinker"].encode(ed.get_config("qwen3-omni-30b-a3b-thinker"))
    audio = written["audio_config"]
    assert (audio["n_window"], audio["n_window_infer"], audio["downsample_hidden_size"]) == (50, 800, 480)
    assert (written["position_id_per_seconds"], written["audio_token_id"]) == (13, 151_675)


KINDS = {
    "qwen2_5_vl": ("qwen2.5-vl-3b", "qwen2.5-vl-7b", "qwen2.5-vl-32b", "qwen2.5-vl-72b"),
    "qwen3_vl_moe": ("qwen3-vl-30b-a3b", "qwen3-vl-235b-a22b"),
    "qwen3_omni_moe_thinker": ("qwen3-omni-30b-a3b-thinker",),
    "qwen3_5": tuple(f"qwen3.5-{size}-vision" for size in ("0.8b", "2b", "4b", "9b", "27b")),
    "qwen3_5_moe": tuple(f"qwen3.5-{size}-vision" for size in ("35b-a3b", "122b-a10b", "397b-a17b")),
}


@pytest.mark.slow(fast=("qwen2_5_vl-qwen2.5-vl-3b",))
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, names in KINDS.items() for name in names],
)
def test_published_models_have_a_config_json(kind, name):
    config, family = ed.get_config(name), FAMILIES[kind]
    written = json.loads(json.dumps(family.encode(config)))
    assert family.decode(written)[0] == config
    assert written["vision_config"]["out_hidden_size"] == written["text_config"]["hidden_size"]
    assert ed.DecoderConfig.from_json(config.to_json()) == config


# numbers of the published files
PARAMETERS = {
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen2.5-vl-32b": 33_452_718_336,
    "qwen2.5-vl-72b": 73_410_777_344,
    "qwen3-vl-30b-a3b": 31_070_754_032,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_of_published_models(name):
    leaves = named_leaves(ed.abstract(ed.get_config(name)))
    assert sum(leaf.size for leaf in leaves.values()) == PARAMETERS[name]


def test_windows_of_published_models():
    masks = [block.mixer.mask for block in ed.get_config("qwen2.5-vl-7b").media.vision.blocks]
    assert [index for index, mask in enumerate(masks) if mask == Bidirectional()] == [7, 15, 23, 31]
    assert set(masks) == {Bidirectional(), Bidirectional(64)}
    written = FAMILIES["qwen2_5_vl"].encode(ed.get_config("qwen2.5-vl-7b"))["vision_config"]
    assert (written["window_size"], written["fullatt_block_indexes"]) == (112, [7, 15, 23, 31])
