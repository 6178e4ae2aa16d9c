"""Synthetic images, videos and audio for tests of processors and for their reference values."""

import io
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np


KINDS = ("RGB", "L", "RGBA", "CMYK", "I;16")


def image(kind: str, width: int, height: int, seed: int = 0) -> bytes:
    """Return an image file with gradients, waves and noise."""
    from PIL import Image

    generator = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width].astype(float)
    waves = 127 + 127 * np.sin(columns / 7) * np.cos(rows / 5)
    ramps = [255 * columns / max(width - 1, 1), 255 * rows / max(height - 1, 1)]
    noisy = np.stack([*ramps, waves], -1) + generator.normal(0, 20, (height, width, 3))
    made = Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))
    if kind == "I;16":
        made = Image.fromarray((noisy[..., 0].clip(0, 255) * 257).astype(np.uint16))
    elif kind != "RGB":
        made = made.convert(kind)
    file = io.BytesIO()
    made.save(file, "TIFF" if kind == "CMYK" else "PNG")
    return file.getvalue()


def audio(seconds: float, rate: int = 16_000, seed: int = 0) -> np.ndarray:
    """Return a tone of increasing volume, with noise."""
    times = np.arange(int(seconds * rate)) / rate
    tone = 0.4 * np.sin(2 * np.pi * 440 * times) + 0.2 * np.sin(2 * np.pi * (300 + 900 * times) * times)
    noise = 0.01 * np.random.default_rng(seed).normal(size=times.shape)
    return ((tone + noise) * np.linspace(0.1, 1, len(times))).astype(np.float32)


IMAGES = {
    "wide": ("RGB", 150, 61),
    "tall": ("RGB", 37, 101),
    "grey": ("L", 64, 64),
    "clear": ("RGBA", 80, 56),  # opaque: transformers would composite on black
    "printed": ("CMYK", 60, 60),
}
SECONDS = (0.7, 2.345)
PHI4_AUDIO = (0.7, 2.345, 0.0251)
# settings of the feature extractor of Gemma 4, and durations of audio
GEMMA_AUDIO = {
    "published": ({"padding_side": "left"}, [2.345]),
    "several": ({}, [0.7, 2.345, 0.02, 0.3137]),
    "long": ({}, [30.5]),
    "all settings": (
        dict(feature_size=8, frame_length_ms=25.0, hop_length_ms=12.5, min_frequency=60.0, max_frequency=7000.0)
        | dict(preemphasis=0.97, fft_overdrive=True, input_scale_factor=2.5, mel_floor=0.01, sampling_rate=22_050)
        | dict(per_bin_mean=[0.5, -1, 0, 2, -2, 3, 1, 0.1], per_bin_stddev=[0.5, 1.5, 2, 1, 1, 3, 0.25, 1]),
        [0.9],
    ),
    "emphasis over borders": (dict(preemphasis=0.5, preemphasis_htk_flavor=False, sampling_rate=8000), [0.4, 0.21]),
}
# settings of the feature extractor of Gemma 3n
GEMMA3N_AUDIO = {
    "3n, several": ({}, [0.7, 2.345, 0.02]),
    "3n, long": ({}, [30.5]),
    "3n, all settings": (
        dict(feature_size=8, frame_length_ms=25.0, hop_length_ms=12.5, min_frequency=60.0, max_frequency=7000.0)
        | dict(preemphasis=0.5, preemphasis_htk_flavor=False, fft_overdrive=False, input_scale_factor=2.5)
        | dict(mel_floor=0.1, sampling_rate=22_050, per_bin_mean=[0.5, -1, 0, 2, -2, 3, 1, 0.1])
        | dict(per_bin_stddev=[0.5, 1.5, 2, 1, 1, 3, 0.25, 1]),
        [0.9],
    ),
}


_SMOL = dict(size={"longest_edge": 72}, max_image_size={"longest_edge": 24})
_INTERNVL = dict(size={"height": 14, "width": 14})
_GLM = dict(patch_size=4, size={"shortest_edge": 500, "longest_edge": 4000})
_GEMMA = dict(patch_size=2, pooling_kernel_size=2)
# Family, settings of the video processor, frames, frames per second (None for a list of frames), height and width.
VIDEOS = {
    "smolvlm published": (
        "smolvlm",
        _SMOL | {"video_sampling": dict(fps=1, max_frames=64, video_size=8)},
        50,
        10.0,
        31,
        47,
    ),
    "smolvlm long": ("smolvlm", {**_SMOL, "fps": 0.5, "num_frames": 5}, 100, 10.0, 40, 23),
    "smolvlm one": ("smolvlm", {**_SMOL, "fps": 2, "num_frames": 3}, 1, 24.0, 24, 24),
    "smolvlm fewer": ("smolvlm", {**_SMOL, "fps": 30, "num_frames": 40, "do_normalize": False}, 7, 7.5, 5, 90),
    "smolvlm own size": (
        "smolvlm",
        dict(max_image_size={"longest_edge": 9}, resample=3, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6])
        | {"video_sampling": dict(fps=3.0, max_frames=4, video_size={"height": 33, "width": 15})},
        30,
        29.97,
        20,
        20,
    ),
    "smolvlm all": ("smolvlm", dict(size={"longest_edge": 9}, max_image_size={"longest_edge": 4}), 121, 1.5, 6, 8),
    "smolvlm listed": ("smolvlm", {**_SMOL, "resample": 2}, 4, None, 30, 30),
    "gemma4 published": ("gemma4", _GEMMA, 50, 10.0, 31, 47),
    "gemma4 rate": ("gemma4", {**_GEMMA, "num_frames": None, "fps": 0.5}, 100, 1.25, 40, 23),
    "gemma4 one": ("gemma4", {**_GEMMA, "num_frames": 1, "max_soft_tokens": 140}, 9, 24.0, 48, 64),
    "gemma4 long side": ("gemma4", {**_GEMMA, "num_frames": 2, "do_normalize": False}, 3, 0.01, 5, 490),
    "gemma4 all": (
        "gemma4",
        dict(patch_size=4, pooling_kernel_size=3, do_sample_frames=False, resample=2)
        | dict(image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6]),
        5,
        29.97,
        30,
        30,
    ),
    "gemma4 listed": ("gemma4", _GEMMA, 2, None, 28, 20),
    "glm4v published": ("glm4v", _GLM, 50, 10.0, 31, 47),
    "glm4v long": ("glm4v", {**_GLM, "max_duration": 3, "fps": 1.5}, 30, 7.5, 20, 33),
    "glm4v few": ("glm4v", {**_GLM, "max_duration": 1, "fps": 4}, 3, 1.5, 2, 9),
    "glm4v listed": ("glm4v", _GLM, 5, None, 16, 16),
    "glm46v published": ("glm46v", _GLM, 50, 10.0, 31, 47),
    "glm46v long": ("glm46v", _GLM, 80, 2.0, 6, 9),
    "glm46v few": ("glm46v", _GLM, 5, 1.5, 2, 9),
    "internvl published": ("internvl", _INTERNVL, 3, 10.0, 31, 47),
    "internvl some": ("internvl", {**_INTERNVL, "do_sample_frames": True, "num_frames": 3}, 11, 10.0, 20, 33),
    "internvl rate": (
        "internvl",
        {**_INTERNVL, "do_sample_frames": True, "fps": 2, "initial_shift": 0, "image_mean": [0.1, 0.2, 0.3]},
        20,
        5.0,
        20,
        14,
    ),
}


def video_frames(count: int, height: int, width: int) -> np.ndarray:
    """Return frames of noise."""
    return np.random.default_rng(count).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def gray_frames(count: int, width: int = 48, height: int = 32) -> list[np.ndarray]:
    """Return frames of different gray values, 12 apart, so that a decoded frame shows its index."""
    return [np.full((height, width, 3), 5 + 12 * number % 240, np.uint8) for number in range(count)]


def frame_indices(frames: Any) -> list[int]:
    """Return the indices of frames of `gray_frames`."""
    return [round((float(np.mean(frame)) - 5) / 12) for frame in frames]


def video(
    form: str = "mp4",
    codec: str = "mpeg4",
    *,
    frames: Sequence[np.ndarray] | None = None,
    milliseconds: Sequence[int] | None = None,
    coded_as: str = "yuv420p",
    options: Mapping[str, str] | None = None,
    shift: int = 0,
    turned: int = 0,
    audio: bool = False,
    cover: bool = False,
    coding: Mapping[str, str] | None = None,
) -> bytes:
    """Return a video file.

    Default: 20 frames at 10 frames per second. `milliseconds`: times; `shift`: added to all times.
    """
    import av
    from av.stream import Disposition

    frames = gray_frames(20) if frames is None else frames
    file, tick = io.BytesIO(), Fraction(1, 1000)
    file.name = f"video.{form}"  # type: ignore[attr-defined]
    with av.open(file, "w", format=form, options=dict(options or {})) as container:
        height, width = frames[0].shape[:2] if len(frames) else (32, 48)
        if len(frames):
            stream: Any = container.add_stream(codec, rate=10, options=dict(coding or {}))
            stream.width, stream.height, stream.pix_fmt = width, height, coded_as
            base = Fraction(1, 10) if form in ("avi", "mjpeg") else tick  # AVI would write a frame for each tick
            stream.codec_context.time_base = stream.time_base = base
            if cover:
                stream.disposition = Disposition.attached_pic
            if turned:
                stream.set_display_rotation(turned)
        if audio:
            voice: Any = container.add_stream("aac", rate=16_000, layout="mono")
        packets = []
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            place = number * tick * 100 if milliseconds is None else milliseconds[number] * tick
            frame.time_base, frame.pts = base, int(place / base)
            packets += stream.encode(frame)
        packets += stream.encode() if len(frames) else []
        for packet in packets:
            packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
            container.mux(packet)
        if audio:
            tone = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), np.float32), format="fltp", layout="mono")
            tone.sample_rate = 16_000
            container.mux(voice.encode(tone))
            container.mux(voice.encode())
    return file.getvalue()


def summary_of(x: np.ndarray) -> np.ndarray:
    """Return a sample of an array's values and its statistics, or the complete array if it is a small integer array."""
    x = np.asarray(x)
    if x.dtype.kind in "iub" and x.size <= 4096:
        return x
    flat = x.astype(np.float32).reshape(-1)
    return np.concatenate([flat[:: max(1, flat.size // 61)][:61], [flat.mean(), flat.min(), flat.max()]])
