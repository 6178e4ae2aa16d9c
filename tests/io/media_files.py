"""Pictures and sounds drawn by a program, for tests of processors and for what these are compared with."""

import io

import numpy as np


KINDS = ("RGB", "L", "RGBA", "CMYK", "I;16")


def picture(kind: str, width: int, height: int, seed: int = 0) -> bytes:
    """A file of a picture: gradients, waves and noise."""
    from PIL import Image

    generator = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width].astype(float)
    waves = 127 + 127 * np.sin(columns / 7) * np.cos(rows / 5)
    ramps = [255 * columns / max(width - 1, 1), 255 * rows / max(height - 1, 1)]
    noisy = np.stack([*ramps, waves], -1) + generator.normal(0, 20, (height, width, 3))
    made = Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))
    if kind == "I;16":
        made = Image.fromarray((noisy[..., 0].clip(0, 255) * 257).astype(np.uint16))
    elif kind == "RGBA":
        made = made.convert("RGBA")
        made.putalpha(Image.fromarray(columns.astype(np.uint8)))
    elif kind != "RGB":
        made = made.convert(kind)
    file = io.BytesIO()
    made.save(file, "TIFF" if kind == "CMYK" else "PNG")
    return file.getvalue()


def sound(seconds: float, rate: int = 16_000, seed: int = 0) -> np.ndarray:
    """A tone that swells, with noise."""
    times = np.arange(int(seconds * rate)) / rate
    tone = 0.4 * np.sin(2 * np.pi * 440 * times) + 0.2 * np.sin(2 * np.pi * (300 + 900 * times) * times)
    noise = 0.01 * np.random.default_rng(seed).normal(size=times.shape)
    return ((tone + noise) * np.linspace(0.1, 1, len(times))).astype(np.float32)


PICTURES = {
    "wide": ("RGB", 150, 61),
    "tall": ("RGB", 37, 101),
    "grey": ("L", 64, 64),
    "clear": ("RGBA", 80, 56),
    "printed": ("CMYK", 60, 60),
}
SECONDS = (0.7, 2.345)


def shown(x: np.ndarray) -> np.ndarray:
    """A few numbers of an array; of whole numbers all."""
    x = np.asarray(x)
    if x.dtype.kind in "iub" and x.size <= 4096:
        return x
    flat = x.astype(np.float32).reshape(-1)
    return np.concatenate([flat[:: max(1, flat.size // 61)][:61], [flat.mean(), flat.min(), flat.max()]])
