"""Decoding of video, audio and image files, including malformed and hostile files."""

import io
import json
import os
import pathlib
import struct
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest

from eqx_decoders.errors import ConfigError, DataError
from eqx_decoders.families.qwen.processor import Qwen3VideoProcessor, QwenVideoProcessor
from eqx_decoders.io.processors.processor import FileReader
from eqx_decoders.media_files.audio import LogMel, open_audio
from eqx_decoders.media_files.images import open_image
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.video import Video, open_video
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import assert_names, refused
from tests.io.processors.media_files import audio, frame_indices, gray_frames, image, video


av = pytest.importorskip("av")
soundfile = pytest.importorskip("soundfile")
soxr = pytest.importorskip("soxr")
ALL = list(range(20))
SECONDS = 2.0  # maximum time to refuse a file


# --- videos -----------------------------------------------------------------------------------------------------------


FORMS = {
    "mp4": dict(),
    "h264": dict(form="mp4", codec="libx264"),
    "fragments": dict(form="mp4", options={"movflags": "frag_keyframe+empty_moov"}),
    "mkv": dict(form="matroska", codec="ffv1", coded_as="bgr0"),
    "streamed mkv": dict(form="matroska", codec="libx264", options={"live": "1"}),
    "webm": dict(form="webm", codec="libvpx-vp9", coding={"cpu-used": "8", "deadline": "realtime"}),
    "avi": dict(form="avi"),
    "gif": dict(form="gif", codec="gif", coded_as="rgb8"),
    "apng": dict(form="apng", codec="apng", coded_as="rgb24"),
    "ts": dict(form="mpegts", codec="libx264"),
    "raw h264": dict(form="h264", codec="libx264"),
    "raw mjpeg": dict(form="mjpeg", codec="mjpeg", coded_as="yuvj420p"),
}
CUT_IS_SEEN = ("mp4", "h264", "mkv", "avi")


@pytest.fixture(scope="module")
def videos():
    return {name: video(**options) for name, options in FORMS.items()}


def decoded(file: bytes) -> list[np.ndarray]:
    """Return all frames, decoded by PyAV."""
    with av.open(io.BytesIO(file)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@pytest.mark.slow(fast=("apng",))
@pytest.mark.parametrize("name", FORMS)
def test_decoded_frames_equal_those_of_pyav(videos, name, tmp_path):
    """Also in containers that store neither the number of frames nor a duration, and cannot seek."""
    path = tmp_path / "video"
    path.write_bytes(videos[name])
    whole = decoded(videos[name])
    for source in (videos[name], path, str(path)):
        with open_video(source) as clip:
            assert (clip.num_frames, clip.height, clip.width, clip.use_all_frames) == (20, 32, 48, False)
            assert clip.fps == (25.0 if name.startswith("raw") else 10.0)  # raw streams have no timestamps
            assert frame_indices(clip.frames(ALL)) == ALL
            taken = list(clip.frames([0, 7, 7, 19]))
        for number, pixels in zip([0, 7, 7, 19], taken, strict=True):
            assert_array_equal(pixels, whole[number])
    if name == "mkv":  # lossless
        assert_array_equal(whole, gray_frames(20))


def processed(rules, source):
    with open_video(source) as clip:
        return rules.process(clip, MediaLimits())


@pytest.mark.slow(fast=("all", "by rate", "by count"))
@pytest.mark.parametrize(
    "rules, indices",
    [
        (QwenVideoProcessor(min_pixels=784), ALL),  # directories of Qwen2.5-VL do not sample frames
        (QwenVideoProcessor(min_pixels=784, sample_frames=True, fps=2.0), [0, 5, 10, 15]),
        (QwenVideoProcessor(min_pixels=784, sample_frames=True, num_frames=6), [0, 3, 6, 10, 13, 16]),
        (QwenVideoProcessor(min_pixels=784, sample_frames=True, fps=2.0, max_frames=3), [0, 10]),
        (Qwen3VideoProcessor(), [0, 6, 13, 19]),
        (Qwen3VideoProcessor(fps=1.0), [0, 6, 13, 19]),  # the minimum is four frames
        (Qwen3VideoProcessor(fps=3.0), [0, 4, 8, 11, 15, 19]),
        (Qwen3VideoProcessor(fps=None, num_frames=3), [0, 10, 19]),
    ],
    ids=["all", "by rate", "by count", "at most", "qwen3", "qwen3, at least", "qwen3, by rate", "qwen3, by count"],
)
def test_each_family_samples_the_expected_frames(videos, rules, indices):
    made, whole = processed(rules, videos["h264"]), decoded(videos["h264"])
    with open_video(Video(frames=[whole[index] for index in indices])) as clip:
        known = rules.process(clip, MediaLimits())
    assert_array_equal(made.arrays["pixel_values_videos"], known.arrays["pixel_values_videos"])
    assert_array_equal(made.arrays["video_grid_thw"], known.arrays["video_grid_thw"])
    if isinstance(rules, Qwen3VideoProcessor):
        pairs = np.pad(indices, (0, len(indices) % 2), mode="edge").reshape(-1, 2)
        times = [f"<{(own[0] / 10 + own[1] / 10) / 2:.1f} seconds>" for own in pairs]
        assert [piece + ">" for piece in made.text.split(">") if piece.endswith(" seconds")] == times
    else:
        assert made.arrays["second_per_grid_ts"] == pytest.approx(2 / (len(indices) / 20 * 10))


@pytest.mark.parametrize("options", [{}, FORMS["mkv"]])
def test_frame_rate_of_uneven_frames_is_their_mean(options):
    """Computed from all timestamps: a Matroska header has the rate of the first frames."""
    file = video(**options, milliseconds=[10 * number**2 for number in ALL])
    with open_video(file) as clip:
        assert (clip.num_frames, clip.fps) == (20, pytest.approx(20 / 3.71))
        made = Qwen3VideoProcessor().process(clip, MediaLimits())
    assert made.arrays["video_grid_thw"][0, 0] == 4  # of seven frames: 3.71 s at 2 frames per second


def test_frames_outside_of_the_edit_list_are_skipped():
    """A video that was trimmed without encoding again still contains the frames from the last key frame on."""
    file = video(shift=-550, coding={"g": "5"})
    with av.open(io.BytesIO(file)) as container:
        assert container.streams.video[0].frames == 20
    with open_video(file) as clip:
        assert (clip.num_frames, clip.fps) == (14, 10.0)
        assert frame_indices(clip.frames(range(14))) == list(range(6, 20))


@pytest.mark.parametrize("turned", [90, 180, 270])
def test_rotation_of_videos_is_applied(turned):
    """Like the EXIF orientation of images."""
    frames = gray_frames(2)
    for pixels in frames:
        pixels[:16, :24] = 250
    with open_video(video("mov", frames=frames, turned=turned)) as clip:
        found = next(clip.frames([0]))
        expected = np.rot90(frames[0], turned // 90)
        assert found.shape == expected.shape == (clip.height, clip.width, 3)
    assert np.abs(found.astype(int) - expected).mean() < 8


def test_video_of_one_frame():
    with open_video(video(frames=gray_frames(1))) as clip:
        assert (clip.num_frames, clip.fps) == (1, 10.0)
    assert processed(Qwen3VideoProcessor(), video(frames=gray_frames(1))).arrays["video_grid_thw"][:, 0].tolist() == [1]
    still = io.BytesIO()
    from PIL import Image

    Image.fromarray(gray_frames(1)[0]).save(still, "GIF")
    with open_video(still.getvalue()) as clip:
        assert (clip.num_frames, frame_indices(clip.frames([0]))) == (1, [0])


def test_video_with_an_audio_stream(videos):
    with open_video(video(audio=True)) as clip:
        assert frame_indices(clip.frames(ALL)) == ALL


def wav(samples: np.ndarray, rate: int = 16_000, kind: str = "PCM_16", form: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, subtype=kind)
    return file.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def with_size(form: str, file: bytes, width: int, height: int) -> bytes:
    """Return a video file with another size in its header."""
    if form == "gif":
        return file[:6] + struct.pack("<HH", width & 0xFFFF, height & 0xFFFF) + file[10:]
    if form == "apng":
        return file[:8] + chunk(b"IHDR", struct.pack(">II", width, height) + file[24:29]) + file[33:]
    if form == "avi":
        return file.replace(struct.pack("<II", 48, 32), struct.pack("<II", width, height))
    whole = b"\xb0\x81\x30\xba\x81\x20"  # of Matroska
    assert whole in file
    return file.replace(
        whole, b"\xb0\x83" + width.to_bytes(3, "big") + b"\xba\x82" + (height & 0xFFFF).to_bytes(2, "big")
    )


def video_of_size(number: int) -> bytes:
    return video("h264", "libx264", frames=gray_frames(4, *((48, 32), (64, 48))[number]))


def hostile_videos() -> dict[str, bytes]:
    """Return malformed files by kind."""
    mp4, avi, mkv = video(), video(**FORMS["avi"]), video(**FORMS["mkv"])
    place = mp4.index(b"stsz")
    many = mp4[: place + 12] + struct.pack(">I", 0x7FFFFFFF) + mp4[place + 16 :]
    place = mp4.index(b"stts")
    long = mp4[: place + 16] + struct.pack(">I", 0x7FFFFFFF) + mp4[place + 20 :]
    place = avi.index(b"strh")
    claims = avi[: place + 40] + struct.pack("<I", 0x7FFFFFFF) + avi[place + 44 :]
    return {
        "nothing": b"",
        "zeros": bytes(5000),
        "a beginning": mp4[:32] + np.random.default_rng(0).bytes(5000),
        "another beginning": mkv[:64] + np.random.default_rng(0).bytes(5000),
        "text": b"this is no video. " * 100,
        "an audio clip": wav(audio(0.1)),
        "only audio": video(frames=[], audio=True),
        "a cover": video(codec="png", frames=gray_frames(1), coded_as="rgb24", cover=True, audio=True),
        "an image": image("RGB", 30, 30),
        "2^31 frames": many,
        "frames that last long": long,
        "gif of 4e9 pixels": with_size("gif", video(**FORMS["gif"]), 65_535, 65_535),
        "apng of 1e10 pixels": with_size("apng", video(**FORMS["apng"]), 100_000, 100_000),
        "mkv of 6e9 pixels": with_size("mkv", mkv, 100_000, 65_535),
        "sizes that change": video_of_size(0) + video_of_size(1),
        "playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nvideo.ts\n#EXT-X-ENDLIST\n",
        "list": b"ffconcat version 1.0\nfile video.ts\n",
        "session": b"v=0\no=- 0 0 IN IP4 ::1\ns=x\nc=IN IP4 ::1\nm=video 9 RTP/AVP 96\n",
        "manifest": b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"></MPD>',
        # wrong counts and sizes in one header are harmless if another header has the right ones
        "claimed frames": claims,
        "claimed pixels": with_size("avi", avi, 100_000, 100_000),
    }  # fmt: skip


NAMED = {
    "nothing": "0 bytes",
    "frames that last long": "MediaLimits.max_seconds=7200",
    "sizes that change": "64 x 48 pixels",
}


@pytest.fixture(scope="module")
def hostile_files(tmp_path_factory):
    """Write the malformed files, and a video that they must not open."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "video.ts").write_bytes(video(**FORMS["ts"]))
    found = hostile_videos()
    for name, content in found.items():
        (folder / f"{name}.mp4").write_bytes(content)
    return folder, found


def count_frames(source, limits=MediaLimits()) -> int:
    with open_video(source, limits) as clip:
        return sum(1 for _ in clip.frames(range(clip.num_frames)))


KINDS = (
    "nothing", "zeros", "a beginning", "another beginning", "text", "an audio clip", "only audio", "a cover",
    "an image", "2^31 frames", "frames that last long", "gif of 4e9 pixels", "apng of 1e10 pixels", "mkv of 6e9 pixels",
    "sizes that change", "playlist", "list", "session", "manifest",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_malformed_videos_are_refused(hostile_files, monkeypatch, kind):
    """As files and as bytes, within a time limit. Playlists do not open the video that they name."""
    folder, found = hostile_files
    monkeypatch.chdir(folder)
    content, name = found[kind], NAMED.get(kind, "")
    for source in (f"{kind}.mp4", content):
        if source == b"":
            continue
        begin = time.perf_counter()
        with refused(DataError, repr(source) if isinstance(source, str) else "video 1 (bytes)", name) as caught:
            count_frames(source)
        assert time.perf_counter() - begin < SECONDS
        assert "0x" not in str(caught.value) and "Errno" not in str(caught.value)


def test_wrong_counts_and_sizes_in_one_header_are_harmless(hostile_files):
    assert [count_frames(hostile_files[1][name]) for name in ("claimed frames", "claimed pixels")] == [20, 20]


@pytest.mark.parametrize("name", FORMS)
def test_too_many_frames_are_refused_before_decoding(videos, name, monkeypatch):
    """Packets are counted; counts in headers are not used."""
    monkeypatch.setattr("eqx_decoders.media_files.video._decode_frames", lambda *given: pytest.fail("decoded"))
    with (
        refused(DataError, "12 frames", "48 x 32 pixels", "MediaLimits.max_decoded_pixels"),
        open_video(videos[name], MediaLimits(max_decoded_pixels=11 * 48 * 32)),
    ):
        pass


@pytest.mark.slow
def test_videos_share_the_limit_of_decoded_pixels(videos, tmp_path):
    """Images share the limit of stored pixels, which is checked before the first one is decoded."""
    (tmp_path / "preprocessor_config.json").write_text('{"processor_class": "Qwen2_5_VLProcessor", "patch_size": 2}')

    def read(**given):
        limits = MediaLimits(max_decoded_pixels=30 * 48 * 32, max_total_pixels=1000)
        return FileReader.load_reader(tmp_path, limits=limits).read(given)

    assert len(read(video=[videos["mp4"]])["video"]) == 1
    with refused(DataError, "video 2 (bytes)", "11 frames", "48 x 32 pixels"):
        read(video=[videos["mp4"]] * 2)
    assert len(read(image=[image("RGB", 25, 20)] * 2)["image"]) == 2
    with refused(DataError, "image 3 (bytes)", "1,500 pixels"):
        read(image=[image("RGB", 25, 20)[:200]] * 3)


@pytest.mark.slow(fast=("mp4", "h264"))
@pytest.mark.parametrize("name", FORMS)
def test_truncated_videos_are_refused_or_shorter(videos, name):
    """Truncation is an error if the header of the format contains the length."""
    file = videos[name]
    for end in sorted({1, 4, 12, 40, 100, len(file) - 200, len(file) - 1, *range(0, len(file), len(file) // 6 + 1)}):
        try:
            count = count_frames(file[: max(end, 1)])
        except DataError:
            continue
        assert count == 20 or (name not in CUT_IS_SEEN and 0 < count < 20), end


@pytest.mark.slow
def test_damaged_videos_are_refused_or_read(videos):
    """A few random bytes of each video are changed."""
    generator = np.random.default_rng(0)
    for file in videos.values():
        for _ in range(6):
            damaged = bytearray(file)
            for place in generator.integers(0, min(len(file), 800), 4):
                damaged[place] = generator.integers(0, 256)
            try:
                count_frames(bytes(damaged), MediaLimits(max_pixels=100_000, max_frames=100))
            except DataError as error:
                assert_names(str(error), "video 1 (bytes)")


@pytest.mark.parametrize(
    "opened", [count_frames, open_image, lambda source: open_audio(source, 16_000)], ids=["video", "image", "audio"]
)
def test_only_files_are_opened(opened, tmp_path, monkeypatch):
    """URLs and names with a special meaning in FFmpeg or libsndfile are not opened, and named pipes do not block."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.mp4").write_bytes(video())
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    addresses = ["http://127.0.0.1:1/a.mp4", "tcp://127.0.0.1:1", "data:video/mp4;base64,AAAA", "file:///etc/passwd"]
    names = [
        "concat:a.mp4|a.mp4",
        "file:a.mp4",
        "subfile,,start,0,end,9,,:a.mp4",
        "lavfi:testsrc",
        "pipe:0",
        "-",
        "x\0",
    ]
    for name in (*addresses, *names, "none.mp4", "n" * 300, ".", "pipe", "/dev/zero", "empty"):
        begin = time.perf_counter()
        with refused(DataError, repr(name[:100])[:-1]):
            opened(name)
        assert time.perf_counter() - begin < SECONDS


def test_links_and_unusual_file_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("concat:a", "-", "%03d.mp4", "http:"):
        (tmp_path / name).write_bytes(video(frames=gray_frames(2)))
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(name)
        assert count_frames(name) == count_frames("link") == 2
    (tmp_path / "-").unlink()
    (tmp_path / "-").write_bytes(wav(audio(0.1)))
    assert len(open_audio("-", 16_000)) == 1600


def test_limits_of_videos(videos):
    for limits, *named in (
        (MediaLimits(max_frames=19), "20 frames", "MediaLimits.max_frames=19"),
        (MediaLimits(max_seconds=1.5), " s", "MediaLimits.max_seconds=1.5"),
        (MediaLimits(max_pixels=1000), "48 x 32 pixels", "MediaLimits.max_pixels=1,000"),
        (MediaLimits(max_decoded_pixels=20_000), "48 x 32 pixels", "MediaLimits.max_decoded_pixels=20,000"),
    ):
        for name in ("mp4", "mkv", "gif", "ts"):
            with refused(DataError, *named):
                count_frames(videos[name], limits)


# --- audio -----------------------------------------------------------------------------------------------------------


def steps(rate: int, channels: int) -> np.ndarray:
    rows = np.stack([audio(0.5, rate, seed=seed) for seed in range(channels)], 1)
    return rows * np.linspace(0.4, 0.9, channels, dtype=np.float32)


@pytest.mark.parametrize("rate", [8000, 16_000, 44_100, 48_000])
@pytest.mark.parametrize("kind", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT"])
def test_audio_equals_the_resampled_mean_of_channels(kind, rate):
    """Resampled as in librosa: soxr with high quality, and `ceil` of the new length."""
    given = steps(rate, 2)
    made = open_audio(wav(given, rate, kind), 16_000)
    error = {"PCM_U8": 2**-6, "PCM_16": 2**-14, "PCM_24": 1e-6, "PCM_32": 1e-6, "FLOAT": 1e-6}[kind]
    known = given.mean(axis=1)
    if rate != 16_000:
        known = soxr.resample(known, rate, 16_000, quality="soxr_hq")
    assert made.shape == (8000,) and made.dtype == np.float32
    assert_allclose(made, np.pad(known, (0, 8000 - len(known))), atol=error)


@pytest.mark.parametrize("form, kind", [("FLAC", "PCM_16"), ("AIFF", "PCM_16"), ("CAF", "FLOAT"), ("AU", "PCM_16")])
def test_lossless_audio_formats(form, kind, tmp_path):
    path = tmp_path / "audio.bin"
    path.write_bytes(wav(steps(16_000, 1), 16_000, kind, form))
    assert_allclose(open_audio(path, 16_000), steps(16_000, 1)[:, 0], atol=2**-15)


@pytest.mark.parametrize("form, kind", [("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")])
def test_lossy_audio_formats(form, kind):
    given = audio(1.0)
    made = open_audio(wav(given, 16_000, kind, form), 16_000)
    assert abs(len(made) - len(given)) < 2000
    made, given = (np.abs(LogMel()(x[:15_000])).mean(axis=1) for x in (made, given))
    assert np.abs(made - given).mean() < 0.15


def test_long_audio_is_resampled_in_chunks(monkeypatch):
    """The result equals resampling at once, which would need more memory."""
    monkeypatch.setattr("eqx_decoders.media_files.audio.CHUNK", 1000)
    given = np.random.default_rng(0).normal(0, 0.1, 30_011).astype(np.float32)
    known = soxr.resample(given, 44_100, 16_000, quality="soxr_hq")
    for source in (wav(given, 44_100, "FLOAT"), (given, 44_100)):
        made = open_audio(source, 16_000)
        assert len(made) == 10_889  # the ceiling of 10,888.3
        assert_array_equal(made[: len(known)], known[: len(made)])


def patched(file: bytes, place: int, form: str, value: int) -> bytes:
    new = struct.pack(form, value)
    return file[:place] + new + file[place + len(new) :]


FORMATS = "WAV, FLAC, Ogg Vorbis"


def hostile_audio() -> dict[str, tuple[bytes, str]]:
    """Return malformed files by kind, each with a word of the error message."""
    whole, flac = wav(audio(0.1)), wav(audio(0.1), form="FLAC")
    nan, infinite = audio(0.1), audio(0.1)
    nan[7], infinite[7] = np.nan, -np.inf
    length = int.from_bytes(flac[21:26], "big")  # the lower 36 bits are the number of samples
    return {
        "zeros": (bytes(5000), FORMATS),
        "text": (b"this is no audio. " * 100, FORMATS),
        "a video": (video(), FORMATS),
        "no samples": (wav(np.zeros(0, np.float32)), "0 s"),
        "nan": (wav(nan, kind="FLOAT"), "infinite"),
        "infinite": (wav(infinite, kind="FLOAT"), "infinite"),
        "1 Hz": (patched(whole, 24, "<I", 1), "768,000"),
        "1e9 Hz": (patched(whole, 24, "<I", 10**9), "1,000,000,000"),
        "0 Hz": (patched(whole, 24, "<I", 0), FORMATS),
        "no channels": (patched(whole, 22, "<H", 0), FORMATS),
        "65535 channels": (patched(whole, 22, "<H", 65_535), FORMATS),
        "2 GB": (patched(whole, 40, "<I", 0x7000_0000), "1,879,048,236"),
        "2^36 samples": (flac[:21] + (length | 0xFFFFFFFFF).to_bytes(5, "big") + flac[26:], "max_seconds=7200"),
        "no length": (flac[:21] + (length & ~0xFFFFFFFFF).to_bytes(5, "big") + flac[26:], "length"),
        "cut wav": (whole[:-100], "3,144"),
        "cut flac": (flac[:-100], FORMATS),
        "cut ogg": (wav(audio(0.5), kind="VORBIS", form="OGG")[:3000], FORMATS),
        "beginning": (whole[:16] + np.random.default_rng(0).bytes(3000), FORMATS),
    }  # fmt: skip


@pytest.mark.slow(fast=("zeros", "text", "a video", "no samples", "nan", "infinite", "1 Hz"))
@pytest.mark.parametrize("kind", hostile_audio())
def test_malformed_audio_is_refused(kind, tmp_path):
    content, name = hostile_audio()[kind]
    path = tmp_path / "x.wav"
    path.write_bytes(content)
    for source in (path, content):
        begin = time.perf_counter()
        with refused(DataError, path if source is path else "audio 1 (bytes)", name) as caught:
            open_audio(source, 16_000)
        assert time.perf_counter() - begin < SECONDS
        assert "0x" not in str(caught.value)


def test_unusual_audio_files_are_read():
    """A file with many channels, and a streamed WAV file whose header has no length."""
    given = audio(0.1)
    many = wav(np.repeat(given[:, None], 255, axis=1))
    assert_allclose(open_audio(many, 16_000), given, atol=2**-14)
    streamed = patched(patched(wav(given), 4, "<I", 0xFFFFFFFF), 40, "<I", 0xFFFFFFFF)
    assert_allclose(open_audio(streamed, 16_000), given, atol=2**-15)
    assert len(open_audio((given, np.int64(8000)), 16_000)) == 2 * len(given)


@pytest.mark.parametrize(
    "form, kind", [("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III")]
)
def test_truncated_audio_is_refused_or_shorter(form, kind):
    file = wav(audio(0.2), kind=kind, form=form)
    for end in sorted({1, 4, 12, 44, 50, len(file) - 1, *range(1, len(file), len(file) // 8)}):
        try:
            made = open_audio(file[:end], 16_000)
        except DataError:
            continue
        assert form in ("MP3", "OGG") and 0 < len(made) < 4000


def test_limits_of_audio():
    with refused(DataError, "0.5 s", "MediaLimits.max_seconds=0.4"):
        open_audio(wav(audio(0.5)), 16_000, MediaLimits(max_seconds=0.4))
    with refused(DataError, "16,000", "MediaLimits.max_samples=9,000"):
        open_audio(wav(steps(16_000, 2)), 16_000, MediaLimits(max_samples=9000))
    with refused(ConfigError, "LogMel.rate=1000000000"):
        LogMel(rate=10**9)


# --- images, memory -------------------------------------------------------------------------------------------------


def test_image_bombs_and_damaged_images():
    whole = image("RGB", 30, 20)
    for width, height in ((100_000, 100_000), (2**31 - 1, 2**31 - 1)):
        with refused(DataError, "image 1 (bytes)", f"{width * height} pixels"):
            open_image(whole[:8] + chunk(b"IHDR", struct.pack(">II", width, height) + whole[24:29]) + whole[33:])
    generator = np.random.default_rng(0)
    for _ in range(30):
        damaged = bytearray(whole)
        damaged[int(generator.integers(0, 100))] ^= int(generator.integers(1, 256))
        try:
            open_image(bytes(damaged), MediaLimits(max_pixels=100_000))
        except DataError as error:
            assert_names(str(error), "image 1 (bytes)")
            assert "0x" not in str(error)


BOMBS = """
import json, pathlib, resource, sys, time
from eqx_decoders.errors import DataError
from eqx_decoders.media_files.video import open_video
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.audio import open_audio
folder = pathlib.Path(sys.argv[1])
open_audio(folder / "small.flac", 16_000)
with open_video(folder / "small.video") as clip:
    list(clip.frames([0]))
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (used + (700 << 20),) * 2)
before, found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, {}
for path in sorted(folder.glob("bomb.*")):
    begin, limits = time.perf_counter(), MediaLimits(max_pixels=1_000_000)
    try:
        if path.suffix == ".flac":
            told = str(len(open_audio(path, 16_000)))
        else:
            with open_video(path, limits) as clip:
                told = str(sum(1 for _ in clip.frames(range(clip.num_frames))))
    except DataError as error:
        told = str(error)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    found[path.name] = [told, time.perf_counter() - begin, grown >> 10]
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="Linux tells what memory a process has")
def test_small_files_do_not_use_much_memory(tmp_path):
    """Two minutes of silence at 500 kHz in a few kilobytes, and videos with too large sizes in their headers."""
    (tmp_path / "small.flac").write_bytes(wav(audio(0.1), 44_100, form="FLAC"))
    (tmp_path / "small.video").write_bytes(video())
    with soundfile.SoundFile(tmp_path / "bomb.flac", "w", samplerate=500_000, channels=1, subtype="PCM_16") as file:
        for _ in range(60):
            file.write(np.zeros(1_000_000, np.int16))
    for name, content in hostile_videos().items():
        (tmp_path / f"bomb.{name}").write_bytes(content)
    large = np.zeros((6000, 8000, 3), np.uint8)
    (tmp_path / "bomb.large").write_bytes(video("mjpeg", "mjpeg", frames=[large], coded_as="yuvj420p"))
    root = pathlib.Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BOMBS, str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (tmp_path / "bomb.flac").stat().st_size < 300_000 and found["bomb.flac"][0] == "1920000"
    assert len(found) == len(KINDS) + 4
    for name, (told, seconds, megabytes) in found.items():
        assert megabytes < 100, (name, megabytes)
        assert name == "bomb.flac" or seconds < SECONDS
        assert told.isdigit() or told.startswith("video "), told
