"""Images and audio beside tokens: what stands where, alone or together, at once or piece by piece."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.encoders.merge import merge_features
from eqx_decoders.layers.attention.block_indexer import BlockIndexerConfig
from eqx_decoders.model.init import with_mtp
from tests.compare import assert_allclose, assert_array_equal
from tests.encoders.samples import AUDIO, IMAGE, MEDIA, STEM, VIDEO, audio, media_decoder, patches, text
from tests.errors import refused
from tests.models import filled


GRIDS = [(1, 4, 4), (1, 2, 6), (1, 4, 2)]  # 4, 3 and 2 tokens
TOKENS = np.stack([text("iiiixxiiixx"), text("xxxxxiixxxx", 3)])


def bits(grids, seed=0):
    """One image's patches each."""
    return np.split(patches(grids, seed), np.cumsum([t * h * w for t, h, w in grids])[:-1])


@pytest.fixture(scope="module")
def model():
    return filled(media_decoder(), 1, attention="dot")


@pytest.fixture(scope="module")
def media(model):
    return ed.Media.create(model.config, TOKENS, pixel_values=patches(GRIDS), image_grid_thw=np.asarray(GRIDS))


@pytest.fixture(scope="module")
def whole(model, media):
    return model(TOKENS, media=media)


def close(one, other, tolerance=2e-5):
    assert_allclose(np.asarray(one), np.asarray(other), atol=tolerance, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2])
def test_features_of_an_image_alone_are_those_among_others(model, media, number):
    together, counts = np.asarray(model.encode(media).features), [rows * columns // 4 for _, rows, columns in GRIDS]
    begin, count = sum(counts[:number]), counts[number]
    given = dict(pixel_values=bits(GRIDS)[number], image_grid_thw=np.asarray([GRIDS[number]]))
    encoded = model.encode(ed.Media.create(model.config, np.full((1, count), IMAGE), **given))
    close(encoded.features[:count], together[begin : begin + count])


def test_features_replace_placeholders_in_order(model, media, whole):
    """Against a loop, also at position 0; deeper features come behind the first layers, for these tokens alone."""
    features = np.asarray(model.encode(media).features)
    embeds, number = np.asarray(model.embed_tokens(TOKENS)).copy(), 0
    for row, column in zip(*np.nonzero(TOKENS == IMAGE), strict=True):
        embeds[row, column], number = features[number], number + 1
    assert number == 9 and TOKENS[0, 0] == IMAGE
    inputs = ed.Inputs(spans=media.spans, rotary_positions=media.grid_positions)
    shallow = eqx.tree_at(lambda m: [p.layers[-1].kernel for p in m.vision.deepstack], model, replace_fn=jnp.zeros_like)
    close(model(embeds=embeds, inputs=inputs).logits, shallow(TOKENS, media=media).logits)
    assert np.abs(np.asarray(whole.logits - shallow(TOKENS, media=media).logits)).max() > 1e-3


def test_merging_is_the_loop():
    generator = np.random.default_rng(0)
    embeds = generator.normal(size=(4, 5, 3)).astype(np.float32)
    features = generator.normal(size=(2, 6, 3)).astype(np.float32)
    index = generator.integers(-1, 6, (4, 5))
    merged = embeds.copy()
    for row, column in np.ndindex(4, 5):
        if index[row, column] >= 0:
            merged[row, column] = features[row // 2, index[row, column]]
    assert_array_equal(merge_features(*map(jnp.asarray, (embeds, features, index))), merged)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(scan=False),
        dict(remat="full"),
        dict(attention="chunked"),
    ],
)
def test_every_way_to_run_gives_the_same(model, media, whole, options):
    close(model.replace(**options)(TOKENS, media=media).logits, whole.logits)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [5, 4, 9])
def test_a_cache_gives_what_the_whole_gives(model, whole, cut):
    """Images before, behind and across the border of a call, which an image itself may not cross."""
    cache = ed.init_cache(model.config, 2, 16, dtype=jnp.float32)
    own, found = bits(GRIDS), []
    for begin, end in ((0, cut), (cut, 11)):
        tokens = TOKENS[:, begin:end]
        here = {9: ([0, 1, 2], []), 4: ([0], [1, 2]), 5: ([0], [1, 2])}[cut][begin > 0]
        extra = {}
        if here:
            extra = dict(
                pixel_values=np.concatenate([own[index] for index in here]),
                image_grid_thw=np.asarray([GRIDS[index] for index in here]),
            )
        piece = ed.Media.create(model.config, tokens, **extra)
        out = model(tokens, cache=cache, media=piece)
        cache = out.cache
        found.append(np.asarray(out.logits))
    close(np.concatenate(found, axis=1), whole.logits)


@pytest.mark.slow
def test_decoding_goes_on_at_the_right_position(model, media):
    """One by one behind a prompt with images: what the whole would give; the offset is kept in the cache."""
    more = text("xxx", 7)[None].repeat(2, 0)
    everything = np.concatenate([TOKENS, more], axis=1)
    known = ed.Media.create(model.config, everything, pixel_values=patches(GRIDS), image_grid_thw=np.asarray(GRIDS))
    expected = model(everything, media=known).logits
    cache = model(TOKENS, media=media, cache=ed.init_cache(model.config, 2, 16, dtype=jnp.float32)).cache
    assert_array_equal(cache.rope_offset, [-4.0 + 2 - 3 + 3, -1.0 + 1 - 0.0])
    for step in range(3):
        out = model(more[:, step : step + 1], cache=cache)
        cache = out.cache
        close(out.logits[:, 0], expected[:, 11 + step])


@pytest.mark.slow
def test_generation_sees_the_images(model, media, whole):
    """The first new token is that of the whole; others depend on the image, and prompts may differ in length."""
    made = np.asarray(ed.generate(model, TOKENS, media=media, max_new_tokens=4, sampler=ed.Greedy()))
    assert_array_equal(made[:, 0], np.argmax(np.asarray(whole.logits)[:, -1], axis=-1))
    streamed = ed.stream(model, TOKENS, media=media, max_new_tokens=4, sampler=ed.Greedy())
    assert_array_equal(np.stack(list(streamed), axis=1), made)
    everything = np.concatenate([TOKENS, made[:, :3]], axis=1)
    known = ed.Media.create(model.config, everything, pixel_values=patches(GRIDS), image_grid_thw=np.asarray(GRIDS))
    again = np.argmax(np.asarray(model(everything, media=known).logits)[:, 10:], axis=-1)
    assert_array_equal(again, made)


@pytest.mark.slow
def test_two_images_swapped_swap_their_effect(model):
    tokens = np.stack([text("xxiixx"), text("xxiixx")])
    grid, own = (1, 2, 4), bits([(1, 2, 4)] * 2)

    def run(order):
        pixels = np.concatenate([own[index] for index in order])
        media = ed.Media.create(model.config, tokens, pixel_values=pixels, image_grid_thw=np.asarray([grid] * 2))
        return np.asarray(model(tokens, media=media).logits)

    close(run([0, 1]), run([1, 0])[::-1])
    assert np.abs(run([0, 1])[0] - run([0, 1])[1]).max() > 1e-3


@pytest.mark.slow
def test_images_videos_and_audio_together(model):
    """Each kind's features stand at its own placeholders, whatever the order; each is what it is alone."""
    tokens = np.stack([text("xaaaixvvxxx"), text("vvxiixaaxxx", 4)])
    images, videos, frames = [(1, 2, 2), (1, 2, 4)], [(1, 2, 4), (2, 2, 2)], [10, 6]
    given = dict(
        pixel_values=patches(images, 5),
        image_grid_thw=np.asarray(images),
        pixel_values_videos=patches(videos, 6),
        video_grid_thw=np.asarray(videos),
    )
    media = ed.Media.create(model.config, tokens, **given, **audio(frames))
    found = np.asarray(model.encode(media).features)[: (tokens >= IMAGE).sum()]
    kinds = tokens[tokens >= IMAGE]

    def alone(token, **arrays):
        own = np.full((1, (tokens == token).sum()), token)
        return np.asarray(model.encode(ed.Media.create(model.config, own, **arrays)).features)[: own.size]

    close(found[kinds == IMAGE], alone(IMAGE, **{name: given[name] for name in ("pixel_values", "image_grid_thw")}))
    names = ("pixel_values_videos", "video_grid_thw")
    close(found[kinds == VIDEO], alone(VIDEO, **{name: given[name] for name in names}))
    close(found[kinds == AUDIO], alone(AUDIO, **audio(frames)))
    assert np.isfinite(np.asarray(model(tokens, media=media).logits)).all()


@pytest.mark.slow
def test_groups_of_rows_have_images_of_their_own(model, media, whole):
    groups = ed.Media.create(
        model.config, TOKENS, pixel_values=patches(GRIDS), image_grid_thw=np.asarray(GRIDS), groups=2
    )
    assert len(groups.order) == 2 and len(groups.images.patches) % 2 == 0
    close(model(TOKENS, media=groups).logits, whole.logits)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 4])
def test_a_mesh_gives_the_same(whole, groups):
    layout = ed.Layout.create(data=2, fsdp=2, context=2)
    model = filled(media_decoder(), 1, attention="dot").place(layout)
    tokens = np.tile(TOKENS, (2, 1))
    given = dict(pixel_values=np.tile(patches(GRIDS), (2, 1)), image_grid_thw=np.tile(np.asarray(GRIDS), (2, 1)))
    split = ed.Media.create(model.config, tokens, **given, groups=groups)
    close(np.asarray(model(tokens, media=split).logits), np.tile(np.asarray(whole.logits), (2, 1, 1)))


@pytest.mark.slow
def test_gradients_are_finite_differences(model, media):
    """Of the encoder's first and last weights, and of a deeper projector."""

    def loss(model):
        return jnp.sum(jnp.square(model(TOKENS, media=media).logits - 1.0))

    places = (
        lambda m: m.vision.stem.kernel,
        lambda m: m.vision.projector.layers[1].kernel,
        lambda m: m.vision.deepstack[1].layers[0].kernel,
    )
    run = eqx.filter_jit(eqx.filter_value_and_grad(loss))  # one program for both
    gradient = run(model)[1]
    generator = np.random.default_rng(0)
    for place in places:
        way = generator.normal(size=place(model).shape).astype(np.float32)
        way /= np.linalg.norm(way)
        sides = [eqx.tree_at(place, model, place(model) + step * way) for step in (0.01, -0.01)]
        slope = (float(run(sides[0])[0]) - float(run(sides[1])[0])) / 0.02
        assert float(jnp.sum(place(gradient) * way)) == pytest.approx(slope, rel=3e-2, abs=2e-2)


IMAGES = dict(pixel_values=patches(GRIDS), image_grid_thw=np.asarray(GRIDS))
# Arrays that do not fit, and what their errors name.
BAD = {
    "few images": (
        dict(pixel_values=patches(GRIDS[:2]), image_grid_thw=np.asarray(GRIDS[:2])),
        ["9 image placeholders", "2 images", "7"],
    ),
    "few grids": (IMAGES | dict(image_grid_thw=np.asarray(GRIDS[:2])), ["pixel_values", "(36, 24)", "[28, 24]"]),
    "odd grid": (dict(pixel_values=patches([(1, 3, 4)]), image_grid_thw=np.asarray([[1, 3, 4]])), ["3", "4", "2"]),
    "no images": (dict(), ["9 image placeholders", "0 images"]),
    "unused sizes": (IMAGES | dict(image_sizes=[[4, 4]]), ["image_sizes", "image_grid_thw"]),
    "unused mask": (IMAGES | dict(pixel_attention_mask=[[1]]), ["pixel_attention_mask", "image_grid_thw"]),
    "grids alone": (dict(image_grid_thw=np.asarray(GRIDS)), ["image_grid_thw", "pixel_values is missing"]),
    "sizes alone": (dict(image_sizes=[[4, 4]]), ["image_sizes", "pixel_values is missing"]),
    "mask alone": (dict(pixel_attention_mask=[[1]]), ["pixel_attention_mask", "pixel_values is missing"]),
    "video grids alone": (
        IMAGES | dict(video_grid_thw=np.asarray(GRIDS[:1])),
        ["video_grid_thw", "pixel_values_videos is missing"],
    ),
    "both seconds": (
        IMAGES | dict(video_second_per_grid=[1.0], second_per_grid_ts=[1.0]),
        ["second_per_grid_ts", "video_second_per_grid"],
    ),
    "odd pixels": (dict(pixel_values=np.zeros((1, 3, 6, 4))), ["3 rows", "2 columns", "2 x 2 pixels"]),
    "audio": (IMAGES | audio([5]), ["0 audio placeholders", "1 audio clip", "2 features"]),
    "types": (dict(mm_token_type_ids=np.zeros((2, 11))), ["mm_token_type_ids", "input_ids"]),
    "mask": (dict(attention_mask=np.ones((2, 3))), ["attention_mask", "(2, 3)"]),
    "groups": (dict(groups=3), ["groups=3", "2 rows"]),
}


@pytest.mark.parametrize("case", BAD)
def test_arrays_that_do_not_fit_are_refused_with_counts(model, case):
    arrays, names = BAD[case]
    with refused(ed.EqxDecodersError, *names):
        ed.Media.create(model.config, TOKENS, **arrays)


def test_unknown_arrays_are_refused_with_the_nearest_name(model):
    with refused(TypeError, "'pixel_value'", "'pixel_values'"):
        ed.Media.create(model.config, TOKENS, pixel_value=patches(GRIDS))
    with refused(TypeError, "'zzz'"):
        ed.Media.create(model.config, TOKENS, zzz=None)


def test_media_needs_tokens(model, media):
    embeds = jnp.zeros((*media.index.shape, model.config.embed_dim))
    with refused(ed.ConfigError, "media needs tokens", "embeds"):
        model(embeds=embeds, media=media)


def test_models_without_encoders_refuse(model, media):
    text_only = dataclasses.replace(media_decoder(), media=None, blocks=media_decoder(layers=4).blocks[2:])
    with refused(ed.ConfigError, "encoders"):
        ed.Media.create(text_only, TOKENS)
    with refused(ed.ConfigError, "(2, 11)", "(2, 5)"):
        model(TOKENS[:, :5], media=media)
    with refused(ed.ConfigError, "MediaConfig.vision.deepstack", "2 layers", "AddedFeaturesConfig"):
        media_decoder(blocks=media_decoder().blocks[2:])


def test_an_indexer_of_blocks_knows_no_positions_of_three_dimensions():
    blocks, selection = media_decoder().blocks, BlockIndexerConfig(size=2, top_k=2, num_heads=2, head_dim=8)
    mixer = dataclasses.replace(blocks[-1].mixer, selection=selection, spans=False)
    with refused(ed.ConfigError, "AttentionConfig.selection", "indexer", "MediaConfig.positions"):
        media_decoder(blocks=(*blocks[:-1], dataclasses.replace(blocks[-1], mixer=mixer)))


@pytest.mark.slow
def test_placeholders_may_be_outside_of_the_vocabulary():
    media = dataclasses.replace(MEDIA, image_token=900, positions=None)
    model = filled(media_decoder(media), attention="dot")
    tokens = np.where(TOKENS == IMAGE, 900, TOKENS)
    given = ed.Media.create(model.config, tokens, pixel_values=patches(GRIDS), image_grid_thw=np.asarray(GRIDS))
    assert np.isfinite(np.asarray(model(tokens, media=given).logits)).all()
    with refused(ed.ConfigError, "900"):
        model(tokens)


@pytest.mark.slow
def test_padding_is_not_seen(model, whole):
    """Longer rows, padded on either side, have the logits of the others."""
    for left in (0, 3):
        tokens = np.pad(TOKENS, ((0, 0), (left, 3 - left)))
        mask = np.pad(np.ones_like(TOKENS), ((0, 0), (left, 3 - left)))
        given = dict(pixel_values=patches(GRIDS), image_grid_thw=np.asarray(GRIDS), attention_mask=mask)
        out = model(tokens, media=ed.Media.create(model.config, tokens, **given))
        close(np.asarray(out.logits)[:, left : left + 11], whole.logits)


def test_documents_in_a_row_are_alone(model, whole):
    """Both rows packed into one: positions begin anew, and no image is seen from the other document."""
    tokens = TOKENS.reshape(1, -1)
    segments = np.concatenate([np.full(11, 1), np.full(11, 2)])[None]
    given = dict(pixel_values=patches(GRIDS), image_grid_thw=np.asarray(GRIDS), segment_ids=segments)
    out = model(tokens, media=ed.Media.create(model.config, tokens, **given))
    close(np.asarray(out.logits).reshape(2, 11, -1), whole.logits)


def test_fixed_images_are_cut_into_the_same_patches():
    """`[images, channels, height, width]`: patches in groups of neighbours, as with grids."""
    stem = dataclasses.replace(STEM, frames=1)
    config = media_decoder(dataclasses.replace(MEDIA, vision=dataclasses.replace(MEDIA.vision, stem=stem)))
    pixels = np.random.default_rng(0).normal(size=(2, 3, 8, 4)).astype(np.float32)
    cut = [
        pixels[n, :, 2 * (2 * i + a) : 2 * (2 * i + a) + 2, 2 * b : 2 * b + 2].reshape(-1)
        for n in range(2) for i in range(2) for a in range(2) for b in range(2)
    ]  # fmt: skip
    tokens = text("iixii")[None]
    one = ed.Media.create(config, tokens, pixel_values=pixels)
    other = ed.Media.create(config, tokens, pixel_values=np.stack(cut), image_grid_thw=np.asarray([[1, 4, 2]] * 2))
    jax.tree.map(assert_array_equal, one, other)


@pytest.mark.slow
@pytest.mark.parametrize("positions", [None, MEDIA.positions])
def test_depths_of_multi_token_prediction_read_features_too(positions):
    """They are those of a text whose embeddings the features are, at the same rotary positions."""
    vision = dataclasses.replace(MEDIA.vision, deepstack=(), deepstack_projector=None)
    config = media_decoder(dataclasses.replace(MEDIA, vision=vision, positions=positions), layers=2, vocab_size=50)
    config = with_mtp(config, 2)
    model = filled(config, 4, attention="dot")
    tokens = np.stack([text("xiiiixxiiix"), text("xxxiixxxxxx", 3)])
    media = ed.Media.create(config, tokens, pixel_values=patches(GRIDS), image_grid_thw=np.asarray(GRIDS))
    seen = np.argwhere(tokens == IMAGE)
    words = tokens.copy()
    words[tuple(seen.T)] = 32 + np.arange(len(seen))
    table = model.embedding.table.at[32 : 32 + len(seen)].set(model.encode(media).features[: len(seen)])
    reader = eqx.tree_at(lambda m: m.embedding.table, model, table)
    inputs = ed.Inputs(spans=media.spans, rotary_positions=media.grid_positions)

    @eqx.filter_jit
    def run(model, reader, media):
        out, plain = model(tokens, media=media), reader(words, inputs=inputs)
        ahead = model.predict_mtp(out.hidden, tokens, media=media)
        known = model.predict_mtp(out.hidden, tokens, media=media, encoded=model.encode(media))
        return out, plain, ahead, known, reader.predict_mtp(plain.hidden, words, inputs=inputs)

    out, plain, ahead, known, expected = run(model, reader, media)
    close(out.hidden, plain.hidden)
    for one, again, other, real in zip(ahead.hidden, known.hidden, expected.hidden, expected.real, strict=True):
        one, again, other = (np.asarray(x)[real] for x in (one, again, other))
        close(one, other)
        close(again, other)
