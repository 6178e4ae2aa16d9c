"""Arrays returned by transformers' processors, and the images, videos and audio clips in them."""

from collections.abc import Iterable
from typing import Any, TypedDict

import numpy as np

from eqx_decoders.core.input_checks import as_int32
from eqx_decoders.encoders.audio.audio import AudioClip, from_spectra
from eqx_decoders.encoders.images import (
    Image,
    from_padded_patches,
    from_patches,
    from_pixels,
    positions_within,
    separate_frames,
)
from eqx_decoders.encoders.protocols import EncoderInputs
from eqx_decoders.encoders.rope_positions import AUDIO, IMAGE, TEXT, VIDEO
from eqx_decoders.encoders.stem import PatchStemConfig, WholeImageStem
from eqx_decoders.encoders.tiles import TiledImage, tiled_images
from eqx_decoders.errors import DataError, check, suggest


class ImageArrays(TypedDict, total=False):
    """Arrays of images.

    **Arguments:**

    - `pixel_values`: pixels or patches in one of these forms:
        `[images, channels, height, width]`, images of the same padded size;
        `[batch, images, channels, height, width]`, the same for each sequence, where images of zeros are skipped;
        `[images, tiles, channels, height, width]`, tiles of each image, for models with `TilesConfig`;
        `[patches, values]`, concatenated patches of all images, with `image_grid_thw`;
        `[images, patches, values]`, padded patches, with `image_position_ids` or `spatial_shapes`.
    - `image_grid_thw`: number of frames, and of rows and columns of patches, of each image, `[images, 3]`.
    - `image_position_ids`: column and row of each patch, -1 for padding, `[images, patches, 2]`.
    - `spatial_shapes`: number of rows and columns of patches of each image, `[images, 2]`; further patches are padding.
    - `image_sizes`: height and width of each image in pixels, before padding or splitting into tiles, `[images, 2]`.
        With `image_attention_mask`: height and width of all tiles of the image together (Phi-4).
    - `pixel_attention_mask`: 0 where a pixel is padding, in the shape of `pixel_values` without channels. With
        `spatial_shapes`: 0 where a patch is padding; only checked.
    - `image_attention_mask`: 0 where a patch of a tile is padding, `[images, tiles, rows, columns]` (Phi-4).
    - `image_pixel_values`: alias of `pixel_values` (Phi-4).
    - `num_img_tokens`: ignored, because `input_ids` determines it.
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
    - `num_frames_per_video`: ignored, because with `video_position_ids` each frame is a separate image.
    - `video_second_per_grid`, or `second_per_grid_ts`: seconds between the frames of each video, `[videos]`.
    - `use_audio_in_video`: ignored, because `input_ids` determines whether a video has audio.
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

    - `input_features`: log-mel spectra, `[audio, bands, frames]`; for an encoder with `FrameStemConfig`,
        `[audio, frames, bands]`.
    - `feature_attention_mask`, or `input_features_mask` (Gemma 4): 0 where a frame is padding, `[audio, frames]`.
    - `audio_input_features`, `audio_attention_mask`: aliases of `input_features` and `input_features_mask` (Phi-4).
    - `audio_embed_sizes`: ignored, because `input_ids` determines it.
    """

    input_features: Any
    feature_attention_mask: Any
    input_features_mask: Any
    audio_input_features: Any
    audio_attention_mask: Any
    audio_embed_sizes: Any


class TokenArrays(TypedDict, total=False):
    """Properties of tokens, `[batch, length]` each.

    **Arguments:**

    - `attention_mask`: 0 where a token is padding.
    - `token_type_ids`, `mm_token_type_ids`: positive for placeholders; only checked against `input_ids`.
    - `segment_ids`: document of each token in a packed sequence, 0 for padding; positions start at 0 in each document.
    """

    attention_mask: Any
    token_type_ids: Any
    mm_token_type_ids: Any
    segment_ids: Any


class ProcessorArrays(ImageArrays, VideoArrays, AudioArrays, TokenArrays, total=False):
    """All arrays that transformers' processors return, by name. Missing arrays are absent or None."""


def check_names(names: Iterable[str]) -> None:
    """Raise TypeError for a name that is not in `ProcessorArrays`; the message suggests the most similar name."""
    known = ProcessorArrays.__annotations__
    for name in names:
        if name not in known:
            raise TypeError(f"Media.create() got an unexpected keyword argument {name!r}.{suggest(name, known)}")


_ALIASES = {
    "image_pixel_values": "pixel_values",
    "audio_input_features": "input_features",
    "audio_attention_mask": "input_features_mask",
}


def with_one_name(arrays: ProcessorArrays) -> ProcessorArrays:
    """Return the arrays with aliases replaced by their main names.

    Raises DataError if an array is passed under both names.
    """
    renamed: dict[str, Any] = dict(arrays)
    for alias, name in _ALIASES.items():
        value = renamed.pop(alias, None)
        if value is None:
            continue
        check(
            renamed.get(name) is None,
            f"Media.create: {alias} is an alias of {name}. Pass only one of them.",
            DataError,
        )
        renamed[name] = value
    return ProcessorArrays(**renamed)


def read_tokens(input_ids: Any, groups: int) -> np.ndarray:
    """Return the token ids. Raises DataError unless they are `[batch, length]` and `groups` divides the batch."""
    ids = _integers("input_ids", input_ids)
    check(ids.ndim == 2, f"Media.create: input_ids of shape {ids.shape} must be [batch, length].", DataError)
    check(
        groups > 0 and len(ids) % groups == 0,
        f"Media.create: groups={groups} must divide the batch size of input_ids, which has {len(ids)} rows.",
        DataError,
    )
    return ids


def token_kinds(media: EncoderInputs, ids: np.ndarray, arrays: TokenArrays) -> np.ndarray:
    """Return the kind of each token: TEXT, IMAGE, VIDEO or AUDIO.

    Raises DataError if `token_type_ids` or `mm_token_type_ids` do not agree with the placeholders.
    """
    kinds = np.full(ids.shape, TEXT)
    for kind, token in ((IMAGE, media.image_token), (VIDEO, media.video_token), (AUDIO, media.audio_token)):
        if token is not None:
            kinds[ids == token] = kind
    for name in ("token_type_ids", "mm_token_type_ids"):
        types = arrays.get(name)
        check(
            types is None or np.array_equal(np.asarray(types) > 0, kinds != TEXT),
            f"Media.create: {name} must be positive exactly where input_ids has placeholders.",
            DataError,
        )
    return kinds


def read_segments(ids: np.ndarray, arrays: TokenArrays) -> np.ndarray:
    """Return the document of each token; 0 for padding."""
    segments = arrays.get("segment_ids")
    mask = arrays.get("attention_mask")
    segments = np.ones(ids.shape, np.int32) if segments is None else _integers("segment_ids", segments)
    mask = np.ones(ids.shape, np.int32) if mask is None else np.asarray(mask)
    for name, array in (("segment_ids", segments), ("attention_mask", mask)):
        check(
            array.shape == ids.shape,
            f"Media.create: {name} of shape {array.shape} must have shape {ids.shape}, as input_ids.",
            DataError,
        )
    return np.where(mask > 0, segments, 0).astype(np.int32)


_IMAGE_ARRAYS = (
    "image_grid_thw",
    "image_position_ids",
    "image_sizes",
    "image_attention_mask",
    "pixel_attention_mask",
    "spatial_shapes",
)


def read_images(media: EncoderInputs, arrays: "ProcessorArrays") -> list[Image] | list[TiledImage]:
    """Return the images, split into patches.

    If the model has no placeholder for videos, frames of videos are returned as images.
    """
    pixels = arrays.get("pixel_values")
    positions = arrays.get("image_position_ids")
    sizes = arrays.get("image_sizes")
    mask = arrays.get("pixel_attention_mask")
    shapes = arrays.get("spatial_shapes")
    if pixels is None:
        _check_left_out({name: arrays.get(name) for name in _IMAGE_ARRAYS}, "pixel_values is missing")
    if media.tiles is not None and isinstance(media.patch_stem, PatchStemConfig):
        _check_tiled(arrays)
        tile_mask = arrays.get("image_attention_mask")
        return [] if pixels is None else tiled_images(media.patch_stem, media.tiles, pixels, sizes, tile_mask)
    if pixels is not None and shapes is not None:
        _check_left_out({"image_position_ids": positions}, "spatial_shapes has the sizes of the images")
        positions = positions_within(shapes, np.shape(pixels), mask)
        mask = None
    images = _split_into_patches(
        media, pixels, arrays.get("image_grid_thw"), positions, "pixel_values", "image", sizes=sizes, mask=mask
    )
    frames = [] if media.video_token is not None else separate_frames(_read_videos(media, arrays))
    check(
        not images or not frames,
        "Media.create: pixel_values and pixel_values_videos cannot be combined for this model, which has the same "
        "placeholder for images and videos. Pass the frames of videos in pixel_values, in the order of their tokens.",
        DataError,
    )
    return images + frames


def _check_tiled(arrays: "ProcessorArrays") -> None:
    names = ("image_grid_thw", "image_position_ids", "spatial_shapes", "pixel_attention_mask", "pixel_values_videos")
    _check_left_out({name: arrays.get(name) for name in names}, "this model reads images as tiles")


def _check_left_out(arrays: dict[str, Any], reason: str) -> None:
    """Raise DataError if one of the arrays is not None; `reason` says why they have no effect."""
    unused = [name for name, array in arrays.items() if array is not None]
    check(not unused, f"Media.create: {', '.join(unused)} must be left out, since {reason}.", DataError)


def read_videos(media: EncoderInputs, arrays: VideoArrays) -> list[Image]:
    """Return the videos, split into patches; [] if the model has no placeholder for videos (see `read_images`)."""
    return [] if media.video_token is None else _read_videos(media, arrays)


def _read_videos(media: EncoderInputs, arrays: VideoArrays) -> list[Image]:
    pixels = arrays.get("pixel_values_videos")
    grids = arrays.get("video_grid_thw")
    positions = arrays.get("video_position_ids")
    if pixels is None:
        unused = {"video_grid_thw": grids, "video_position_ids": positions}
        _check_left_out(unused, "pixel_values_videos is missing")
    return _split_into_patches(media, pixels, grids, positions, "pixel_values_videos", "video")


def _split_into_patches(
    media: EncoderInputs,
    pixels: Any,
    grids: Any,
    positions: Any,
    name: str,
    kind: str,
    *,
    sizes: Any = None,
    mask: Any = None,
) -> list[Image]:
    grid_name = f"{kind}_grid_thw"
    position_name = f"{kind}_position_ids"
    size_arrays = {"image_sizes": sizes, "pixel_attention_mask": mask}
    if pixels is None:
        return []
    stem = media.patch_stem
    if stem is None:
        raise DataError(f"Media.create: {name} needs a vision encoder, but this model has none. Leave it out.")
    if isinstance(stem, WholeImageStem):
        unused = {grid_name: grids, f"{position_name} or spatial_shapes": positions, **size_arrays}
        _check_left_out(unused, "the encoder of this model reads complete images")
        return from_pixels(stem, pixels, name)
    if grids is not None:
        unused = {f"{position_name} or spatial_shapes": positions, **size_arrays}
        _check_left_out(unused, f"{grid_name} has the sizes of the images")
        return from_patches(stem, pixels, grids, name, grid_name)
    if positions is not None:
        _check_left_out(size_arrays, "the positions of the patches determine the sizes of the images")
        return from_padded_patches(stem, pixels, positions, name, position_name)
    return from_pixels(stem, pixels, name, sizes=sizes, mask=mask)


def read_seconds(arrays: VideoArrays, num_videos: int) -> np.ndarray | None:
    """Return the seconds between the frames of each video, `[videos]`; None if they are not passed.

    Raises DataError if they are passed under both names.
    """
    seconds = arrays.get("video_second_per_grid")
    alias = arrays.get("second_per_grid_ts")
    check(
        seconds is None or alias is None,
        "Media.create: second_per_grid_ts is an alias of video_second_per_grid. Pass only one of them.",
        DataError,
    )
    seconds = alias if seconds is None else seconds
    if seconds is None:
        return None
    seconds = np.asarray(seconds, np.float32).reshape(-1)
    check(
        len(seconds) == num_videos,
        f"Media.create: video_second_per_grid (or second_per_grid_ts) has {len(seconds)} values, but there are "
        f"{num_videos} videos. Pass one value for each video.",
        DataError,
    )
    return seconds


def read_audio(media: EncoderInputs, arrays: AudioArrays, groups: int) -> list[AudioClip]:
    """Return the audio clips. Raises DataError if their mask is passed under both names."""
    feature_attention_mask = arrays.get("feature_attention_mask")
    input_features_mask = arrays.get("input_features_mask")
    check(
        feature_attention_mask is None or input_features_mask is None,
        "Media.create: feature_attention_mask is an alias of input_features_mask. Pass only one of them.",
        DataError,
    )
    features = arrays.get("input_features")
    if features is None:
        return []
    stem = media.audio_stem
    if stem is None:
        raise DataError("Media.create: input_features needs an audio encoder, but this model has none. Leave it out.")
    if input_features_mask is None:
        mask, mask_name = feature_attention_mask, "feature_attention_mask"
    else:
        mask, mask_name = input_features_mask, "input_features_mask"
    # With several groups, processes may hold different clips, and their chunks must have the same length.
    return from_spectra(stem, features, mask, mask_name, whole_chunks=groups > 1)


def _integers(name: str, array: Any) -> np.ndarray:
    array = np.asarray(array)
    check(
        array.dtype.kind in "iu",
        f"Media.create: {name} of shape {array.shape} and dtype {array.dtype} must have an integer dtype.",
        DataError,
    )
    return np.asarray(as_int32(f"Media.create: {name}", array))
