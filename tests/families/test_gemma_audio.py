"""Gemma 4 with audio against transformers: settings, tensors, and independence of the clips in a batch."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import eqx_decoders as ed
from eqx_decoders.families.gemma.audio import ConformerSizes, gemma4_audio
from eqx_decoders.families.gemma.gemma4_vision import gemma4_vision
from eqx_decoders.families.registry import FAMILIES, find_family
from eqx_decoders.sharding.axes import axes, frozen, named_leaves
from eqx_decoders.sharding.rules import WEIGHTS
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused
from tests.families.samples import FIXTURES, replaced


DIRECTORY = FIXTURES / "gemma4_audio"
ARRAYS = dict(np.load(DIRECTORY / "media.npz"))
INPUTS = {name.removeprefix("inputs/"): x for name, x in ARRAYS.items() if name.startswith("inputs/")}
IDS = INPUTS["input_ids"]
CONTENT = json.loads((DIRECTORY / "config.json").read_text())
AUDIO, IMAGE = CONTENT["audio_token_id"], CONTENT["image_token_id"]


def decode(content) -> ed.DecoderConfig:
    return find_family(content["model_type"]).decode(json.loads(json.dumps(content)))[0]


def changed(**keys) -> dict:
    """Return the settings of the stored model with changed settings of the audio encoder."""
    return CONTENT | {"audio_config": CONTENT["audio_config"] | keys}


@pytest.fixture(scope="module")
def model():
    return ed.load_hf(DIRECTORY, attention="dot")


@pytest.fixture(scope="module")
def media(model):
    return ed.Media.create(model.config, **INPUTS)


@pytest.fixture(scope="module")
def encode(model):
    """Return the features of audio with these numbers of frames, in an array that is `more` frames longer."""

    @eqx.filter_jit
    def features(model, media):
        return model.encode(media).features

    def run(lengths, *, more=0, seed=0, by=model, **given):
        longest = max(lengths)
        audio = [np.random.default_rng((seed, length)).normal(size=(length, 8)) for length in lengths]
        whole = np.stack([np.pad(each, ((0, longest + more - len(each)), (0, 0))) for each in audio])
        mask = np.arange(longest + more) < np.asarray(lengths)[:, None]
        counts = [-(-length // 4) for length in lengths]
        ids = np.full((1, sum(counts)), AUDIO)
        made = ed.Media.create(by.config, ids, input_features=whole, input_features_mask=mask, **given)
        found = np.asarray(features(by, made))[: sum(counts)]
        return np.split(found, np.cumsum(counts)[:-1])

    return run


# --- comparison with transformers ---


@pytest.mark.slow
def test_features_and_logits_match_transformers(model, media):
    features = np.asarray(model.encode(media).features)[: len(ARRAYS["features"])]
    assert_allclose(features, ARRAYS["features"], atol=1e-5)
    assert_allclose(model(IDS, media=media).logits, ARRAYS["logits"], atol=1e-4)


@pytest.mark.slow
def test_greedy_tokens_match_transformers(model, media):
    count = ARRAYS["generated_ids"].shape[1]
    made = ed.generate(model, IDS, media=media, max_new_tokens=count, sampler=ed.Greedy(), stop_ids=())
    assert np.array_equal(made, ARRAYS["generated_ids"])


@pytest.mark.slow
def test_export_is_bit_equal(model, tmp_path):
    ed.save_hf(model, tmp_path / "new")
    before, after = (load_file(folder / "model.safetensors") for folder in (DIRECTORY, tmp_path / "new"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    new = json.loads((tmp_path / "new" / "config.json").read_text())
    assert decode(new) == decode(CONTENT) == model.config
    assert new["audio_token_id"] == AUDIO and new["boa_token_id"] == CONTENT["boa_token_id"]
    assert {"eoa_token_index", "image_token_id"} <= new.keys()
    for key, value in new["audio_config"].items():
        assert CONTENT["audio_config"].get(key, value) == value, key


@pytest.mark.slow
def test_decoder_without_encoders(model):
    text = ed.load_hf(DIRECTORY, attention="dot", text_only=True)
    assert text.audio is None and text.config.media is None
    ids = np.where(IDS > 50, 1, IDS)[:, :12]
    assert_array_equal(text(ids).logits, model(ids).logits)


def test_clipped_matrices(model):
    """All matrices of the layers except the relative position embeddings. The bounds are not trained."""
    bounded = {path.removesuffix(".input_min") for path in axes(model) if path.endswith(".input_min")}
    own = {path.split("unit.0.")[1] for path in bounded if path.startswith("audio.")}
    assert own == {
        *(f"mixer.{name}" for name in ("query", "key", "value", "out")),
        *(f"{place}.layer.{name}" for place in ("pre_layers.0", "post_layers.1") for name in ("up", "down")),
        *("post_layers.0.layer.into", "post_layers.0.layer.out"),
    }
    assert frozen(model) == {path for path in named_leaves(model) if path.endswith(("_min", "_max"))}


# --- settings ---


@pytest.mark.slow
def test_published_settings():
    """The audio settings of e2b and e4b as transformers writes them, including its default keys."""
    table = dict(
        _name_or_path="", architectures=None, attention_chunk_size=12, attention_context_left=13,
        attention_context_right=0, attention_invalid_logits_value=-1e9, attention_logit_cap=50.0,
        chunk_size_feed_forward=0, conv_kernel_size=5, dtype="bfloat16", gradient_clipping=1e10, hidden_act="silu",
        hidden_size=1024, id2label={"0": "LABEL_0"}, initializer_range=0.02, is_encoder_decoder=False,
        model_type="gemma4_audio", num_attention_heads=8, num_hidden_layers=12, output_attentions=False,
        output_proj_dims=1536, problem_type=None, residual_weight=0.5, return_dict=True, rms_norm_eps=1e-6,
        subsampling_conv_channels=[128, 32], use_clipped_linears=True,
    )  # fmt: skip
    for content in (table, {}):
        assert decode(CONTENT | {"audio_config": content}).media.audio == gemma4_audio(out_dim=16)
    for name, dim, count in (("e2b", 1536, 5_104_298_467), ("e4b", 2560, 7_941_101_802)):
        config = ed.get_config(f"gemma4-{name}-vision")
        assert config.media.audio == gemma4_audio(out_dim=dim) and config.media.audio_token == 258_881
        assert ed.count_parameters(config) == count
    assert ed.get_config("gemma4-31b-vision").media.audio is None


@pytest.mark.slow(fast=("0", "1", "2", "3"))
@pytest.mark.parametrize("seed", range(8))
def test_settings_of_random_models_round_trip(seed):
    draw = np.random.default_rng(seed)
    heads, bands = int(draw.integers(1, 4)), 4 * int(draw.integers(1, 6))
    sizes = ConformerSizes(
        embed_dim=heads * int(draw.integers(1, 9)),
        heads=heads,
        layers=int(draw.integers(1, 4)),
        mel_bands=bands,
        filters=(bands + int(draw.integers(4)), int(draw.integers(1, 9))),
        feature_dim=int(draw.integers(1, 20)),
        taps=int(draw.integers(1, 8)),
        feed_forward_scale=float(draw.uniform(0.1, 1)),
        chunk=int(draw.integers(1, 20)),
        left=int(draw.integers(2, 20)),
        right=int(draw.integers(0, 9)),
        soft_cap=float(draw.uniform(1, 60)),
        eps=float(draw.choice([1e-6, 1e-3])),
        clip=float(draw.choice([1e10, 3.0])),
        activation=str(draw.choice(["silu", "gelu", "gelu_tanh"])),
        clipped=bool(seed % 2),
    )
    audio = gemma4_audio(sizes, out_dim=16)
    plain = decode(CONTENT)
    seen = plain.media.vision if seed % 3 else None  # audio and images are optional
    text = dataclasses.replace(plain, media=None)
    config = gemma4_vision(
        text, seen, audio=audio, image_spans=False, audio_token=seed + 3, image_token=1, video_token=2
    )
    written = FAMILIES["gemma4"].encode(config)
    assert decode(written) == config and FAMILIES["gemma4"].encode(decode(written)) == written
    assert ed.DecoderConfig.from_json(config.to_json()) == config


def test_placeholder_tokens_must_differ():
    with refused(ed.EqxDecodersError, "ids"):
        decode(CONTENT | {"audio_token_id": IMAGE})


def test_unsupported_encoders_are_not_written():
    config = decode(CONTENT)
    audio = config.media.audio
    block = audio.blocks[0]
    reversed_layers = dataclasses.replace(block, post_layers=block.post_layers[::-1])
    others = {
        "EncoderConfig.blocks.0.post_layers.0": dataclasses.replace(audio, blocks=(reversed_layers,) * 2),
        "media.audio.blocks[1].mixer.left=5": replaced(audio, "blocks.1.mixer.left", 5),
        "media.audio.stem.mel_bands=12": replaced(audio, "stem.mel_bands", 12),
        "subsampling_conv_channels=[8]": replaced(audio, "stem.filters", (8,)),
    }
    for name, other in others.items():
        with refused(ed.ConversionError, "Gemma4", name):
            FAMILIES["gemma4"].encode(replaced(config, "media.audio", other))


# --- audio ---


LENGTHS = [1, 4, 5, 15, 16, 17, 33, 47, 64]


@pytest.mark.slow
def test_clips_of_a_batch_equal_separate_clips(encode):
    """One frame, and lengths around chunk boundaries; padded, and packed with other clips."""
    alone = encode([47])[0], encode([16])[0], encode([1])[0]
    together = dict(zip(LENGTHS, encode(LENGTHS, more=3), strict=True))
    for length, own in zip((47, 16, 1), alone, strict=True):
        assert_allclose(own, together[length], atol=2e-5)
    backwards = encode(LENGTHS[::-1])
    for one, other in zip(backwards[::-1], together.values(), strict=True):
        assert_allclose(one, other, atol=2e-5)


def test_padding_has_no_effect(model, media):
    """transformers' inputs have finite values in the padding. Infinite values must not change the features either."""
    mask = INPUTS["input_features_mask"]
    other = np.where(mask[..., None], INPUTS["input_features"], np.nan)
    again = ed.Media.create(model.config, **INPUTS | {"input_features": other})
    jax.tree.map(assert_array_equal, again, media)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [dict(scan=False), dict(remat="full"), dict(remat="none")],
)
def test_execution_options_do_not_change_the_result(model, encode, options):
    """With and without scan and remat."""
    for one, other in zip(encode([33, 5], by=model.replace(**options)), encode([33, 5]), strict=True):
        assert_allclose(one, other, atol=2e-5)


@pytest.mark.slow
def test_gradients_equal_finite_differences_with_and_without_scan(model, media):
    wanted = jnp.asarray(ARRAYS["features"])

    @eqx.filter_jit
    def loss(model):
        return jnp.mean(jnp.square(model.encode(media).features[: len(wanted)] - 2 * wanted))

    gradient = eqx.filter_jit(eqx.filter_grad(loss))(model)
    again = eqx.filter_jit(eqx.filter_grad(loss))(model.replace(scan=False))
    leaves = {name: leaf for name, leaf in named_leaves(gradient).items() if name.startswith("audio.")}
    other = named_leaves(again)
    generator = np.random.default_rng(0)
    for name, leaf in leaves.items():
        assert_allclose(leaf, other[name], atol=1e-4, rtol=1e-3, err_msg=name)
    for name in ("audio.stem.convolutions.0.kernel", "audio.scanned_layers.0.unit.0.residual.norm.scale",
                 "audio.scanned_layers.0.unit.0.mixer.scale", "audio.scanned_layers.0.unit.0.post_layers.0.layer.taps",
                 "audio.projector.layers.1.kernel"):  # fmt: skip
        way = generator.normal(size=leaves[name].shape).astype(np.float32)
        way /= np.linalg.norm(way)

        def at(step, name=name, way=way):
            moved = jax.tree_util.tree_map_with_path(
                lambda path, leaf: (
                    leaf + step * way if jax.tree_util.keystr(path, simple=True, separator=".") == name else leaf
                ),
                model,
            )
            return float(loss(moved))

        slope = (at(2e-3) - at(-2e-3)) / 4e-3
        assert float(jnp.sum(leaves[name] * way)) == pytest.approx(slope, rel=5e-2, abs=5e-3), name


@pytest.mark.slow
def test_mesh_does_not_change_the_features(model):
    """With sharded rows, sharded tokens, and sharded heads."""
    wanted = np.tile(ARRAYS["logits"], (2, 1, 1))
    ids = np.tile(IDS, (2, 1))
    twice = {name: np.concatenate([INPUTS[name]] * 2) for name in INPUTS if name not in ("input_ids", "pixel_values")}
    twice["pixel_values"] = np.concatenate([INPUTS["pixel_values"]] * 2)
    for sizes, groups in ((dict(data=2, fsdp=2, context=2), 2), (dict(data=2, tensor=2, context=2), 1)):
        placed = model.place(ed.Layout.create(**sizes, weights=WEIGHTS | {"kv_heads": ()}))
        given = ed.Media.create(model.config, ids, **twice, groups=groups)
        assert_allclose(np.asarray(placed(ids, media=given).logits), wanted, atol=2e-4)


def created(**given):
    whole = dict(input_ids=np.full((1, 3), AUDIO), input_features=np.zeros((1, 12, 8)))
    whole |= dict(input_features_mask=np.ones((1, 12)))
    ids = (whole | given).pop("input_ids")
    return ed.Media.create(
        decode(CONTENT), ids, **{name: x for name, x in (whole | given).items() if name != "input_ids"}
    )


REFUSED = {
    "placeholders": (dict(input_ids=np.full((1, 4), AUDIO)), ["4 audio placeholders", "1 audio", "3 features"]),
    "features": (dict(input_features=np.zeros((1, 8, 12))), ["(1, 8, 12)", "[audio, frames, 8]"]),
    "mask_shape": (dict(input_features_mask=np.ones((1, 11))), ["input_features_mask", "(1, 11)", "(1, 12)"]),
    "mask_empty": (dict(input_features_mask=np.zeros((1, 12))), ["input_features_mask"]),
    "mask_late": (dict(input_features_mask=np.arange(12)[None] > 1), ["first frames"]),
    "twice": (dict(feature_attention_mask=np.ones((1, 12))), ["input_features_mask", "feature_attention_mask"]),
}


@pytest.mark.parametrize(("given", "names"), REFUSED.values(), ids=REFUSED)
def test_refuses_inconsistent_arrays(given, names):
    with refused(ed.DataError, *names):
        created(**given)


def test_accepts_both_names_of_the_mask():
    mask = np.arange(12)[None] < 9
    one = created(input_features_mask=mask)
    other = created(input_features_mask=None, feature_attention_mask=mask)
    jax.tree.map(assert_array_equal, one, other)
    assert one.audio.real.sum() == 9
    assert created(input_features_mask=None).audio.real.sum() == 12
