"""Gemma 3 and 4 with images: settings and tensors in both directions, clipped products, and images of any size."""

import dataclasses
import itertools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqx_decoders as ed
from eqx_decoders.families._siglip import siglip
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.gemma.gemma3_vision import gemma3_vision
from eqx_decoders.families.gemma.gemma4 import gemma4
from eqx_decoders.families.gemma.gemma4_vision import gemma4_encoder, gemma4_vision
from eqx_decoders.families.gemma.text import gemma3
from eqx_decoders.families.registry import FAMILIES, find_family
from eqx_decoders.families.vision_fields import EncoderSizes
from eqx_decoders.layers.embedding.per_layer_embedding import PerLayerEmbeddingConfig
from eqx_decoders.layers.mask import Causal, SlidingWindow
from eqx_decoders.numerics.clipped_weight import ClippedWeight, with_clipping
from eqx_decoders.numerics.einsum import einsum
from eqx_decoders.sharding.axes import frozen, named_leaves
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused
from tests.models import filled, layout_of


IMAGE, VIDEO, VOCAB = 29, 30, 32
SHAPE = DecoderSizes(
    vocab_size=VOCAB, embed_dim=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=24, tied=True,
    activation="gelu_tanh",
)  # fmt: skip
MASKS = (SlidingWindow(3), Causal())
SIGLIP = siglip(EncoderSizes(embed_dim=8, layers=2, heads=2, mlp_dim=12, out_dim=16, size=2), side=4)
_SIZES = EncoderSizes(embed_dim=12, layers=2, heads=2, mlp_dim=20, out_dim=16, size=2)
EYE = gemma4_encoder(_SIZES, head_dim=8, positions=8, standardize=True)
CLIPPED = gemma4_encoder(_SIZES, kv_heads=1, head_dim=4, positions=8, clipped=True)
PER_LAYER = PerLayerEmbeddingConfig(features=4, vocab_size=VOCAB)
PLAIN = gemma4(SHAPE, masks=MASKS, heads=((1, 8), (1, 16)))
TOKENS = dict(image_token=IMAGE, video_token=VIDEO)
MODELS = {
    "gemma3": gemma3_vision(gemma3(SHAPE, masks=MASKS), SIGLIP, image_token=IMAGE),
    "whole": gemma4_vision(PLAIN, EYE, image_spans=True, **TOKENS),
    "clipped": gemma4_vision(
        gemma4(SHAPE, masks=MASKS, heads=((1, 8), (1, 16)), per_layer=PER_LAYER),
        CLIPPED,
        image_spans=False,
        lookup_token=5,
        **TOKENS,
    ),
}
IDS = np.asarray([[7, IMAGE, IMAGE, IMAGE, IMAGE, 9, 4, 2], [3, 8, 8, IMAGE, IMAGE, 1, IMAGE, IMAGE]], np.int32)
TEXT = np.asarray([[7, 1, 3, 9, 4]], np.int32)


def patches_of(pixels: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut an image `[channels, height, width]` like the processor of Gemma 4.

    Returns patches, and their columns and rows.
    """
    cut = range(0, pixels.shape[1], size), range(0, pixels.shape[2], size)
    places = list(itertools.product(*cut))
    made = [np.moveaxis(pixels[:, y : y + size, x : x + size], 0, -1).reshape(-1) for y, x in places]
    return np.stack(made), np.asarray([(x // size, y // size) for y, x in places])


def padded(images: list[np.ndarray], length: int, order: int | None = None) -> dict[str, np.ndarray]:
    """Pad images to `length` patches. `order`: seed of a random order of the patches."""
    values = np.zeros((len(images), length, 12), np.float32)
    places = np.full((len(images), length, 2), -1)
    for index, image in enumerate(images):
        own, where = patches_of(image, 2)
        moved = np.arange(len(own)) if order is None else np.random.default_rng(order).permutation(len(own))
        values[index, : len(own)], places[index, : len(own)] = own[moved], where[moved]
    return dict(pixel_values=values, image_position_ids=places)


def random_images(*shapes: tuple[int, int]) -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [generator.uniform(size=(3, *shape)).astype(np.float32) for shape in shapes]


IMAGES = random_images((8, 8), (4, 8), (8, 4))  # with 4, 2 and 2 tokens


def image_arrays(config) -> dict[str, np.ndarray]:
    if config is MODELS["gemma3"]:  # all images have the same size
        return dict(pixel_values=np.random.default_rng(1).normal(size=(2, 3, 8, 8)).astype(np.float32))
    return padded(IMAGES, 18)


def decode(content) -> ed.DecoderConfig:
    return find_family(content["model_type"]).decode(json.loads(json.dumps(content)))[0]


def encode(config) -> dict:
    return FAMILIES["gemma3" if config.media.vision.stem.bias else "gemma4"].encode(config)


def sample(name: str, **keys) -> dict:
    return encode(MODELS[name]) | keys


def with_random_bounds(model):
    """Replace bounds by random values on both sides of 0, like measured bounds."""
    ends = {"input_min": -0.5, "input_max": 0.4, "output_min": -0.3, "output_max": 0.6}

    def changed(path, leaf):
        end = ends.get(jax.tree_util.keystr(path, simple=True, separator=".").split(".")[-1])
        return leaf if end is None else end + 0.1 * jnp.tanh(leaf)

    return jax.tree_util.tree_map_with_path(changed, model)


@pytest.fixture(scope="module", params=["gemma3", pytest.param("whole", marks=pytest.mark.slow), "clipped"])
def model(request):
    return with_random_bounds(filled(MODELS[request.param], attention="dot"))


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    ed.save_hf(model, folder)
    return folder


def same_weights(one, other):
    ours, theirs = named_leaves(one), named_leaves(other)
    assert ours.keys() == theirs.keys()
    for name, leaf in ours.items():
        assert_array_equal(np.asarray(leaf), np.asarray(theirs[name]), err_msg=name)


# --- settings ---


@pytest.mark.parametrize("name", MODELS)
def test_settings_round_trip(name):
    written = encode(MODELS[name])
    assert decode(written) == MODELS[name]
    assert encode(decode(written)) == written


@pytest.mark.parametrize("seed", range(12))
def test_settings_of_random_models_round_trip(seed):
    draw = np.random.default_rng(seed)
    heads, merge, layers = (int(draw.integers(1, 4)) for _ in range(3))
    sizes = dict(embed_dim=12 * heads, layers=layers, heads=heads, mlp_dim=int(draw.integers(1, 40)), out_dim=16)
    sizes |= dict(size=int(draw.integers(1, 20)), merge=merge)
    eps = float(draw.choice([1e-6, 1e-5]))
    sizes |= dict(activation=str(draw.choice(["gelu", "gelu_tanh", "silu"])))
    token = int(draw.integers(0, 40))
    if seed % 2:
        side, channels = merge * int(draw.integers(1, 5)), int(draw.integers(1, 5))
        vision = siglip(EncoderSizes(**sizes, channels=channels), side=side, eps=eps)
        config = gemma3_vision(gemma3(SHAPE, masks=MASKS), vision, image_token=token)
    else:
        flags = [bool(draw.integers(2)) for _ in range(3)]
        vision = gemma4_encoder(
            EncoderSizes(**sizes),
            eps=eps,
            kv_heads=1,
            head_dim=4 * int(draw.integers(1, 5)),
            positions=int(draw.integers(1, 99)),
            theta=float(draw.integers(2, 99)),
            standardize=flags[0],
            clipped=flags[1],
        )
        places = dict(image_token=token, video_token=token + 1, lookup_token=int(draw.integers(9)))
        config = gemma4_vision(PLAIN, vision, image_spans=flags[2], **places)
    assert decode(encode(config)) == config
    assert ed.DecoderConfig.from_json(config.to_json()) == config


SIGLIP_KEYS = dict(
    hidden_size=1152, image_size=896, intermediate_size=4304, model_type="siglip_vision_model", num_attention_heads=16,
    num_hidden_layers=27, patch_size=14, vision_use_head=False,
)  # fmt: skip
GEMMA3_4B = dict(
    architectures=["Gemma3ForConditionalGeneration"], boi_token_index=255_999, eoi_token_index=256_000,
    eos_token_id=[1, 106], image_token_index=262_144, initializer_range=0.02, mm_tokens_per_image=256,
    model_type="gemma3", torch_dtype="bfloat16", transformers_version="4.50.0.dev0", vision_config=SIGLIP_KEYS,
    text_config=dict(
        hidden_size=2560, intermediate_size=10_240, model_type="gemma3_text", num_hidden_layers=34, sliding_window=1024,
        rope_scaling=dict(factor=8.0, rope_type="linear"),
    ),
)  # fmt: skip
GEMMA4_31B = dict(
    architectures=["Gemma4ForConditionalGeneration"], audio_config=None, audio_token_id=258_881, boa_token_id=256_000,
    boi_token_id=255_999, dtype="bfloat16", eoa_token_id=258_883, eoa_token_index=258_883, eoi_token_id=258_882,
    eos_token_id=[1, 106], image_token_id=258_880, initializer_range=0.02, model_type="gemma4",
    tie_word_embeddings=True, transformers_version="5.7.0", video_token_id=258_884, vision_soft_tokens_per_image=280,
    text_config=dict(
        attention_bias=False, attention_dropout=0.0, attention_k_eq_v=True, bos_token_id=2, dtype="bfloat16",
        enable_moe_block=False, eos_token_id=1, expert_intermediate_size=None, final_logit_softcapping=30.0,
        global_head_dim=512, head_dim=256, hidden_activation="gelu_pytorch_tanh", hidden_size=5376,
        hidden_size_per_layer_input=0, initializer_range=0.02, intermediate_size=21_504,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 10, max_position_embeddings=262_144,
        model_type="gemma4_text", moe_intermediate_size=None, num_attention_heads=32, num_experts=None,
        num_global_key_value_heads=4, num_hidden_layers=60, num_key_value_heads=16, num_kv_shared_layers=0,
        pad_token_id=0, rms_norm_eps=1e-6, sliding_window=1024, tie_word_embeddings=True, top_k_experts=None,
        use_bidirectional_attention="vision", use_cache=True, use_double_wide_mlp=False, vocab_size=262_144,
        vocab_size_per_layer_input=262_144,
        rope_parameters=dict(
            full_attention=dict(partial_rotary_factor=0.25, rope_theta=1e6, rope_type="proportional"),
            sliding_attention=dict(rope_theta=10_000.0, rope_type="default"),
        ),
    ),
    vision_config=dict(
        _name_or_path="", architectures=None, attention_bias=False, attention_dropout=0.0, chunk_size_feed_forward=0,
        default_output_length=280, dtype="bfloat16", global_head_dim=72, head_dim=72,
        hidden_activation="gelu_pytorch_tanh", hidden_size=1152, id2label={"0": "LABEL_0"}, initializer_range=0.02,
        intermediate_size=4304, is_encoder_decoder=False, label2id={"LABEL_0": 0}, max_position_embeddings=131_072,
        model_type="gemma4_vision", num_attention_heads=16, num_hidden_layers=27, num_key_value_heads=16,
        output_attentions=False, patch_size=16, pooling_kernel_size=3, position_embedding_size=10_240,
        problem_type=None, return_dict=True, rms_norm_eps=1e-6, standardize=True, use_clipped_linears=False,
        rope_parameters=dict(rope_theta=100.0, rope_type="default"),
    ),
)  # fmt: skip


@pytest.mark.slow(fast=("4b",))
@pytest.mark.parametrize(
    ("name", "content"), [("gemma3-4b-vision", GEMMA3_4B), ("gemma4-31b-vision", GEMMA4_31B)], ids=["4b", "31b"]
)
def test_published_settings(name, content):
    family = find_family(content["model_type"])
    config, kept = family.decode(json.loads(json.dumps(content)))
    assert config == ed.get_config(name)
    assert kept["eos_token_id"] == [1, 106]
    assert decode(kept | family.encode(config)) == config


@pytest.mark.slow(fast=("4b-4300079472",))
@pytest.mark.parametrize(("name", "count"), [("4b", 4_300_079_472), ("12b", 12_187_325_040), ("27b", 27_432_406_640)])
def test_parameter_counts_of_published_models(name, count):
    assert ed.count_parameters(ed.get_config(f"gemma3-{name}-vision")) == count


@pytest.mark.parametrize("name", ["gemma4-e2b", "gemma4-e4b", "gemma4-26b", "gemma4-31b"])
def test_decoders_with_encoders_equal_text_decoders(name):
    config = ed.get_config(f"{name}-vision")
    spans = [block.mixer.spans for block in config.blocks]
    large = name in ("gemma4-26b", "gemma4-31b")
    assert spans == [large and isinstance(block.mixer.mask, SlidingWindow) for block in config.blocks]
    assert config.media.vision.clipped != large and config.media.spans == large
    plain = [dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, spans=False)) for block in config.blocks]
    assert dataclasses.replace(config, blocks=tuple(plain), media=None) == ed.get_config(name)


def test_equivalent_settings():
    content = sample("gemma3")
    content["image_token_id"] = content.pop("image_token_index")
    content["vision_config"] = content["vision_config"] | {"vision_use_head": True}
    assert decode(content) == MODELS["gemma3"]
    content = sample("whole")
    content["vision_config"]["rope_parameters"]["rope_type"] = "default"
    del content["audio_config"]
    assert decode(content) == MODELS["whole"]


@pytest.mark.parametrize(
    ("name", "table", "keys", "names"),
    [
        ("whole", None, dict(audio_config={"hidden_size": 9}), ["audio_config", "hidden_size=9"]),
        ("whole", None, dict(vision_config=None), ["vision_config", "text_only=True"]),
        ("gemma3", None, dict(vision_config=None), ["vision_config"]),
        ("gemma3", None, dict(mm_tokens_per_image=3), ["mm_tokens_per_image=3"]),
        ("gemma3", None, dict(mm_tokens_per_image=9), ["mm_tokens_per_image=9", "4 patches"]),
        ("gemma3", None, dict(image_token_id=3), ["image_token_id=3", "image_token_index=29"]),
        ("gemma3", None, dict(text_config=None), ["text_config"]),
        ("gemma3", "text_config", dict(final_logit_softcapping=30.0), ["final_logit_softcapping=30.0", "null"]),
        ("gemma3", "vision_config", dict(image_size=9), ["image_size=9", "patch_size=2"]),
        ("gemma3", "vision_config", dict(num_attention_heads=3), ["hidden_size=8"]),
        ("gemma3", "vision_config", dict(new=1), ["vision_config", "new"]),
        ("whole", "vision_config", dict(attention_bias=True), ["attention_bias=true"]),
        ("whole", "vision_config", dict(rope_parameters=dict(rope_type="yarn")), ["rope_type=yarn"]),
        ("whole", "text_config", dict(use_bidirectional_attention="all"), ["use_bidirectional_attention=all"]),
        ("whole", "text_config", dict(pad_token_id=-1), ["pad_token_id=-1"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value if isinstance(value, str) else "",
)
def test_unsupported_keys_are_refused(name, table, keys, names):
    content = sample(name)
    content |= keys if table is None else {table: content[table] | keys}
    with refused(ed.ConversionError, *names):
        decode(content)


def test_layers_with_bidirectional_attention_within_images():
    spans = {name: [block.mixer.spans for block in config.blocks] for name, config in MODELS.items()}
    assert spans == {"gemma3": [True, True], "whole": [True, False], "clipped": [False, False]}
    for name, config in MODELS.items():
        given = ed.Media.create(config, IDS, **image_arrays(config)).spans
        assert (given is None) == (name == "clipped")


# --- tensors ---


@pytest.mark.slow
def test_exported_model_has_equal_logits(model, exported):
    again = ed.load_hf(exported, attention="dot")
    same_weights(again, model)
    again = dataclasses.replace(again, origin=None)
    assert again.config == model.config
    media = ed.Media.create(model.config, IDS, **image_arrays(model.config))
    one, other = (np.asarray(each(IDS, media=media).logits) for each in (model, again))
    assert_array_equal(one, other)
    assert np.isfinite(one).all()


@pytest.mark.slow
def test_decoder_without_encoders(model, exported, tmp_path):
    text = ed.load_hf(exported, attention="dot", text_only=True)
    assert text.vision is None and text.config.media is None
    assert_allclose(np.asarray(text(TEXT).logits), np.asarray(model(TEXT).logits), rtol=0, atol=1e-6)
    ed.save_hf(text, tmp_path / "text")
    content = json.loads((tmp_path / "text" / "config.json").read_text())
    assert content["model_type"] == ("gemma3_text" if model.config is MODELS["gemma3"] else "gemma4_text")
    again = ed.load_hf(tmp_path / "text")
    assert again.config == text.config
    same_weights(again, text)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["whole"], indirect=True)
def test_decoder_loads_without_an_unsupported_audio_encoder(exported, tmp_path):
    """The complete model cannot be loaded."""
    content = json.loads((exported / "config.json").read_text())
    tensors = load_file(exported / "model.safetensors")
    tensors["model.audio_tower.layers.0.weight"] = np.ones((2, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(content | {"audio_config": {"hidden_size": 2}}))
    with refused(ed.ConversionError, "hidden_size=2"):
        ed.load_hf(tmp_path)
    same_weights(ed.load_hf(tmp_path, text_only=True), ed.load_hf(exported, text_only=True))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["clipped"], indirect=True)
def test_bounds_are_scalars_of_each_layer(model, exported):
    tensors = load_file(exported / "model.safetensors")
    bounds = {name: tensor for name, tensor in tensors.items() if name.endswith(("_min", "_max"))}
    assert len(bounds) == 2 * 7 * 4 and {tensor.shape for tensor in bounds.values()} == {()}
    name = "model.vision_tower.encoder.layers.1.mlp.down_proj.output_max"
    assert bounds[name] == model.vision.scanned_layers[0].unit[0].mlp.down.output_max[1]
    assert frozen(model) == {path for path in named_leaves(model) if path.endswith(("_min", "_max"))}


@pytest.mark.slow(fast=("clipped",))
def test_sharded_weights_round_trip(model, exported, tmp_path):
    """Layers and their bounds are on different devices."""
    placed = ed.load_hf(exported, layout=ed.Layout.create(stage=2, fsdp=4))
    same_weights(placed, model)
    ed.save_hf(placed, tmp_path / "again")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", exported))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


OTHER_NAMES = {
    "published": {"vision_tower.": "vision_tower.vision_model."},
    "nested": {
        "language_model.model.": "model.language_model.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
    "both": {
        "language_model.model.": "model.language_model.",
        "vision_tower.": "model.vision_tower.vision_model.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gemma3"], indirect=True)
@pytest.mark.parametrize("names", OTHER_NAMES.values(), ids=OTHER_NAMES)
def test_alternative_tensor_names_of_gemma_3(names, model, exported, tmp_path):
    def named(name: str) -> str:
        begin = next((begin for begin in names if name.startswith(begin)), "")
        return names.get(begin, "") + name.removeprefix(begin)

    tensors = {named(name): tensor for name, tensor in load_file(exported / "model.safetensors").items()}
    tensors[named("vision_tower.head.probe")] = np.ones((1, 1, 8), np.float32)  # unused
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((exported / "config.json").read_text())
    same_weights(ed.load_hf(tmp_path), model)
    same_weights(ed.load_hf(tmp_path, text_only=True), ed.load_hf(exported, text_only=True))


# --- clipped products ---


PATTERN = "batch length embed, embed mlp -> batch length mlp"
X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)


def clipped(*bounds: float) -> ClippedWeight:
    return ClippedWeight(jnp.asarray(W), *(jnp.float32(bound) for bound in bounds))


@pytest.mark.slow(fast=("True",))
@pytest.mark.parametrize("flatten", [False, True])
def test_inputs_and_outputs_are_clipped(flatten):
    got = einsum(PATTERN, jnp.asarray(X), clipped(-0.5, 0.7, -0.9, 0.4), layout=layout_of(flatten=flatten))
    want = np.clip(np.clip(X, -0.5, 0.7) @ W, -0.9, 0.4)
    assert_allclose(np.asarray(got), want, rtol=0, atol=1e-6)
    assert (want == 0.4).any() and (want == -0.9).any()


@pytest.mark.slow
def test_infinite_bounds_have_no_effect():
    infinite = clipped(-np.inf, np.inf, -np.inf, np.inf)

    def loss(x, weight):
        return jnp.sum(jnp.sin(einsum(PATTERN, x, weight)))

    (x, w), (plain_x, plain_w) = (jax.grad(loss, argnums=(0, 1))(jnp.asarray(X), each) for each in (infinite, W))
    assert_array_equal(np.asarray(x), np.asarray(plain_x))
    assert_array_equal(np.asarray(w.weight), np.asarray(plain_w))
    assert loss(jnp.asarray(X), infinite) == loss(jnp.asarray(X), jnp.asarray(W))
    assert np.isnan(np.asarray(einsum(PATTERN, jnp.full((1, 1, 4), jnp.nan), infinite))).all()


@pytest.mark.slow
def test_gradients_are_zero_outside_of_the_bounds():
    """The ends of the interval have gradients, as in torch. The bounds have no gradient."""
    x = X.copy()
    x[0, 0, :2] = -0.5, 0.7
    weight = clipped(-0.5, 0.7, -0.9, 0.4)
    g = np.random.default_rng(2).normal(size=(2, 3, 5)).astype(np.float32)
    got_x, got_w = jax.grad(lambda x, w: jnp.sum(g * einsum(PATTERN, x, w)), argnums=(0, 1))(jnp.asarray(x), weight)
    inside, product = (x >= -0.5) & (x <= 0.7), np.clip(x, -0.5, 0.7) @ W
    passed = np.where((product >= -0.9) & (product <= 0.4), g, 0)
    assert_allclose(np.asarray(got_x), np.where(inside, passed @ W.T, 0), rtol=0, atol=1e-5)
    want = np.einsum("abi,abo->io", np.clip(x, -0.5, 0.7), passed)
    assert_allclose(np.asarray(got_w.weight), want, rtol=0, atol=1e-5)
    assert {float(got_w.input_min), float(got_w.input_max), float(got_w.output_min), float(got_w.output_max)} == {0.0}


@pytest.mark.slow
def test_new_bounds_do_not_change_an_encoder():
    plain = filled(MODELS["whole"], attention="dot")
    bounded = eqx.tree_at(lambda model: model.vision.scanned_layers, plain, with_clipping(plain.vision.scanned_layers))
    media = ed.Media.create(plain.config, IDS, **image_arrays(plain.config))
    one, other = (np.asarray(each.encode(media).features) for each in (plain, bounded))
    assert_array_equal(one, other)


# --- images ---


@pytest.fixture(scope="module")
def vision_model():
    return filled(MODELS["whole"], attention="dot")


def features(model, ids=IDS, count=8, **given) -> np.ndarray:
    return np.asarray(model.encode(ed.Media.create(model.config, ids, **given)).features)[:count]


def test_order_and_padding_of_patches_have_no_effect(vision_model):
    want = features(vision_model, **padded(IMAGES, 16))
    assert_array_equal(features(vision_model, **padded(IMAGES, 21, order=3)), want)


def test_unpatched_pixels_equal_patches_of_the_processor(vision_model):
    """Images of equal size may be passed as arrays of pixels."""
    ids, images = IDS[:1], random_images((8, 8))
    whole = features(vision_model, ids, 4, pixel_values=np.stack(images))
    assert_array_equal(whole, features(vision_model, ids, 4, **padded(images, 16)))


def test_video_frames_are_encoded_as_images(vision_model):
    given = padded(IMAGES, 16)
    video = dict(pixel_values_videos=given["pixel_values"], video_position_ids=given["image_position_ids"])
    ids = np.where(IDS == IMAGE, VIDEO, IDS)
    found = features(vision_model, ids, **video, num_frames_per_video=np.asarray([1, 2]))
    assert_array_equal(found, features(vision_model, **given))


@pytest.mark.slow
def test_per_layer_embeddings_of_placeholders_use_the_padding_token():
    """The projected part is computed from the image features."""
    model = filled(MODELS["clipped"], attention="dot")
    media = ed.Media.create(model.config, IDS, **image_arrays(model.config))
    want = np.asarray(model(IDS, media=media).logits)
    for token, same in ((IMAGE, True), (5, False)):
        other = eqx.tree_at(
            lambda m: m.per_layer_embedding.table, model, replace_fn=lambda x, t=token: x.at[t].add(1.0)
        )
        assert np.array_equal(np.asarray(other(IDS, media=media).logits), want) == same
