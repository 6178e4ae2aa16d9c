"""Pictures, films and sounds become what transformers makes of them; files of strangers get a sentence."""

import io
import pathlib

import numpy as np
import pytest

from eqx_decoders.errors import DataError
from eqx_decoders.io.processors.colours import Colours
from eqx_decoders.io.processors.films import Film, open_film
from eqx_decoders.io.processors.gemma import Gemma3Pictures, Gemma4Pictures
from eqx_decoders.io.processors.limits import MediaLimits
from eqx_decoders.io.processors.llama4 import Llama4Pictures
from eqx_decoders.io.processors.pictures import open_picture
from eqx_decoders.io.processors.pixtral import PixtralPictures
from eqx_decoders.io.processors.processor import Processor
from eqx_decoders.io.processors.qwen import QwenPictures
from eqx_decoders.io.processors.smolvlm import SmolVLMPictures
from eqx_decoders.io.processors.sounds import LogMel, QwenSounds
from tests.encoders.directories import seeing_directory
from tests.io.media_files import PICTURES, SECONDS, picture, shown, sound


pytest.importorskip("PIL")
EXPECTED = np.load(pathlib.Path(__file__).parent.parent / "fixtures" / "processors" / "expected.npz")
RULES = {
    "gemma3": Gemma3Pictures(size=(112, 112)),
    "gemma4": Gemma4Pictures(),
    "llama4": Llama4Pictures(side=84, tiles=4),
    "qwen2_5": QwenPictures(least=4096, most=65_536),
    "qwen3": QwenPictures(size=16, least=4096, most=65_536, colours=Colours()),
    "smolvlm": SmolVLMPictures(longest=512, tile=128),
    "idefics3": SmolVLMPictures(longest=512, tile=128),
    "pixtral": PixtralPictures(longest=(280, 280), size=14, merge=2),
}
LIMITS = MediaLimits()


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("family", RULES)
def test_pictures_are_those_of_transformers(family, name):
    rules, where = RULES[family], f"picture {name!r}"
    kind, width, height = PICTURES[name]
    opened = open_picture(picture(kind, width, height), LIMITS, where)
    made = rules.join([rules.one(opened, LIMITS, where)])
    keys = [key.split("/")[2] for key in EXPECTED.files if key.startswith(f"{family}/{name}/") and "/shape" not in key]
    assert {"pixel_values"} <= set(made) & set(keys)
    for key in set(made) & set(keys):
        assert list(made[key].shape) == EXPECTED[f"{family}/{name}/{key}/shape"].tolist(), key
        np.testing.assert_allclose(shown(made[key]), EXPECTED[f"{family}/{name}/{key}"], atol=1e-5, err_msg=key)


@pytest.mark.parametrize("seconds", SECONDS)
def test_spectra_are_those_of_transformers(seconds):
    """Its torch and its NumPy differ by 5e-5; this one is the latter, to 1e-7."""
    made = LogMel()(sound(seconds))
    known = EXPECTED[f"sound/{seconds}/input_features"]
    assert [1, *made.shape] == EXPECTED[f"sound/{seconds}/input_features/shape"].tolist()
    np.testing.assert_allclose(shown(made[None]), known, atol=1e-4)


def test_sounds_of_different_lengths_stand_together():
    pytest.importorskip("soundfile")
    files = []
    for seconds in SECONDS:
        import soundfile

        file = io.BytesIO()
        soundfile.write(file, sound(seconds), 16_000, format="WAV", subtype="FLOAT")
        files.append(file.getvalue())
    rules = QwenSounds()
    made, texts = rules.all(files, LIMITS, ["one", "two"])
    assert made["input_features"].shape[:2] == (2, 128)
    counts = made["feature_attention_mask"].sum(axis=1).tolist()
    assert counts == [70, 234]
    assert [text.count(rules.placeholder) for text in texts] == [9, 13 * 2 + 5]


def test_films_are_read_frame_by_frame():
    """From pictures in a list; and their times are those of the frames that are taken."""
    frames = [np.full((20, 30, 3), 10 * number, np.uint8) for number in range(12)]
    with open_film(Film(frames=frames, fps=4.0), LIMITS) as clip:
        assert (clip.count, clip.seconds, clip.height, clip.width) == (12, 3.0, 20, 30)
        taken = list(clip.frames([0, 5, 5, 11]))
    assert [int(one.mean()) for one in taken] == [0, 50, 50, 110]
    with (
        pytest.raises(DataError, match="frame 1 has 31 x 20 pixels"),
        open_film([frames[0], np.zeros((20, 31, 3), np.uint8)], LIMITS) as clip,
    ):
        list(clip.frames([0, 1]))


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return Processor.load(seeing_directory(tmp_path_factory.mktemp("processor") / "model"))


def test_prompts_have_a_place_for_each_file(processor):
    image = processor.pictures.placeholder
    files = [np.zeros((16, 24, 3), np.uint8)] * 2
    made = processor(f"{image} and {image}?", images=files)
    assert made.text.count(image) == 12 and made.arrays["image_grid_thw"].tolist() == [[1, 4, 6]] * 2
    assert processor.with_placeholders("what?", images=2) == f"{image}{image}what?"
    assert processor.with_placeholders(f"what {image}?", images=1) == f"what {image}?"
    film = processor(f"{processor.films.placeholder}?", videos=[[files[0]] * 4])
    assert film.arrays["video_grid_thw"].shape == (1, 3) and "seconds>" in film.text
    with pytest.raises(DataError, match=r"has 1 placeholders .*, but images has 2 files"):
        processor(f"{image}?", images=files)
    with pytest.raises(DataError, match="sounds has 1 files, but this model takes none"):
        processor("?", sounds=[b""])


def broken(kind: str) -> bytes:
    whole = picture("RGB", 60, 60)
    return {"cut": whole[: len(whole) // 2], "none": b"", "text": b"this is no picture", "head": whole[:20]}[kind]


@pytest.mark.parametrize("kind", ["cut", "none", "text", "head"])
def test_what_is_no_picture_gets_a_sentence(kind):
    with pytest.raises(DataError, match=r"^picture 'x.png' .*\.$"):
        open_picture(broken(kind), LIMITS, "picture 'x.png'")


def test_sizes_are_bounded_before_anything_is_decoded():
    with pytest.raises(DataError, match=r"1,000 x 1,000 pixels: more than MediaLimits.max_pixels=10,000"):
        open_picture(picture("RGB", 1000, 1000), MediaLimits(max_pixels=10_000), "x")
    with (
        pytest.raises(DataError, match="more than"),
        open_film([np.zeros((2, 2, 3), np.uint8)] * 30, MediaLimits(max_frames=20)),
    ):
        pass


@pytest.mark.parametrize("kind", ["RGB", "L", "RGBA", "CMYK", "I;16"])
def test_all_colours_become_three(kind):
    pixels = open_picture(picture(kind, 40, 30), LIMITS)
    assert pixels.shape == (30, 40, 3) and pixels.dtype == np.uint8 and pixels.std() > 10
