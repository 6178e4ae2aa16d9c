"""Images, videos and audio are processed as in transformers; malformed files are refused."""

import dataclasses
import io
import json
import pathlib
import struct
import zlib
from typing import Any

import numpy as np
import pytest

from eqx_decoders.encoders.geometry import TilesConfig
from eqx_decoders.errors import ConfigError, ConversionError, DataError
from eqx_decoders.families.gemma.processor import (
    Gemma3ImageProcessor,
    Gemma3nImageProcessor,
    Gemma4ImageProcessor,
    Gemma4VideoProcessor,
)
from eqx_decoders.families.glm.processor import GlmImageProcessor
from eqx_decoders.families.idefics3.processor import (
    SmolVLMImageProcessor,
    SmolVLMImageText,
    SmolVLMVideoProcessor,
    in_words,
)
from eqx_decoders.families.internvl.processor import InternVLImageProcessor, InternVLImageText
from eqx_decoders.families.lfm2.processor import Lfm2VLImageProcessor
from eqx_decoders.families.llama4.processor import Llama4ImageProcessor
from eqx_decoders.families.llava.processor import LlavaImageProcessor, LlavaNextImageProcessor
from eqx_decoders.families.mistral.processor import PixtralImageProcessor
from eqx_decoders.families.phi.processor import Phi4AudioProcessor, Phi4ImageProcessor
from eqx_decoders.families.qwen.audio_processor import QwenAudioProcessor
from eqx_decoders.families.qwen.processor import QwenImageProcessor
from eqx_decoders.io.huggingface.directory import Directory
from eqx_decoders.io.processors.processor import Processor, read_settings
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import JsonTokenizer
from eqx_decoders.media_files.audio import LogMel
from eqx_decoders.media_files.images import image_size, open_image
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.normalize import Normalization
from eqx_decoders.media_files.video import Video, open_video
from tests.compare import assert_allclose
from tests.encoders.directories import tokenizer_with, vision_directory
from tests.errors import refused
from tests.io.processors.media_files import IMAGES, PHI4_AUDIO, SECONDS, VIDEOS, audio, image, summary_of, video_frames


pytest.importorskip("PIL")
FIXTURES = pathlib.Path(__file__).parents[2] / "fixtures" / "processors"
EXPECTED, OF_VIDEOS = np.load(FIXTURES / "expected.npz"), np.load(FIXTURES / "videos.npz")
TILES = TilesConfig(side=42, sizes=tuple((42 * rows, 42 * columns) for rows in (1, 2, 3) for columns in (1, 2, 4)))
RULES = {
    "gemma3": Gemma3ImageProcessor(size=(112, 112)),
    "gemma3n": Gemma3nImageProcessor(size=(96, 96)),
    "gemma4": Gemma4ImageProcessor(),
    "llama4": Llama4ImageProcessor(tile_size=84, max_tiles=4),
    "qwen2_5": QwenImageProcessor(min_pixels=4096, max_pixels=65_536),
    "qwen3": QwenImageProcessor(patch_size=16, min_pixels=4096, max_pixels=65_536, normalization=Normalization()),
    "smolvlm": SmolVLMImageProcessor(longest_edge=512, tile_size=128),
    "idefics3": SmolVLMImageProcessor(longest_edge=512, tile_size=128),
    "glm4v": GlmImageProcessor(min_pixels=4096, max_pixels=65_536),
    "internvl": InternVLImageProcessor(tile_size=56, max_tiles=6, image_text=InternVLImageText(tokens_per_tile=2)),
    "lfm2_vl": Lfm2VLImageProcessor(patch_size=4, tile_size=32, min_tokens=16, max_tokens=48, max_tiles=6),
    "llava": LlavaImageProcessor(size=56),
    "llava_next": LlavaNextImageProcessor(tiles=TILES, patch_size=14, normalization=Normalization()),
    "phi4": Phi4ImageProcessor(tile_size=56, max_tiles=5),
    "pixtral": PixtralImageProcessor(max_size=(280, 280), patch_size=14, merge_size=2),
}
LIMITS = MediaLimits()


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("family", RULES)
def test_images_equal_those_of_transformers(family, name):
    rules, where = RULES[family], f"image {name!r}"
    kind, width, height = IMAGES[name]
    opened = open_image(image(kind, width, height), LIMITS, where)
    processed = rules.process(opened, LIMITS, where)
    made = rules.join([processed])
    keys = [key.split("/")[2] for key in EXPECTED.files if key.startswith(f"{family}/{name}/") and "/shape" not in key]
    assert any("pixel_values" in key for key in set(made) & set(keys))
    assert "text" not in keys or processed.text == str(EXPECTED[f"{family}/{name}/text"])
    for key in set(made) & set(keys):
        assert list(made[key].shape) == EXPECTED[f"{family}/{name}/{key}/shape"].tolist(), key
        assert_allclose(summary_of(made[key]), EXPECTED[f"{family}/{name}/{key}"], atol=1e-5, err_msg=key)


@pytest.mark.parametrize("seconds", SECONDS)
def test_spectrograms_match_transformers(seconds):
    """transformers' torch and NumPy results differ by 5e-5. Ours differ from the NumPy result by 1e-7."""
    made = LogMel()(audio(seconds))
    known = EXPECTED[f"sound/{seconds}/input_features"]
    assert [1, *made.shape] == EXPECTED[f"sound/{seconds}/input_features/shape"].tolist()
    assert_allclose(summary_of(made[None]), known, atol=1e-4)


def test_spectrograms_of_phi_4_match_transformers():
    known = np.load(FIXTURES / "gemma_audio.npz")
    clips = [audio(seconds) for seconds in PHI4_AUDIO]
    made, texts = Phi4AudioProcessor().process_all(clips, LIMITS, ["one", "two", "three"])
    sizes = known["phi4/audio_embed_sizes"].tolist()
    assert made["audio_embed_sizes"].tolist() == [text.count("<|audio|>") for text in texts] == sizes
    counts = made["audio_attention_mask"].sum(axis=1)
    for count, spectrum in zip(counts, made["audio_input_features"], strict=True):
        assert_allclose(summary_of(spectrum[:count]), known[f"phi4/{count}"], atol=1e-4)
    with refused(DataError, "one has 399 samples", "400"):
        Phi4AudioProcessor().process_all([clips[0][:399]], LIMITS, ["one"])


@pytest.mark.parametrize("name", IMAGES)
def test_tokens_of_phi_4_equal_those_of_transformers(name):
    """transformers counts 256 + 16 for the thumbnail, whatever its size is."""
    kind, width, height = IMAGES[name]
    made = RULES["phi4"].process(open_image(image(kind, width, height), LIMITS, name), LIMITS, name)
    (known,) = EXPECTED[f"phi4/{name}/num_img_tokens"].tolist()
    assert made.text.count("<|image|>") == known - (256 + 16) + 4 + 2


def test_audio_of_different_lengths_is_batched():
    pytest.importorskip("soundfile")
    files = []
    for seconds in SECONDS:
        import soundfile

        file = io.BytesIO()
        soundfile.write(file, audio(seconds), 16_000, format="WAV", subtype="FLOAT")
        files.append(file.getvalue())
    rules = QwenAudioProcessor()
    made, texts = rules.process_all(files, LIMITS, ["one", "two"])
    assert made["input_features"].shape[:2] == (2, 128)
    counts = made["feature_attention_mask"].sum(axis=1).tolist()
    assert counts == [70, 234]
    assert [text.count(rules.placeholder) for text in texts] == [9, 13 * 2 + 5]


def test_videos_are_read_frame_by_frame():
    frames = [np.full((20, 30, 3), 10 * number, np.uint8) for number in range(12)]
    with open_video(Video(frames=frames, fps=4.0), LIMITS) as clip:
        assert (clip.num_frames, clip.duration, clip.height, clip.width) == (12, 3.0, 20, 30)
        taken = list(clip.frames([0, 5, 5, 11]))
    assert [int(one.mean()) for one in taken] == [0, 50, 50, 110]
    with (
        refused(DataError, "frame 1", "31 x 20 pixels", "30 x 20"),
        open_video([frames[0], np.zeros((20, 31, 3), np.uint8)], LIMITS) as clip,
    ):
        list(clip.frames([0, 1]))


def video_rules(folder, family, settings):
    """Return the rules of a directory with these settings."""
    names = {"smolvlm": "SmolVLMProcessor", "gemma4": "Gemma4Processor", "internvl": "InternVLProcessor"}
    names |= {"glm4v": "Glm4vProcessor", "glm46v": "Glm46VProcessor"}
    whole = {"processor_class": names[family], "image_seq_len": 2, "image_seq_length": 2}
    (folder / "processor_config.json").write_text(json.dumps(whole))
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"longest_edge": 1}}))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    found, read = read_settings(Directory(folder))
    assert found.videos is not None
    return found.videos(read)


@pytest.mark.parametrize("name", VIDEOS)
def test_videos_equal_those_of_transformers(name, tmp_path):
    """Sampled frames, their arrays, and the text with their times."""
    family, settings, count, fps, height, width = VIDEOS[name]
    rules = video_rules(tmp_path, family, settings)
    with open_video(Video(frames=[*video_frames(count, height, width)], fps=fps), LIMITS) as clip:
        made = rules.process(dataclasses.replace(clip, use_all_frames=fps is None), LIMITS)
    assert made.text == str(OF_VIDEOS[f"{name}/text"])
    arrays = rules.join([made])
    keys = [key.split("/")[1] for key in OF_VIDEOS.files if key.startswith(f"{name}/") and key.endswith("/shape")]
    assert arrays.keys() == set(keys)
    for key, array in arrays.items():
        assert list(array.shape) == OF_VIDEOS[f"{name}/{key}/shape"].tolist(), key
        assert_allclose(summary_of(array), OF_VIDEOS[f"{name}/{key}"], atol=1e-6, err_msg=key)


def test_videos_have_separate_limits():
    """Gemma 4 takes all frames if there are fewer than requested, which is an error in transformers."""
    few = list(video_frames(3, 8, 8))
    gemma = Gemma4VideoProcessor(frame=Gemma4ImageProcessor(patch_size=2, pooling_size=2, max_tokens=70))
    with open_video(Video(frames=few, fps=1.0), LIMITS) as clip:
        made = gemma.process(dataclasses.replace(clip, use_all_frames=False), LIMITS)
        assert made.arrays["num_frames_per_video"].tolist() == [3]
        for rules in (SmolVLMVideoProcessor(size=16, tile_size=8), gemma):
            with refused(DataError, "MediaLimits.max_video_pixels=100"):
                rules.process(clip, MediaLimits(max_video_pixels=100))
        many = SmolVLMVideoProcessor(size=16, tile_size=8, image_text=SmolVLMImageText(tokens_per_tile=1 << 19))
        with refused(DataError, "1,572,864 tokens", "1,048,576"):
            many.process(clip, LIMITS)


def test_settings_of_videos_are_checked(tmp_path):
    with refused(ConversionError, "video_sampling", "max_frames"):
        video_rules(tmp_path, "smolvlm", {"video_sampling": {"fps": 1}})
    with refused(ConversionError, "resample=5"):
        video_rules(tmp_path, "gemma4", {"resample": 5})
    with refused(ConversionError, "initial_shift=half"):
        video_rules(tmp_path, "internvl", {"initial_shift": "half"})
    with refused(ConfigError, "fps=2.0", "num_frames=8"):
        video_rules(tmp_path, "gemma4", {"fps": 2, "num_frames": 8})


def test_numbers_are_written_as_words():
    found = [in_words(number) for number in (0, 13, 20, 64, 100, 115, 1000, 1001, 101_100, 2_000_000)]
    tens = ["zero", "thirteen", "twenty", "sixty-four", "one hundred", "one hundred and fifteen"]
    large = ["one thousand", "one thousand and one", "one hundred and one thousand, one hundred", "two million"]
    assert found == tens + large


@pytest.fixture(scope="module")
def smol():
    """The processor of a SmolVLM whose template has no videos."""
    tokenizer = tokenizer_with(("<image>", "<video>", "<fake_token_around_image>", "<global-img>"))
    image_text = SmolVLMImageText(tokens_per_tile=2)
    return Processor(
        tokenizer=JsonTokenizer(tokenizer),
        template=ChatTemplate(source="{{ messages[0].content }}"),
        images=SmolVLMImageProcessor(longest_edge=16, tile_size=8, split_image=False, image_text=image_text),
        videos=SmolVLMVideoProcessor(size=16, tile_size=8, image_text=image_text),
    )


def test_videos_and_images_keep_their_order(smol):
    """In families that process videos as images."""
    grey = {level: np.full((8, 8, 3), level, np.uint8) for level in (0, 51, 102, 153, 204)}
    videos, images = [[grey[0], grey[51]], [grey[204]]], [grey[102], grey[153]]
    made = smol("<video>a<image>b<image>c<video>", images=images, videos=videos)
    levels = made.arrays["pixel_values"].mean(axis=(2, 3, 4)) * 127.5 + 127.5
    assert_allclose(levels, [[0, 51, 102, 153, 204]], atol=1e-3)
    assert made.arrays["pixel_attention_mask"].shape == (1, 5, 8, 8)
    assert made.text.count("<image>") == 10 and "series of two frames from a 0:00:00" in made.text
    parts = [
        {"type": "image", "image": grey[102]},
        {"type": "video", "video": videos[0]},
        {"type": "text", "text": "?"},
    ]
    made = smol([{"role": "system", "content": "Look."}, {"role": "user", "content": parts}])
    assert made.text.startswith(
        "<|im_start|>System: Look.<end_of_utterance>\nUser:<fake_token_around_image><global-img>"
    )
    assert made.text.endswith("\n\n?<end_of_utterance>\nAssistant:") and made.arrays["pixel_values"].shape[1] == 3


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return Processor.load(vision_directory(tmp_path_factory.mktemp("processor") / "model"))


def test_prompts_have_a_placeholder_for_each_file(processor):
    image = processor.images.placeholder
    files = [np.zeros((16, 24, 3), np.uint8)] * 2
    made = processor(f"{image} and {image}?", images=files)
    assert made.text.count(image) == 12 and made.arrays["image_grid_thw"].tolist() == [[1, 4, 6]] * 2
    assert processor.with_placeholders("what?", images=2) == f"{image}{image}what?"
    assert processor.with_placeholders(f"what {image}?", images=1) == f"what {image}?"
    video = processor(f"{processor.videos.placeholder}?", videos=[[files[0]] * 4])
    assert video.arrays["video_grid_thw"].shape == (1, 3) and "seconds>" in video.text
    with refused(DataError, "1 placeholders", "images has 2 files"):
        processor(f"{image}?", images=files)
    with refused(DataError, "audio has 1 files"):
        processor("?", audio=[b""])


def broken(kind: str) -> bytes:
    whole = image("RGB", 60, 60)
    return {"cut": whole[: len(whole) // 2], "none": b"", "text": b"this is no image", "head": whole[:20]}[kind]


@pytest.mark.parametrize("kind", ["cut", "none", "text", "head"])
def test_malformed_images_are_refused(kind):
    with refused(DataError, "image 'x.png'"):
        open_image(broken(kind), LIMITS, "image 'x.png'")


def test_sizes_are_checked_before_decoding():
    with refused(DataError, "1,000 x 1,000", "MediaLimits.max_pixels=10,000"):
        open_image(image("RGB", 1000, 1000), MediaLimits(max_pixels=10_000), "x")
    with refused(DataError, "1,000 x 1,000", "MediaLimits.max_pixels=10,000"):
        image_size(image("RGB", 1000, 1000), MediaLimits(max_pixels=10_000), "x")
    with (
        refused(DataError, "30 frames", "MediaLimits.max_frames=20"),
        open_video([np.zeros((2, 2, 3), np.uint8)] * 30, MediaLimits(max_frames=20)),
    ):
        pass


@pytest.mark.parametrize("kind", ["RGB", "L", "RGBA", "CMYK", "I;16"])
def test_all_color_modes_become_rgb(kind):
    pixels = open_image(image(kind, 40, 30), LIMITS)
    assert pixels.shape == (30, 40, 3) and pixels.dtype == np.uint8 and pixels.std() > 10


def test_16_bit_grayscale_files_are_scaled_to_8_bits(tmp_path):
    from PIL import Image

    levels = np.asarray([[0, 257, 32896, 65535]], np.uint16)
    pgm = b"P5 4 1 65535 " + levels.astype(">u2").tobytes()
    tiff = tmp_path / "image.tif"
    Image.fromarray(levels).save(tiff)
    for source in (pgm, tiff):
        assert open_image(source, LIMITS)[0, :, 0].tolist() == [0, 1, 128, 255]


def test_images_with_an_unknown_range_of_values_are_refused(tmp_path):
    from PIL import Image

    for dtype, mode in ((np.int32, "I"), (np.float32, "F")):
        picture = Image.fromarray(np.ones((2, 2), dtype))
        picture.save(tmp_path / "image.tif")
        for source in (picture, tmp_path / "image.tif"):
            with refused(DataError, f"'{mode}'"):
                open_image(source, LIMITS)


def test_16_bit_transparent_color_becomes_white():
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    pixels = np.asarray([[5140, 5140, 5140], [0, 51400, 0]], ">u2")
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0))
    png += chunk(b"tRNS", pixels[1].tobytes()) + chunk(b"IDAT", zlib.compress(b"\0" + pixels.tobytes()))
    png += chunk(b"IEND", b"")
    assert open_image(png, LIMITS).tolist() == [[[20, 20, 20], [255, 255, 255]]]


TRANSPARENT = {
    "RGBA": ("RGBA", {"PNG": {}, "WEBP": {"lossless": True}, "TIFF": {}}),
    "LA": ("LA", {"PNG": {}}),
    "palette": ("P", {"PNG": {"transparency": 1}, "GIF": {"transparency": 1}}),
    "palette with levels": ("P", {"PNG": {"transparency": bytes([255, 0])}}),
    "one color": ("RGB", {"PNG": {"transparency": (0, 200, 0)}}),
    "one gray level": ("L", {"PNG": {"transparency": 90}}),
    "one level of 16 bits": ("I;16", {"PNG": {"transparency": 30000}}),
}


def half_transparent(mode: str) -> Any:
    """Return an image with an opaque dark left half and a transparent right half."""
    from PIL import Image

    if mode == "I;16":
        return Image.fromarray(np.repeat([[5140, 30000]], 4, 0).repeat(3, 1).astype(np.uint16))
    if mode == "P":
        made = Image.fromarray(np.repeat([[0, 1]], 4, 0).repeat(3, 1).astype(np.uint8), "P")
        made.putpalette([20, 20, 20, 0, 200, 0])
        return made
    colors = {"L": [[20], [90]], "RGB": [[20, 20, 20], [0, 200, 0]], "LA": [[20, 255], [90, 0]]}
    pair = np.asarray(colors.get(mode, [[20, 20, 20, 255], [0, 200, 0, 0]]), np.uint8)
    pixels = np.repeat(pair[None], 5, 0).repeat(3, 1)
    return Image.fromarray(pixels[..., 0] if mode == "L" else pixels, mode)


@pytest.mark.parametrize("name", TRANSPARENT)
def test_transparent_pixels_of_files_become_white(name, tmp_path):
    mode, formats = TRANSPARENT[name]
    picture = half_transparent(mode)
    for kind, options in formats.items():
        path = tmp_path / f"image.{kind.lower()}"
        picture.save(path, kind, **options)
        for source in (path, str(path), path.read_bytes()):
            pixels = open_image(source, LIMITS)
            assert (pixels[:, :3] == 20).all() and (pixels[:, 3:] == 255).all(), (kind, pixels[0])


@pytest.mark.parametrize("mode", ["RGBA", "LA", "La", "RGBa", "PA"])
def test_transparent_pixels_of_images_in_memory_become_white(mode):
    picture = half_transparent("LA" if mode in ("LA", "La") else "RGBA")
    if mode == "PA":
        alpha = picture.getchannel("A")
        picture = picture.convert("RGB").convert("P").convert("PA")
        picture.putalpha(alpha)
    pixels = open_image(picture.convert(mode), LIMITS)
    assert (abs(pixels[:, :3].astype(int) - 20) < 40).all() and (pixels[:, 3:] == 255).all()


def test_transparent_pixels_of_arrays_and_frames_become_white():
    pixels = np.asarray(half_transparent("RGBA"))
    for array in (pixels, np.moveaxis(pixels, -1, 0)):
        assert open_image(array, LIMITS)[0].tolist() == [[20] * 3] * 3 + [[255] * 3] * 3
    with open_video([pixels, half_transparent("RGBA")], LIMITS) as clip:
        frames = [*clip.frames([0, 1])]
    assert all(frame[0].tolist() == [[20] * 3] * 3 + [[255] * 3] * 3 for frame in frames)


def test_transparent_pixels_of_video_files_become_white(tmp_path):
    av = pytest.importorskip("av")
    path = tmp_path / "clip.mov"
    pixels = np.asarray(half_transparent("RGBA").resize((12, 8)))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("png", rate=1)
        stream.width, stream.height, stream.pix_fmt = 12, 8, "rgba"
        for _ in range(2):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgba")))
        container.mux(stream.encode(None))
    with open_video(path, LIMITS) as clip:
        (frame,) = clip.frames([0])
    assert (frame[:, 0] == 20).all() and (frame[:, -1] == 255).all()


def test_16_bit_grayscale_images_in_memory_are_scaled_to_8_bits():
    from PIL import Image

    levels = np.asarray([[0, 257, 32896, 65535]], np.uint16)
    assert open_image(Image.fromarray(levels), LIMITS)[0, :, 0].tolist() == [0, 1, 128, 255]
