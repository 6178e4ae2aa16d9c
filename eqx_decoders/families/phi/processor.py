"""Images and audio of Phi-4 multimodal: a thumbnail and tiles of an image; log-mel spectrograms (Kaldi)."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from jaxtyping import Bool, Float, UInt8

from eqx_decoders.encoders.geometry import TilesConfig, token_order
from eqx_decoders.errors import AtLeast, CheckedFields, DataError, NonNegativeFloat, PositiveFloat, PositiveInt
from eqx_decoders.media_files.audio import CHUNK, MAX_BANDS, MAX_RATE, MAX_WINDOW, MIN_RATE, Samples, open_audio
from eqx_decoders.media_files.base import ProcessedFile, Settings, check_tokens, concatenate_arrays
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.normalize import HALVES, Normalization, read_normalization
from eqx_decoders.media_files.resizing import BICUBIC, BILINEAR, resize_cubic, resize_fixed_point
from eqx_decoders.media_files.tiles import MAX_TILES, cut_tiles, read_tile_size, tile_grid


_WHITE = 255
_MIN_SIDE = 10  # minimum height and width of a resized image in pixels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi4ImageProcessor(CheckedFields):
    """Images of Phi-4: a thumbnail, and tiles of the image, which is padded with white at the bottom and on the right.

    **Arguments:**

    - `tile_size`: height and width of a tile in pixels.
    - `max_tiles`: maximum number of tiles, without the thumbnail.
    - `patch_size`: height and width of a patch in pixels. `2 x 2` patches are merged into one token.
    - `placeholder`: image token, which is repeated once per token.
    """

    tile_size: PositiveInt = 448
    max_tiles: Annotated[int, AtLeast(1, maximum=MAX_TILES)] = 36
    patch_size: PositiveInt = 14
    normalization: Normalization = Normalization(rounding="fused")
    placeholder: str = "<|image|>"

    @classmethod
    def read(cls, settings: Settings) -> "Phi4ImageProcessor":
        """Create the processor from the settings of a model's directory."""
        fields = settings.images
        fields.allow_only("resample", BICUBIC)
        return cls(
            tile_size=read_tile_size(fields, 448),
            max_tiles=fields.integer("dynamic_hd", 36),
            patch_size=fields.integer("patch_size", 14),
            normalization=read_normalization(fields, HALVES, HALVES, rounding="fused"),
            placeholder=settings.token("image_token", "<|image|>"),
        )

    def process(self, pixels: UInt8[np.ndarray, "height width 3"], limits: MediaLimits, where: str) -> ProcessedFile:
        """Return the arrays of a thumbnail and the tiles after it.

        - `image_pixel_values`: `[1, 1 + tiles, 3, tile_size, tile_size]`.
        - `image_attention_mask`: `[1, 1 + tiles, rows, columns]`, a mask of patches; 0 for padding.
        - `image_sizes`: `[1, 2]`, height and width of all tiles together.

        Raises DataError for an image that is too elongated.
        """
        height, width = pixels.shape[:2]
        tile_size = self.tile_size
        rows, columns = self._tile_grid(height, width)
        padded_height = rows * tile_size
        padded_width = columns * tile_size
        limits.check_pixels(where, padded_height, padded_width)
        width_scale = padded_width / width
        height_scale = padded_height / height
        if width_scale < height_scale:
            size = (int(height * width_scale), padded_width)
        else:
            size = (padded_height, int(width * height_scale))
        if min(size) < _MIN_SIDE:
            raise DataError(
                f"{where} is resized to {size[1]} x {size[0]} pixels, but height and width must be at least "
                f"{_MIN_SIDE} pixels. Crop the image."
            )
        resized = resize_fixed_point(pixels, size, BILINEAR, limits, where)
        padding = (padded_height - size[0], padded_width - size[1])
        padded = np.pad(resized, ((0, padding[0]), (0, padding[1]), (0, 0)), constant_values=_WHITE)
        values = self.normalization(padded)
        thumbnail = resize_cubic(values, (tile_size, tile_size))
        mask = self._mask(rows, columns, padding)
        arrays = {
            "image_pixel_values": np.concatenate([thumbnail[None], cut_tiles(values, tile_size)])[None],
            "image_attention_mask": mask[None].astype(np.float32),
            "image_sizes": np.asarray([[padded_height, padded_width]], np.int32),
        }
        num_tokens = self._num_tokens(mask, rows, columns)
        check_tokens(where, num_tokens)
        return ProcessedFile(arrays, self.placeholder * num_tokens)

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return the arrays of all images, `[images, tiles, ...]`.

        Images with fewer tiles are padded with tiles of 0, for which the mask is 1.
        """
        max_tiles = max((file.arrays["image_pixel_values"].shape[1] for file in files), default=0)

        def pad_tiles(x: np.ndarray, value: float) -> np.ndarray:
            padding = ((0, 0), (0, max_tiles - x.shape[1]), *((0, 0),) * (x.ndim - 2))
            return np.pad(x, padding, constant_values=value)

        padded = []
        for file in files:
            arrays = dict(file.arrays)
            arrays["image_pixel_values"] = pad_tiles(arrays["image_pixel_values"], 0.0)
            arrays["image_attention_mask"] = pad_tiles(arrays["image_attention_mask"], 1.0)
            padded.append(ProcessedFile(arrays, file.text))
        return concatenate_arrays(padded)

    def _tile_grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles.

        A grid that contains the original image is used if it has at most `max_tiles` tiles. Otherwise the image is
        shrunk to a grid of the closest aspect ratio.
        """
        rows = math.ceil(height / self.tile_size)
        columns = math.ceil(width / self.tile_size)
        if rows * columns <= self.max_tiles:
            return rows, columns
        return tile_grid(height, width, self.tile_size, 1, self.max_tiles)

    def _mask(
        self, rows: int, columns: int, padding: tuple[int, int]
    ) -> Bool[np.ndarray, "tiles patch_rows patch_columns"]:
        """Return the mask of the patches of the thumbnail and the tiles; False for patches with padding only.

        `padding`: rows and columns of padding in pixels.
        """
        side = self.tile_size // self.patch_size
        real_rows = rows * side - padding[0] // self.patch_size
        real_columns = columns * side - padding[1] // self.patch_size
        mask = np.zeros((rows, side, columns, side), bool)
        mask.reshape(rows * side, columns * side)[:real_rows, :real_columns] = True
        return np.concatenate([np.ones((1, side, side), bool), mask.swapaxes(1, 2).reshape(-1, side, side)])

    def _num_tokens(self, mask: np.ndarray, rows: int, columns: int) -> int:
        token_mask = mask[1:, ::2, ::2]
        side = token_mask.shape[1]
        image_mask = token_mask.reshape(rows, columns, *token_mask.shape[1:]).swapaxes(1, 2).reshape(rows * side, -1)
        real_size = int(image_mask[:, 0].sum()), int(image_mask[0].sum())
        tiles = TilesConfig(side=self.tile_size, sizes=(), whole="last")
        return len(token_order(tiles, rows * self.tile_size, columns * self.tile_size, side, real_size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogPowers(CheckedFields):
    """Log-mel spectrogram with one frame per hop: `log(max(filters |fft(window x)|^2, 1))` for 16-bit samples x.

    **Arguments:**

    - `rate`: sampling rate in Hz.
    - `bands`: number of mel bands, of equal width on Kaldi's mel scale.
    - `min_frequency`, `max_frequency`: frequency range of the bands in Hz.
    - `window`: length of a window in samples.
    - `hop`: distance between the starts of windows in samples.
    - `fft_length`: length of the FFT; windows are padded with zeros.
    - `preemphasis`: factor of the previous sample, which is subtracted from each sample.
    """

    rate: Annotated[int, AtLeast(1, maximum=MAX_RATE)] = 16_000
    bands: Annotated[int, AtLeast(1, maximum=MAX_BANDS)] = 80
    min_frequency: NonNegativeFloat = 0.0
    max_frequency: PositiveFloat = 7690.0
    window: Annotated[int, AtLeast(2, maximum=MAX_WINDOW)] = 400
    hop: PositiveInt = 160
    fft_length: Annotated[int, AtLeast(2, maximum=MAX_WINDOW)] = 512
    preemphasis: NonNegativeFloat = 0.97

    def __call__(self, samples: Samples) -> Float[np.ndarray, "frames bands"]:
        """Return the spectrogram in float32. Frames are the windows that are completely within the clip."""
        frames = np.lib.stride_tricks.sliding_window_view(samples.astype(np.float32), self.window)[:: self.hop]
        bands = np.empty((len(frames), self.bands), np.float32)
        step = max(1, CHUNK // self.window)
        for start in range(0, len(frames), step):
            bands[start : start + step] = self._log_powers(frames[start : start + step])
        return bands

    def _log_powers(self, frames: Float[np.ndarray, "frames window"]) -> Float[np.ndarray, "frames bands"]:
        previous = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
        frames = (frames - np.float32(self.preemphasis) * previous) * np.float32(1 << 15)
        spectrum = np.abs(np.fft.rfft(frames * np.hamming(self.window), n=self.fft_length).astype(np.complex64))
        return np.log(np.maximum(spectrum**2 @ self._filters, np.float32(1)))

    @functools.cached_property
    def _filters(self) -> Float[np.ndarray, "frequencies bands"]:
        """Filters that are triangular on the mel scale."""
        edges = np.linspace(_mel(self.min_frequency), _mel(self.max_frequency), self.bands + 2)
        frequencies = _mel(self.rate / self.fft_length * np.arange(self.fft_length // 2 + 1))[:, None]
        rising = (frequencies - edges[:-2]) / np.diff(edges)[:-1]
        falling = (edges[2:] - frequencies) / np.diff(edges)[1:]
        return np.maximum(np.minimum(rising, falling), 0).astype(np.float32)


def _mel(frequency: Any) -> Any:
    return 1127.0 * np.log(1.0 + frequency / 700.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi4AudioProcessor(CheckedFields):
    """Audio of Phi-4: log-mel spectrograms. The features of a clip do not depend on the other clips of a prompt.

    **Arguments:**

    - `spectrum`: log-mel spectrogram of a clip.
    - `frames_per_token`: number of frames of a token.
    - `placeholder`: audio token, which is repeated once per token.
    """

    spectrum: LogPowers = LogPowers()
    frames_per_token: PositiveInt = 8
    placeholder: str = "<|audio|>"

    @classmethod
    def read(cls, settings: Settings) -> "Phi4AudioProcessor":
        """Create the processor from the settings of a model's directory."""
        fields = settings.audio
        defaults = LogPowers()
        fields.allow_only("padding_value", 0, 0.0)
        fields.allow_only("audio_downsample_rate", 1)
        fields.allow_only("audio_feat_stride", 1)
        min_frequency = fields.take("mel_min_frequency", 0)
        return cls(
            spectrum=LogPowers(
                rate=fields.integer("sampling_rate", defaults.rate, least=MIN_RATE),
                bands=fields.integer("feature_size", defaults.bands),
                min_frequency=float(min_frequency) if type(min_frequency) in (int, float) else min_frequency,
                max_frequency=fields.number("mel_max_frequency", defaults.max_frequency),
                window=fields.integer("win_length", defaults.window),
                hop=fields.integer("hop_length", defaults.hop),
                fft_length=fields.integer("n_fft", defaults.fft_length),
                preemphasis=fields.number("preemphasis", defaults.preemphasis),
            ),
            frames_per_token=fields.integer("audio_compression_rate", 8),
            placeholder=settings.token("audio_token", "<|audio|>"),
        )

    def process_all(
        self, audio: Sequence[Any], limits: MediaLimits, names: Sequence[str]
    ) -> tuple[dict[str, np.ndarray], list[str]]:
        """Process all clips of a prompt. `names`: names of the clips in error messages.

        Returns `audio_input_features`, `[clips, frames, bands]`; `audio_attention_mask`, `[clips, frames]`;
        `audio_embed_sizes`, `[clips]`, the numbers of tokens; and the text of each clip. Raises DataError for clips
        that cannot be decoded, are too short, or exceed `limits`.
        """
        rate = self.spectrum.rate
        spectra: list[np.ndarray] = []
        seconds = 0.0
        for source, name in zip(audio, names, strict=True):
            samples = open_audio(source, rate, limits, name)
            seconds += len(samples) / rate
            if seconds > limits.max_seconds:
                raise DataError(
                    f"{len(spectra) + 1} audio clips up to {name} have {seconds:,.1f} s, more than "
                    f"MediaLimits.max_seconds={limits.max_seconds:g}. Pass fewer clips or raise the limit."
                )
            if len(samples) < self.spectrum.window:
                raise DataError(
                    f"{name} has {len(samples)} samples: an audio clip must have at least {self.spectrum.window} "
                    f"samples at {rate:,} Hz. Pass a longer clip."
                )
            spectra.append(self.spectrum(samples))
        num_frames = [len(spectrum) for spectrum in spectra]
        max_frames = max(num_frames)
        num_tokens = [-(-count // self.frames_per_token) for count in num_frames]
        arrays = {
            "audio_input_features": np.stack(
                [np.pad(spectrum, ((0, max_frames - len(spectrum)), (0, 0))) for spectrum in spectra]
            ),
            "audio_attention_mask": np.arange(max_frames)[None] < np.asarray(num_frames)[:, None],
            "audio_embed_sizes": np.asarray(num_tokens),
        }
        return arrays, [self.placeholder * count for count in num_tokens]
