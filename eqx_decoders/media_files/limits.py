"""Limits for decoding untrusted files."""

import dataclasses

from eqx_decoders.errors import CheckedFields, DataError, PositiveFloat, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaLimits(CheckedFields):
    """Limits of decoded files. A file that exceeds a limit is an error before its content is decoded.

    Stored sizes are the sizes in the file. Resized sizes are the sizes that the model's processor produces.

    **Arguments:**

    - `max_pixels`: maximum pixels of one image or video frame, both stored and resized.
    - `max_total_pixels`: maximum stored pixels of all images of a prompt.
    - `max_video_pixels`: maximum resized pixels of all sampled frames of one video.
    - `max_decoded_pixels`: maximum stored pixels of all frames of all videos of a prompt.
    - `max_frames`: maximum stored frames of one video. The processor samples far fewer frames.
    - `max_seconds`: maximum duration of one audio clip or video, in seconds.
    - `max_samples`: maximum stored samples of one audio clip, over all channels.
    - `max_files`: maximum files of one kind in a prompt.
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
        """Raise DataError for an image without pixels or with more than `max_pixels` pixels."""
        if width <= 0 or height <= 0:
            raise DataError(f"{where} has {width} x {height} pixels: width and height must be at least 1.")
        if width * height > self.max_pixels:
            raise DataError(
                f"{where} has {width:,} x {height:,} pixels, more than MediaLimits.max_pixels={self.max_pixels:,}. "
                "Resize the image or raise the limit."
            )

    def check_total_pixels(self, where: str, pixels: int) -> None:
        """Raise DataError for images that have more than `max_total_pixels` stored pixels in total."""
        if pixels > self.max_total_pixels:
            raise DataError(
                f"{where} have {pixels:,} pixels in total, more than "
                f"MediaLimits.max_total_pixels={self.max_total_pixels:,}. Resize the images or pass fewer."
            )

    def after_video(self, decoded_pixels: int) -> "MediaLimits":
        """Return the limits of the remaining videos of a prompt after a video with `decoded_pixels` stored pixels."""
        return dataclasses.replace(self, max_decoded_pixels=max(1, self.max_decoded_pixels - decoded_pixels))

    def check_decoded_pixels(self, where: str, num_frames: int, width: int, height: int) -> None:
        """Raise DataError for a video whose frames have more than `max_decoded_pixels` stored pixels in total."""
        if num_frames * width * height > self.max_decoded_pixels:
            raise DataError(
                f"{where} has {num_frames:,} frames of {width:,} x {height:,} pixels, more pixels than "
                f"MediaLimits.max_decoded_pixels={self.max_decoded_pixels:,}. Shorten or resize the video, or raise "
                "the limit."
            )

    def check_resize(self, where: str, old: tuple[int, int], new: tuple[int, int]) -> None:
        """Raise DataError if resizing an image from `old` to `new`, both (height, width), needs too many pixels.

        The width is resized before the height. The intermediate image has the old height and the new width.
        """
        pixels = max(old[0] * new[1], new[0] * new[1])
        if pixels > self.max_pixels:
            raise DataError(
                f"{where}: resizing {old[1]:,} x {old[0]:,} pixels to {new[1]:,} x {new[0]:,} needs an image of "
                f"{pixels:,} pixels, more than MediaLimits.max_pixels={self.max_pixels:,}. Crop the image."
            )
