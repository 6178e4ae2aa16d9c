"""Arrays of transformers' processors by their names, and the images, videos and audio clips in them."""

import difflib
from collections.abc import Iterable
from typing import Any, TypedDict

import numpy as np

from eqx_decoders.core.input_checks import as_int32
from eqx_decoders.encoders.audio.audio import Audio, from_spectra
from eqx_decoders.encoders.images import (
    Image,
    from_patches,
    from_pixels,
    from_positions,
    positions_within,
    separate_frames,
)
from eqx_decoders.encoders.protocols import EncoderInputs
from eqx_decoders.encoders.rope_positions import AUDIO, IMAGE, TEXT, VIDEO
from eqx_decoders.encoders.stem import PatchStemConfig, WholeImageStem
from eqx_decoders.encoders.tiles import TiledImage, tiled_images
from eqx_decoders.errors import DataError, check


class ImageArrays(TypedDict, total=False):
    """Arrays of images.

    **Arguments:**

    - `pixel_values`: images of one size, `[images, channels, height, width]`; or, with `image_grid_thw`
        (`[images, 3]`: frames, rows and columns), their patches one behind the other, `[patches, numbers]`; or, with
        `image_position_ids` (`[images, patches, 2]`: column and row, -1 for padding), the patches of each image.
        `[batch, images, channels, height, width]` has the images of each row, where an image of zeros is absent.
    - `spatial_shapes`: rows and columns of patches of each image, `[images, 2]`, behind which `pixel_values`,
        `[images, patches, numbers]`, are padding.
    - `image_sizes`: height and width of each image in pixels, `[images, 2]`, where they are padded to one size, or cut
        into tiles, `[images, tiles, channels, height, width]`: those before.
    - `pixel_attention_mask`: 0 where a pixel is padding: the shape of `pixel_values` without channels; with
        `spatial_shapes` it is accepted, and compared with these.
    - `image_attention_mask`: 0 where a patch of a tile is padding, `[images, tiles, rows, columns]`; then `image_sizes`
        are those of all parts of an image (Phi-4).
    - `image_pixel_values`: another name of `pixel_values` (Phi-4).
    - `num_img_tokens`: accepted: `input_ids` show it.
    """

    pixel_values: Any
    image_grid_thw: Any
    image_position_ids: Any
    spatial_shapes: Any
    image_sizes: Any
    pixel_attention_mask: Any
    image_attention_mask: Any
    image_pixel_values: Any
    num_img_tokens: Any


class VideoArrays(TypedDict, total=False):
    """Arrays of videos.

    **Arguments:**

    - `pixel_values_videos`, `video_grid_thw`, `video_position_ids`: as for images.
    - `num_frames_per_video`: accepted; with `video_position_ids` each frame is an image of its own.
    - `video_second_per_grid`, or `second_per_grid_ts`: seconds between the frames of each video.
    - `use_audio_in_video`: accepted: `input_ids` shows whether a video's audio stands among its tokens.
    """

    pixel_values_videos: Any
    video_grid_thw: Any
    video_position_ids: Any
    num_frames_per_video: Any
    video_second_per_grid: Any
    second_per_grid_ts: Any
    use_audio_in_video: Any


class AudioArrays(TypedDict, total=False):
    """Arrays of audio clips.

    **Arguments:**

    - `input_features`: log-mel spectra, `[audio, bands, frames]`, or `[audio, frames, bands]` for an encoder that reads
        whole audio clips.
    - `feature_attention_mask`, or `input_features_mask` (Gemma 4): 1 for real frames, `[audio, frames]`.
    - `audio_input_features`, `audio_attention_mask`: other names of these (Phi-4).
    - `audio_embed_sizes`: accepted: `input_ids` show it.
    """

    input_features: Any
    feature_attention_mask: Any
    input_features_mask: Any
    audio_input_features: Any
    audio_attention_mask: Any
    audio_embed_sizes: Any


class TokenArrays(TypedDict, total=False):
    """Properties of the tokens, `[batch, length]`.

    **Arguments:**

    - `attention_mask`: 0 where a token is padding.
    - `token_type_ids`, `mm_token_type_ids`: above 0 for placeholders: accepted, and compared with the ids.
    - `segment_ids`: documents packed into a row, whose positions begin anew; 0 marks padding.
    """

    attention_mask: Any
    token_type_ids: Any
    mm_token_type_ids: Any
    segment_ids: Any


class ProcessorArrays(ImageArrays, VideoArrays, AudioArrays, TokenArrays, total=False):
    """Arrays under the names that transformers' processors give them; absent or None where there are none."""


def check_names(names: Iterable[str]) -> None:
    """Raise TypeError for a name that is not one of `ProcessorArrays`, with the nearest one."""
    known = ProcessorArrays.__annotations__
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"Media.create() got an unexpected keyword argument {name!r}.{hint}")


_SAME = {
    "image_pixel_values": "pixel_values",
    "audio_input_features": "input_features",
    "audio_attention_mask": "input_features_mask",
}


def with_one_name(arrays: ProcessorArrays) -> ProcessorArrays:
    """Return the arrays, each under the name that is read. Raises DataError where one is given twice."""
    given: dict[str, Any] = dict(arrays)
    for other, name in _SAME.items():
        value = given.pop(other, None)
        twice = value is not None and given.get(name) is not None
        check(not twice, f"Media.create: {other} and {name} are the same: give one.", DataError)
        given |= {} if value is None else {name: value}
    return ProcessorArrays(**given)


def read_tokens(input_ids: Any, groups: int) -> np.ndarray:
    """Return the token ids; raise DataError unless they are `[batch, length]` and `groups` divides their rows."""
    ids = _integers("input_ids", input_ids)
    check(ids.ndim == 2, f"Media.create: input_ids of shape {ids.shape} must be [batch, length].", DataError)
    good = groups > 0 and len(ids) % groups == 0
    check(good, f"Media.create: groups={groups} must divide the {len(ids)} rows of input_ids.", DataError)
    return ids


def token_kinds(media: EncoderInputs, ids: np.ndarray, arrays: TokenArrays) -> np.ndarray:
    """Return the kind of each token; raise DataError where an array of token types differs from it."""
    kinds = np.full(ids.shape, TEXT)
    for kind, token in ((IMAGE, media.image_token), (VIDEO, media.video_token), (AUDIO, media.audio_token)):
        if token is not None:
            kinds[ids == token] = kind
    for name in ("token_type_ids", "mm_token_type_ids"):
        types = arrays.get(name)
        rule = "differs from where input_ids has placeholders"
        same = types is None or np.array_equal(np.asarray(types) > 0, kinds != TEXT)
        check(same, f"Media.create: {name} {rule}.", DataError)
    return kinds


def read_segments(ids: np.ndarray, arrays: TokenArrays) -> np.ndarray:
    """Return the document of each token; 0 for padding."""
    segments, mask = arrays.get("segment_ids"), arrays.get("attention_mask")
    segments = np.ones(ids.shape, np.int32) if segments is None else _integers("segment_ids", segments)
    mask = np.ones(ids.shape, np.int32) if mask is None else np.asarray(mask)
    for name, array in (("segment_ids", segments), ("attention_mask", mask)):
        rule = f"must be {ids.shape}, as input_ids"
        check(array.shape == ids.shape, f"Media.create: {name} of shape {array.shape} {rule}.", DataError)
    return np.where(mask > 0, segments, 0).astype(np.int32)


def read_images(media: EncoderInputs, arrays: "ProcessorArrays") -> list[Image] | list[TiledImage]:
    """Return the images, cut into patches; also the frames of videos for a model that takes these for images."""
    extent = {"sizes": arrays.get("image_sizes"), "mask": arrays.get("pixel_attention_mask")}
    pixels, grids, positions = (arrays.get(name) for name in ("pixel_values", "image_grid_thw", "image_position_ids"))
    shapes = arrays.get("spatial_shapes")
    if media.tiles is not None and isinstance(media.patch_stem, PatchStemConfig):
        _check_tiled(arrays)
        mask = arrays.get("image_attention_mask")
        return [] if pixels is None else tiled_images(media.patch_stem, media.tiles, pixels, extent["sizes"], mask)
    if pixels is not None and shapes is not None:
        positions = positions_within(shapes, np.shape(pixels), extent["mask"])
    images = _in_patches(media, pixels, grids, positions, "pixel_values", "image", **extent)
    frames = [] if media.video_token is not None else separate_frames(_read_videos(media, arrays))
    rule = "give the frames of videos among the images, in the order of their tokens: both have one placeholder"
    check(not images or not frames, f"Media.create: pixel_values and pixel_values_videos: {rule}.", DataError)
    return images + frames


def _check_tiled(arrays: "ProcessorArrays") -> None:
    names = ("image_grid_thw", "image_position_ids", "spatial_shapes", "pixel_attention_mask", "pixel_values_videos")
    unread = [name for name in names if arrays.get(name) is not None]
    check(not unread, f"Media.create: {', '.join(unread)}: leave it out: this model reads tiles of images.", DataError)


def read_videos(media: EncoderInputs, arrays: VideoArrays) -> list[Image]:
    """Return the videos, cut into patches; none for a model that takes their frames for images."""
    return [] if media.video_token is None else _read_videos(media, arrays)


def _read_videos(media: EncoderInputs, arrays: VideoArrays) -> list[Image]:
    name = "pixel_values_videos"
    pixels, grids, positions = (arrays.get(key) for key in (name, "video_grid_thw", "video_position_ids"))
    return _in_patches(media, pixels, grids, positions, name, "video")


def _in_patches(
    media: EncoderInputs, pixels: Any, grids: Any, positions: Any, name: str, kind: str, **extent: Any
) -> list[Image]:
    if pixels is None:
        return []
    stem = media.patch_stem
    if stem is None:
        raise DataError(f"Media.create: {name} is given, but this model has no vision encoder.")
    if isinstance(stem, WholeImageStem):
        rule = f"reads whole images: leave {kind}_grid_thw, {kind}_position_ids and spatial_shapes out"
        check(grids is None and positions is None, f"Media.create: this model's encoder {rule}.", DataError)
        return from_pixels(stem, pixels, name)
    if grids is not None:
        return from_patches(stem, pixels, grids, name, f"{kind}_grid_thw")
    if positions is not None:
        return from_positions(stem, pixels, positions, name, f"{kind}_position_ids")
    return from_pixels(stem, pixels, name, **extent)


def read_seconds(arrays: VideoArrays, videos: int) -> np.ndarray | None:
    """Return the seconds between the frames of each video, `[videos]`; None where they are not given."""
    seconds = arrays.get("video_second_per_grid")
    seconds = arrays.get("second_per_grid_ts") if seconds is None else seconds
    seconds = None if seconds is None else np.asarray(seconds, np.float32).reshape(-1)
    times = None if seconds is None else len(seconds)
    rule = f"for {videos} videos: give one for each"
    check(times in (None, videos), f"Media.create: {times} times between frames {rule}.", DataError)
    return seconds


def read_audio(media: EncoderInputs, arrays: AudioArrays, groups: int) -> list[Audio]:
    """Return the audio clips; DataError where their mask is given under both names."""
    mask, other = (arrays.get(name) for name in ("feature_attention_mask", "input_features_mask"))
    names = "feature_attention_mask and input_features_mask"
    check(mask is None or other is None, f"Media.create: {names} are the same: give one.", DataError)
    features = arrays.get("input_features")
    if features is None:
        return []
    stem = media.audio_stem
    if stem is None:
        raise DataError("Media.create: input_features is given, but this model has no audio encoder.")
    name, mask = ("feature_attention_mask", mask) if other is None else ("input_features_mask", other)
    return from_spectra(stem, features, mask, name, whole_chunks=groups > 1)


def _integers(name: str, array: Any) -> np.ndarray:
    array = np.asarray(array)
    rule = "must be integers"
    check(array.dtype.kind in "iu", f"Media.create: {name} of shape {array.shape}, {array.dtype} {rule}.", DataError)
    return np.asarray(as_int32(f"Media.create: {name}", array))
