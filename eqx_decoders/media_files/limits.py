"""Bounds on the decoding of untrusted files."""

import dataclasses

from eqx_decoders.errors import CheckedFields, DataError, PositiveFloat, PositiveInt, check


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaLimits(CheckedFields):
    """Bounds on decoded files; a file that exceeds them is refused before its content is read.

    **Arguments:**

    - `max_pixels`: pixels of one image or frame, as it is stored and as it is resized.
    - `max_total_pixels`: pixels of all images of one prompt together, as they are stored.
    - `max_video_pixels`: pixels of the frames that are taken from one video together, as they are resized.
    - `max_decoded_pixels`: pixels of all frames of all videos of one prompt together, as they are stored.
    - `max_frames`: frames of one video; far fewer are taken from it.
    - `max_seconds`: duration of one audio clip, and of one video.
    - `max_samples`: samples of one audio clip in all its channels, as they are stored.
    - `max_files`: files of each kind in one prompt.
    """

    max_pixels: PositiveInt = 89_478_485
    max_total_pixels: PositiveInt = 1 << 36
    max_video_pixels: PositiveInt = 1 << 28
    max_decoded_pixels: PositiveInt = 1 << 39
    max_frames: PositiveInt = 200_000
    max_seconds: PositiveFloat = 7200.0
    max_samples: PositiveInt = 1 << 30
    max_files: PositiveInt = 1000

    def check_pixels(self, where: str, width: int, height: int) -> None:
        """Raise DataError for an image that has no pixels, or too many."""
        check(width > 0 and height > 0, f"{where} has {width} x {height} pixels: an image must have some.", DataError)
        rule = f"more than MediaLimits.max_pixels={self.max_pixels:,}. Make it smaller, or raise the limit"
        check(width * height <= self.max_pixels, f"{where} has {width:,} x {height:,} pixels: {rule}.", DataError)

    def check_together(self, where: str, pixels: int) -> None:
        """Raise DataError for images that have too many pixels together."""
        rule = f"more than MediaLimits.max_total_pixels={self.max_total_pixels:,}. Make them smaller, or give fewer"
        check(pixels <= self.max_total_pixels, f"{where} have {pixels:,} pixels together: {rule}.", DataError)

    def without(self, pixels: int) -> "MediaLimits":
        """Return the limits for the next videos, behind one with `pixels`."""
        return dataclasses.replace(self, max_decoded_pixels=max(1, self.max_decoded_pixels - pixels))

    def check_decoded(self, where: str, frames: int, width: int, height: int) -> None:
        """Raise DataError for a video whose frames are too many to decode, at their size."""
        rule = f"more than MediaLimits.max_decoded_pixels={self.max_decoded_pixels:,}. Cut it, make it smaller"
        message = f"{where} has {frames:,} frames of {width:,} x {height:,} pixels"
        good = frames * width * height <= self.max_decoded_pixels
        check(good, f"{message}: {rule}, or raise the limit.", DataError)

    def check_resizing(self, where: str, old: tuple[int, int], new: tuple[int, int]) -> None:
        """Raise DataError if resizing `(height, width)`, rows first, has too many pixels in between."""
        most = max(old[0] * new[1], new[0] * new[1])
        rule = f"passes through {most:,} pixels, more than MediaLimits.max_pixels={self.max_pixels:,}. Crop the image"
        sizes = f"resizing {old[1]:,} x {old[0]:,} pixels to {new[1]:,} x {new[0]:,}"
        check(most <= self.max_pixels, f"{where}: {sizes} {rule}.", DataError)
