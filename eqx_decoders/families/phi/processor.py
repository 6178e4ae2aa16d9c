"""Images and audio of Phi-4 multimodal: tiles of an image and the whole; logarithms of powers in bands (Kaldi)."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from jaxtyping import Bool, Float, UInt8

from eqx_decoders.encoders.geometry import TilesConfig, token_order
from eqx_decoders.errors import AtLeast, CheckedFields, DataError, NonNegativeFloat, PositiveFloat, PositiveInt, check
from eqx_decoders.media_files.audio import BLOCK, MOST_BANDS, MOST_WINDOW, RATES, Samples, open_audio
from eqx_decoders.media_files.base import ProcessedFile, Settings, check_tokens, concatenate_arrays
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.normalize import HALVES, Normalization, read_normalization
from eqx_decoders.media_files.resizing import BICUBIC, BILINEAR, resize_cubic, resize_with_short_weights
from eqx_decoders.media_files.tiles import MOST_TILES, cut_tiles, read_side, tile_grid


WHITE = 255
_LEAST = 10  # pixels of a side


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi4Images(CheckedFields):
    """Images of Phi-4: the whole as a tile, and an image in its shape over tiles, with white behind it.

    **Arguments:**

    - `side`: side of a tile, in pixels.
    - `most`: bound on the number of tiles, without the whole.
    - `patch`: side of a patch; `2 x 2` of them become one token.
    - `placeholder`: text of the special token, which is repeated.
    """

    side: PositiveInt = 448
    most: Annotated[int, AtLeast(1, maximum=MOST_TILES)] = 36
    patch: PositiveInt = 14
    normalization: Normalization = Normalization(steps="joint")
    placeholder: str = "<|image|>"

    @classmethod
    def read(cls, settings: Settings) -> "Phi4Images":
        """Read the rules from the settings of a directory."""
        fields = settings.images
        fields.allow_only("resample", BICUBIC)
        return cls(
            side=read_side(fields, 448),
            most=fields.integer("dynamic_hd", 36),
            patch=fields.integer("patch_size", 14),
            normalization=read_normalization(fields, HALVES, HALVES, steps="joint"),
            placeholder=settings.token("image_token", "<|image|>"),
        )

    def process(self, pixels: UInt8[np.ndarray, "height width 3"], limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `image_pixel_values`, `image_attention_mask` and `image_sizes`, those of all tiles together."""
        (height, width), side = pixels.shape[:2], self.side
        rows, columns = self._grid(height, width)
        limits.check_pixels(where, rows * side, columns * side)
        across, down = columns * side / width, rows * side / height
        size = (int(height * across), columns * side) if across < down else (rows * side, int(width * down))
        rule = f"an image must be at least {_LEAST} pixels high and wide when it fills the tiles: crop it"
        check(min(size) >= _LEAST, f"{where} becomes {size[1]} x {size[0]} pixels: {rule}.", DataError)
        small = resize_with_short_weights(pixels, size, BILINEAR, limits, where)
        more = [(0, count * side - length) for count, length in zip((rows, columns), size, strict=True)]
        values = self.normalization(np.pad(small, (*more, (0, 0)), constant_values=WHITE))
        tiles = np.concatenate([resize_cubic(values, (side, side))[None], cut_tiles(values, side)])
        mask = self._mask(rows, columns, more)
        arrays = {
            "image_pixel_values": tiles[None],
            "image_attention_mask": mask[None].astype(np.float32),
            "image_sizes": np.asarray([[rows * side, columns * side]], np.int32),
        }
        return ProcessedFile(arrays, self.placeholder * self._tokens(mask, rows, columns, where))

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return arrays `[images, tiles, …]`; tiles that an image lacks are zeros, and their masks ones."""
        most = max((one.arrays["image_pixel_values"].shape[1] for one in files), default=0)

        def longer(x: np.ndarray, value: float) -> np.ndarray:
            return np.pad(x, ((0, 0), (0, most - x.shape[1]), *((0, 0),) * (x.ndim - 2)), constant_values=value)

        padded = []
        for one in files:
            names = {"image_pixel_values": 0.0, "image_attention_mask": 1.0}
            arrays = {name: longer(one.arrays[name], value) for name, value in names.items()}
            padded.append(ProcessedFile({**one.arrays, **arrays}, one.text))
        return concatenate_arrays(padded)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of tiles: those that hold the image as it is, or fewer, of the nearest shape."""
        rows, columns = math.ceil(height / self.side), math.ceil(width / self.side)
        return (rows, columns) if rows * columns <= self.most else tile_grid(height, width, self.side, 1, self.most)

    def _mask(self, rows: int, columns: int, more: Sequence[tuple[int, int]]) -> Bool[np.ndarray, "tiles rows columns"]:
        """Return the mask of patches, the whole's first; False where nothing but padding is."""
        count = self.side // self.patch
        real = [each * count - padding // self.patch for each, (_, padding) in zip((rows, columns), more, strict=True)]
        mask = np.zeros((rows, count, columns, count), bool)
        mask.reshape(rows * count, columns * count)[: real[0], : real[1]] = True
        return np.concatenate([np.ones((1, count, count), bool), mask.swapaxes(1, 2).reshape(-1, count, count)])

    def _tokens(self, mask: np.ndarray, rows: int, columns: int, where: str) -> int:
        """Return the number of an image's tokens."""
        half = mask[1:, ::2, ::2]
        whole = half.reshape(rows, columns, *half.shape[1:]).swapaxes(1, 2).reshape(rows * half.shape[1], -1)
        real = int(whole[:, 0].sum()), int(whole[0].sum())
        tiles = TilesConfig(side=self.side, sizes=(), whole="last")
        count = len(token_order(tiles, rows * self.side, columns * self.side, half.shape[1], real))
        check_tokens(where, count)
        return count


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogPowers(CheckedFields):
    """Log spectrum of windows, a frame for each hop: `log(max(filters |fft(window x)|², 1))`, x being 16-bit numbers.

    **Arguments:**

    - `rate`: samples in a second.
    - `bands`: number of bands from `lowest` to `highest` Hz, equally wide on Kaldi's mel scale.
    - `window`, `hop`: samples in a window, and from one window to the next.
    - `transformed`: samples of a window and the zeros behind it.
    - `emphasis`: factor of each sample that is subtracted from the next one.
    """

    rate: Annotated[int, AtLeast(1, maximum=RATES[1])] = 16_000
    bands: Annotated[int, AtLeast(1, maximum=MOST_BANDS)] = 80
    lowest: NonNegativeFloat = 0.0
    highest: PositiveFloat = 7690.0
    window: Annotated[int, AtLeast(2, maximum=MOST_WINDOW)] = 400
    hop: PositiveInt = 160
    transformed: Annotated[int, AtLeast(2, maximum=MOST_WINDOW)] = 512
    emphasis: NonNegativeFloat = 0.97

    def __call__(self, samples: Samples) -> Float[np.ndarray, "frames bands"]:
        """Return the spectrum, float32, of all windows within the clip."""
        frames = np.lib.stride_tricks.sliding_window_view(samples.astype(np.float32), self.window)[:: self.hop]
        bands = np.empty((len(frames), self.bands), np.float32)
        step = max(1, BLOCK // self.window)
        for begin in range(0, len(frames), step):
            bands[begin : begin + step] = self._bands(frames[begin : begin + step])
        return bands

    def _bands(self, frames: np.ndarray) -> np.ndarray:
        before = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
        frames = (frames - np.float32(self.emphasis) * before) * np.float32(1 << 15)
        spectrum = np.abs(np.fft.rfft(frames * np.hamming(self.window), n=self.transformed).astype(np.complex64))
        return np.log(np.maximum(spectrum**2 @ self._filters, np.float32(1)))

    @functools.cached_property
    def _filters(self) -> np.ndarray:
        """Triangles on the mel scale, `[frequencies, bands]`."""
        edges = np.linspace(_mel(self.lowest), _mel(self.highest), self.bands + 2)
        frequencies = _mel(self.rate / self.transformed * np.arange(self.transformed // 2 + 1))[:, None]
        rising = (frequencies - edges[:-2]) / np.diff(edges)[:-1]
        falling = (edges[2:] - frequencies) / np.diff(edges)[1:]
        return np.maximum(np.minimum(rising, falling), 0).astype(np.float32)


def _mel(hertz: Any) -> Any:
    return 1127.0 * np.log(1.0 + hertz / 700.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi4Audio(CheckedFields):
    """Audio of Phi-4, each clip by itself: `frames` frames become a token.

    **Arguments:**

    - `placeholder`: the text of the special token, which is repeated.
    """

    spectrum: LogPowers = LogPowers()
    frames: PositiveInt = 8
    placeholder: str = "<|audio|>"

    @classmethod
    def read(cls, settings: Settings) -> "Phi4Audio":
        """Read the rules from the settings of a directory."""
        fields, usual = settings.audio, LogPowers()
        for name, *allowed in (("padding_value", 0, 0.0), ("audio_downsample_rate", 1), ("audio_feat_stride", 1)):
            fields.allow_only(name, *allowed)
        lowest = fields.take("mel_min_frequency", 0)
        return cls(
            spectrum=LogPowers(
                rate=fields.integer("sampling_rate", usual.rate, least=RATES[0]),
                bands=fields.integer("feature_size", usual.bands),
                lowest=float(lowest) if type(lowest) in (int, float) else lowest,
                highest=fields.number("mel_max_frequency", usual.highest),
                window=fields.integer("win_length", usual.window),
                hop=fields.integer("hop_length", usual.hop),
                transformed=fields.integer("n_fft", usual.transformed),
                emphasis=fields.number("preemphasis", usual.emphasis),
            ),
            frames=fields.integer("audio_compression_rate", 8),
            placeholder=settings.token("audio_token", "<|audio|>"),
        )

    def process_all(
        self, audio: Sequence[Any], limits: MediaLimits, names: Sequence[str]
    ) -> tuple[dict[str, np.ndarray], list[str]]:
        """Return `audio_input_features`, `[audio, frames, bands]`, their mask, `audio_embed_sizes`, and the texts."""
        spectra, seconds = list[np.ndarray](), 0.0
        for source, name in zip(audio, names, strict=True):
            samples = open_audio(source, self.spectrum.rate, limits, name)
            seconds += len(samples) / self.spectrum.rate
            rule = f"more than MediaLimits.max_seconds={limits.max_seconds:g}. Give fewer, or raise the limit"
            message = f"{len(spectra) + 1} audio clips up to {name} have {seconds:,.1f} s"
            check(seconds <= limits.max_seconds, f"{message}: {rule}.", DataError)
            rule = f"an audio clip must have at least {self.spectrum.window} at {self.spectrum.rate:,} Hz"
            check(len(samples) >= self.spectrum.window, f"{name} has {len(samples)} samples: {rule}.", DataError)
            spectra.append(self.spectrum(samples))
        counts = [len(one) for one in spectra]
        values = np.stack([np.pad(one, ((0, max(counts) - len(one)), (0, 0))) for one in spectra])
        sizes = [-(-count // self.frames) for count in counts]
        mask = np.arange(max(counts))[None] < np.asarray(counts)[:, None]
        arrays = {"audio_input_features": values, "audio_attention_mask": mask}
        return arrays | {"audio_embed_sizes": np.asarray(sizes)}, [self.placeholder * size for size in sizes]
