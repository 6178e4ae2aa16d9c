"""Images and audio of several processes: what each packs for its own rows, put together, is the whole batch."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.encoders.common_shapes import array_shapes, merge_shapes, pad_to_shapes
from tests.compare import assert_allclose
from tests.encoders.samples import FRAME_AUDIO, MEDIA, audio, media_decoder, patches, text
from tests.models import filled


CONFIG = media_decoder()
WHOLE = media_decoder(dataclasses.replace(MEDIA, audio=FRAME_AUDIO))  # whose audio is not cut into chunks
# of each row: its tokens, the grids of its images and videos, and frames of its audio
ROWS = [
    ("iiiiabbb", [(1, 4, 4)], [], [4]),
    ("abiibiib", [(1, 4, 2), (1, 2, 4)], [], [3]),
    ("abbbbbbb", [], [], [2]),
    ("biivvvvb", [(1, 2, 4)], [(2, 4, 2)], []),
    ("bbbbbbbb", [], [], []),
    ("iiiiiiab", [(1, 4, 6)], [], [4]),
    ("aaaaabbb", [], [], [17]),
    ("bbbbbbbb", [], [], []),
]


@pytest.fixture(scope="module")
def model():
    return filled(CONFIG, 3, attention="dot")


@pytest.fixture(scope="module")
def frame_audio():
    return filled(WHOLE, 3, attention="dot")


def batch(rows):
    return np.stack([text(ROWS[row][0], seed=row) for row in rows])


def media_of(rows, numbers):
    """Those of some rows, which are the same with other rows beside."""
    given = {}
    for column, pixels, grid in ((1, "pixel_values", "image_grid_thw"), (2, "pixel_values_videos", "video_grid_thw")):
        grids = [one for row in rows for one in ROWS[row][column]]
        if grids:
            parts = [patches(ROWS[row][column], seed=10 * row + column) for row in rows if ROWS[row][column]]
            given |= {pixels: np.concatenate(parts), grid: np.asarray(grids)}
    lengths = [(row, one) for row in rows for one in ROWS[row][3]]
    if lengths:
        longest = max(one for _, one in lengths)
        values = np.zeros((len(lengths), 6, longest), np.float32)
        for place, (row, one) in enumerate(lengths):
            values[place, :, :one] = audio([one], seed=row)["input_features"][0]
        mask = np.arange(longest) < np.asarray([[one] for _, one in lengths])
        given |= dict(input_features=values, feature_attention_mask=mask.astype(np.int32))
    return ed.Media.create(CONFIG, numbers, groups=len(rows), **given)


def check_parts(model, parts, batch, media_of):
    """The logits are those of all rows, their media made at once."""
    order = [row for part in parts for row in part]
    tokens = batch(order)
    whole = model(tokens, media=media_of(order, tokens)).logits
    own = [media_of(list(part), batch(part)) for part in parts]
    shapes = merge_shapes(json.loads(json.dumps([array_shapes(media) for media in own])))
    grown = [pad_to_shapes(media, shapes) for media in own]
    assert len({str(jax.tree.map(np.shape, media)) for media in grown}) == 1
    together = jax.tree.map(lambda *leaves: np.concatenate(leaves), *grown)
    assert_allclose(model(tokens, media=together).logits, whole, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [[range(4), range(4, 8)], [(0, 2), (1, 3), (4, 7), (5, 6)]])
def test_parts_make_the_whole(model, parts):
    check_parts(model, parts, batch, media_of)


@pytest.mark.slow
def test_parts_of_whole_audio_make_the_whole(frame_audio):
    """Of one to three audio in a row, and of none."""
    lengths = [(9,), (4, 6), (), (1, 13, 3)]
    stem = WHOLE.media.audio.stem

    def audio_text(rows):
        def letters(row):
            return "".join("a" * stem.output_size(one) + "b" for one in lengths[row]).ljust(9, "b")

        return np.stack([text(letters(row), seed=row) for row in rows])

    def audio_media(rows, numbers):
        own = [(row, one) for row in rows for one in lengths[row]]
        if not own:
            return ed.Media.create(WHOLE, numbers, groups=len(rows))
        values = np.zeros((len(own), max(one for _, one in own), 6), np.float32)
        for place, (row, one) in enumerate(own):
            values[place, :one] = audio([one], seed=10 * row + one)["input_features"][0].T
        mask = np.arange(values.shape[1]) < np.asarray([[one] for _, one in own])
        given = dict(input_features=values, input_features_mask=mask)
        return ed.Media.create(WHOLE, numbers, groups=len(rows), **given)

    for parts in ([(0, 1), (2, 3)], [(2, 0), (3, 1)]):
        check_parts(frame_audio, parts, audio_text, audio_media)


def test_padding_without_media_changes_nothing():
    tokens = batch((4, 7))
    media = media_of((4, 7), tokens)
    again = pad_to_shapes(media, merge_shapes([array_shapes(media), array_shapes(media)]))
    assert again.images is None and again.audio is None
    assert jax.tree.all(jax.tree.map(np.array_equal, media, again))
