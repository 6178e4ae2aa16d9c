"""Phi-4 multimodal against transformers: images as tiles, audio with and without images, adapters, settings."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqx_decoders as ed
from eqx_decoders.encoders.geometry import DIVIDER, LINE_END, TilesConfig, token_order
from eqx_decoders.families.registry import FAMILIES
from eqx_decoders.io.huggingface.directory import Directory
from eqx_decoders.io.huggingface.peft import load_peft
from eqx_decoders.io.processors.processor import read_settings
from eqx_decoders.layers.attention.relative_attention import DISTANCE_BIAS
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.sharding.rules import WEIGHTS
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused
from tests.families.samples import FIXTURES, decode, settings


DIRECTORY = FIXTURES / "phi4_multimodal"
ARRAYS = dict(np.load(DIRECTORY / "media.npz"))
CONTENT = json.loads((DIRECTORY / "config.json").read_text())
HEAD = "model.embed_tokens_extend.image_embed.img_processor.head."
AUDIO = 55


@pytest.fixture(scope="module")
def model():
    return ed.load_hf(DIRECTORY)


def recorded(group: str) -> tuple[dict, dict]:
    """Return the inputs of transformers' forward pass and its results, with images and audio or with audio only."""
    found = {name.removeprefix(group): x for name, x in ARRAYS.items() if name.startswith(group)}
    inputs = {name.removeprefix("inputs/"): x for name, x in found.items() if name.startswith("inputs/")}
    return inputs, found


@pytest.mark.slow
@pytest.mark.parametrize("group", ["", "alone/"])
def test_logits_match_transformers(model, group):
    """Two images with partial padding of tokens. Without images, speech has a separate projector."""
    inputs, wanted = recorded(group)
    media = ed.Media.create(model.config, **inputs)
    assert_allclose(model(inputs["input_ids"], media=media).logits, wanted["logits"], atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("group", ["", "alone/"])
def test_features_and_greedy_tokens_match_transformers(model, group):
    inputs, wanted = recorded(group)
    media, count = ed.Media.create(model.config, **inputs), wanted["generated_ids"].shape[1]
    features = np.asarray(model.encode(media).features)[: len(wanted["features"])]
    assert_allclose(features, wanted["features"], atol=1e-4)
    made = ed.generate(model, inputs["input_ids"], media=media, max_new_tokens=count, sampler=ed.Greedy(), stop_ids=())
    assert np.array_equal(made, wanted["generated_ids"])


@pytest.mark.slow
def test_mesh_does_not_change_the_result(model):
    inputs, wanted = recorded("")
    whole = dict.fromkeys(("inner", "outer", "filters", "qkv_heads", "heads"), ())  # sizes that no mesh axis divides
    for sizes in (dict(data=2, tensor=2, context=2), dict(data=2, fsdp=2, context=2)):
        placed = model.place(ed.Layout.create(**sizes, weights=WEIGHTS | whole))
        media = ed.Media.create(model.config, **inputs, groups=2)
        assert_allclose(placed(inputs["input_ids"], media=media).logits, wanted["logits"], atol=2e-4)


@pytest.mark.slow
def test_export_is_bit_equal(model, tmp_path):
    """Without a head of the image encoder, which is unused."""
    ed.save_hf(model, tmp_path / "new")
    before, after = (load_file(folder / "model.safetensors") for folder in (DIRECTORY, tmp_path / "new"))
    assert {name for name in before if not name.startswith(HEAD)} == after.keys()
    assert all(np.array_equal(before[name], x) for name, x in after.items())
    content = json.loads((tmp_path / "new" / "config.json").read_text())
    assert decode(content) == model.config and "text_config" not in content
    for table in ("vision_config", "audio_config"):
        old = {key: "silu" if x == "swish" else x for key, x in CONTENT[table].items() if key != "dtype"}
        assert old.items() <= content[table].items()


@pytest.mark.slow
def test_decoder_without_encoders(model, tmp_path):
    text, ids = ed.load_hf(DIRECTORY, text_only=True), np.arange(1, 9)[None]
    assert text.config == dataclasses.replace(model.config, media=None)
    assert_array_equal(text(ids).logits, model(ids).logits)
    ed.save_hf(text, tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text())["model_type"] == "phi3"


@pytest.mark.slow
def test_adapters_of_modalities_match_peft(model, tmp_path):
    """They are in the subdirectories `vision-lora` and `speech-lora`."""
    draws, tensors, module = np.random.default_rng(0), {}, "model.layers.{}.self_attn.qkv_proj"
    for layer in range(2):
        for name, shape in (("A", (3, 8)), ("B", (24, 3))):
            pair = draws.normal(size=shape).astype(np.float32)
            tensors[f"base_model.model.{module.format(layer)}.lora_{name}.weight"] = pair
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    rule = dict(peft_type="LORA", r=3, lora_alpha=6, target_modules="layers.*(self_attn\\.qkv_proj)", bias="none")
    (tmp_path / "adapter_config.json").write_text(json.dumps(rule))
    merged = ed.merge_lora(load_peft(model, tmp_path))
    ed.save_hf(merged, tmp_path / "new")
    after, plain = load_file(tmp_path / "new" / "model.safetensors"), load_file(DIRECTORY / "model.safetensors")
    for layer in range(2):
        name = module.format(layer)
        down, up = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        assert_allclose(after[f"{name}.weight"], plain[f"{name}.weight"] + 2 * up @ down, atol=1e-5)


# --- layers ---


def test_tokens_of_tiles_precede_the_overview():
    """Three lines of four tile tokens, a separator vector, and one vector at the end of each line."""
    tiles = TilesConfig(side=4, sizes=(), whole="last")
    order = token_order(tiles, 8, 4, 2, (3, 2)).tolist()
    assert order == [4, 5, LINE_END, 6, 7, LINE_END, 8, 9, LINE_END, DIVIDER, 0, 1, LINE_END, 2, 3, LINE_END]


@pytest.mark.slow
def test_long_clips_are_split_and_padded(model):
    """After the convolutions. The last piece is padded with zeros, to which its tokens attend."""
    config = model.config
    stem = dataclasses.replace(config.media.audio.stem, longest=2)
    audio = dataclasses.replace(config.media.audio, stem=stem)
    short = dataclasses.replace(config, media=dataclasses.replace(config.media, audio=audio))
    spectra = np.random.default_rng(0).normal(size=(1, 20, 9)).astype(np.float32)
    inputs = dict(input_ids=np.full((1, 3), AUDIO), audio_input_features=spectra)
    encoder = model.audio
    cut = dataclasses.replace(encoder, stem=dataclasses.replace(encoder.stem, config=stem), config=audio)
    found = dataclasses.replace(model, config=short, audio=cut).encode(ed.Media.create(short, **inputs)).features[:3]
    rows = ed.Media.create(config, **inputs).audio
    ctx = ed.ForwardContext(jnp.asarray(rows.positions), shared={DISTANCE_BIAS: encoder.distance_bias})
    x = encoder.stem(rows, ctx)[0]
    pieces = jnp.stack([x[:2], jnp.stack([x[2], jnp.zeros_like(x[2])])])
    ctx = dataclasses.replace(ctx, positions=jnp.asarray([[0, 1], [0, 1]]))
    for segment in encoder.scanned_layers:
        pieces = segment(pieces, ctx).x
    wanted = encoder.projector(pieces, ctx).reshape(4, -1)[:3]
    assert_allclose(found, wanted, atol=1e-5)


def test_numbers_of_placeholders_and_features_are_equal(tmp_path):
    """With the settings of a directory, and images with partial padding of tokens."""
    rules = dict(
        processor_class="Phi4MultimodalProcessor", image_processor=dict(size=dict(height=8, width=8), patch_size=2),
        audio_processor=dict(feature_size=9, audio_compression_rate=8), image_token="<i>", audio_token="<a>",
    )  # fmt: skip
    (tmp_path / "processor_config.json").write_text(json.dumps(rules))
    family, settings = read_settings(Directory(tmp_path))
    assert family.images is not None and family.audio is not None
    images, audio = family.images(settings), family.audio(settings)
    draws, limits = np.random.default_rng(0), MediaLimits()
    sizes = [(23, 30), (11, 16), (20, 11)]
    files = [images.process(draws.integers(0, 256, (*size, 3), np.uint8), limits, "x") for size in sizes]
    spectra, texts = audio.process_all([draws.normal(size=4000).astype(np.float32)], limits, ["y"])
    text = "".join([*(one.text for one in files), *texts])
    ids = np.asarray([[53] * text.count("<i>") + [AUDIO] * text.count("<a>")])
    media = ed.Media.create(decode(CONTENT), ids, **images.join(files), **spectra)
    assert media.images is not None and media.images.masked is not None and np.any(media.images.masked)
    assert text.count("<a>") == 3 and np.array_equal(np.asarray(media.index)[0], np.arange(ids.size))


MASK = np.ones((1, 2, 4, 4))
IMAGE = dict(input_ids=np.full((1, 13), 53), image_pixel_values=np.zeros((1, 2, 3, 8, 8)), image_sizes=[[8, 8]])
REFUSED_INPUTS = {
    "sizes": (dict(image_sizes=[[8, 12]]), ["image_sizes=[[8, 12]]", 8]),
    "mask_shape": (dict(image_attention_mask=np.ones((1, 2, 4, 3))), ["image_attention_mask", "[1, at least 2, 4, 4]"]),
    "mask_empty": (dict(image_attention_mask=np.zeros((1, 2, 4, 4))), ["image_attention_mask", "rectangle"]),
    "mask_late": (dict(image_attention_mask=MASK * (np.arange(4) > 0)), ["image_attention_mask", "rectangle"]),
    "twice": (dict(pixel_values=np.zeros((1, 2, 3, 8, 8))), ["image_pixel_values", "pixel_values"]),
}


@pytest.mark.parametrize("given, names", REFUSED_INPUTS.values(), ids=REFUSED_INPUTS)
def test_refuses_inconsistent_arrays(given, names):
    config = decode(CONTENT)
    assert ed.Media.create(config, **IMAGE, image_attention_mask=MASK).images is not None
    with refused(ed.DataError, *names):
        ed.Media.create(config, **IMAGE | given)


# --- settings ---


def test_published_configuration():
    config = ed.get_config("phi4-multimodal-4.7b")
    assert decode(settings("phi4-multimodal-4.7b", {})) == config
    assert decode(FAMILIES["phi4_multimodal"].encode(config)) == config
    # without adapters, and without the unused head of the image encoder
    assert ed.count_parameters(config) == 4_728_765_840
