"""Images, videos and audio of a batch of tokens, packed for the encoders of a model."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Int, Num

from eqx_decoders.encoders.audio.audio import pack_audio
from eqx_decoders.encoders.packed_rows import AudioRows, PackedPatches
from eqx_decoders.encoders.packing import pack_images, padded_length
from eqx_decoders.encoders.processor_arrays import (
    ProcessorArrays,
    VideoArrays,
    check_names,
    read_audio,
    read_images,
    read_seconds,
    read_segments,
    read_tokens,
    read_videos,
    token_kinds,
    with_one_name,
)
from eqx_decoders.encoders.protocols import EncoderInputs, HasMedia
from eqx_decoders.encoders.rope_positions import AUDIO, IMAGE, TEXT, VIDEO, grid_positions
from eqx_decoders.encoders.tiles import count_tokens, in_order, tiles_of
from eqx_decoders.errors import ConfigError, DataError, check
from eqx_decoders.sharding.axes import AnyArray


class Media(eqx.Module):
    """Images, videos and audio clips, packed for a model's encoders, and the placeholders that their features replace.

    Created by `Media.create`. The batch is divided into groups of consecutive sequences; the images and audio of each
    group are packed separately. On a mesh, there is one group per shard of the batch, so that features are not
    communicated between devices.

    **Arguments:**

    - `images`, `audio`: packed sequences of patches, chunks or frames; None without images or audio.
    - `order`: for each placeholder of a group, the index of its feature among the encoder features of the group;
        negative for learned vectors (`LINE_END`, `DIVIDER`).
    - `index`: for each token, the index of its placeholder in the group; -1 for other tokens.
    - `spans`: 1 for tokens of images, which attend to all tokens of the image; None if the model has no spans.
    - `real`: segment id of each token, 0 for padding; None if the tokens have no mask and no segment ids.
    - `grid_positions`: M-RoPE positions (time, row, column) of each token; None for models without M-RoPE.
    """

    images: PackedPatches | None
    audio: AudioRows | None
    order: Int[AnyArray, "groups features"]
    index: Int[AnyArray, "batch length"]
    spans: Int[AnyArray, "batch length"] | None = None
    real: Int[AnyArray, "batch length"] | None = None
    grid_positions: Num[AnyArray, "batch length dimensions"] | None = None

    @classmethod
    def create(cls, config: HasMedia, input_ids: Any, *, groups: int = 1, **arrays: Unpack[ProcessorArrays]) -> "Media":
        """Pack the outputs of transformers' processors for a model.

        The features replace the placeholders in `input_ids` in order.

        Raises ConfigError if the model has no encoders, TypeError for an unknown array name, and DataError if an array
        does not fit the model, or if the number of placeholders differs from the number of features.

        **Arguments:**

        - `config`: configuration of a model that has encoders.
        - `input_ids`: token ids, `[batch, length]`.
        - `groups`: number of groups of consecutive sequences into which the batch is split; see `Media`.
        - `arrays`: `pixel_values`, `image_grid_thw`, `input_features`, …: see `ProcessorArrays` and its bases.
        """
        check_names(arrays)
        arrays = with_one_name(arrays)
        media = config.media
        if media is None:
            raise ConfigError(
                "Media.create: DecoderConfig.media is None: this model has no encoders and accepts only text."
            )
        ids = read_tokens(input_ids, groups)
        kinds = token_kinds(media, ids, arrays)
        items: dict[int, Sequence[Any]] = {
            IMAGE: read_images(media, arrays),
            VIDEO: read_videos(media, arrays),
            AUDIO: read_audio(media, arrays, groups),
        }
        segments = read_segments(ids, arrays)
        images, audio, order = _pack(media, kinds.reshape(groups, -1), items)
        has_segments = any(arrays.get(name) is not None for name in ("attention_mask", "segment_ids"))
        return cls(
            images=images,
            audio=audio,
            order=order,
            index=_placeholder_index(kinds, groups),
            spans=np.isin(kinds, (IMAGE, VIDEO)).astype(np.int32) if media.spans else None,
            real=segments if has_segments else None,
            grid_positions=_grid_positions(media, kinds, segments, items, arrays),
        )

    @property
    def rope_positions(self) -> Num[AnyArray, "dimensions batch length"] | None:
        """M-RoPE positions (time, row, column) of each token, in the layout of transformers' `position_ids`."""
        return None if self.grid_positions is None else np.moveaxis(np.asarray(self.grid_positions), -1, 0)

    def cut(self, length: int) -> "Media":
        """Return the same media for the first `length` tokens of each sequence."""
        names = ("index", "spans", "real", "grid_positions")
        arrays = {name: getattr(self, name) for name in names}
        return dataclasses.replace(self, **{name: None if x is None else x[:, :length] for name, x in arrays.items()})

    def padded(self, length: int) -> "Media":
        """Return the same media for tokens that are padded on the right to `length`."""
        num_padding = length - self.index.shape[1]

        def pad(x: Any, value: int) -> Any:
            if x is None:
                return None
            widths = ((0, 0), (0, num_padding)) + ((0, 0),) * (x.ndim - 2)
            return np.pad(np.asarray(x), widths, constant_values=value)

        return dataclasses.replace(
            self,
            index=pad(self.index, -1),
            spans=pad(self.spans, 0),
            real=pad(self.real, 0),
            grid_positions=pad(self.grid_positions, 0),
        )


class Encoded(eqx.Module):
    """Features of images and audio clips, in the order of their placeholders.

    **Arguments:**

    - `by_group`: features that replace placeholders, for each group of sequences.
    - `deepstack`: features that are added to the outputs of the first decoder layers; () without DeepStack.
    - `encoder_features`: outputs of the projectors, in the order of `by_group`, before `EncoderConfig.into`. None if no
        encoder has `into`, so that they equal `by_group`, or if the projectors of images and audio have different
        output sizes.
    """

    by_group: Float[Array, "groups features embed"]
    deepstack: tuple[Float[Array, "groups features embed"], ...] = ()
    encoder_features: Float[Array, "groups features inner"] | None = None

    @property
    def features(self) -> Float[Array, "rows inner"]:
        """Encoder features (before `EncoderConfig.into`) of all groups, in the order of placeholders.

        The features of each group may end with unused ones.
        """
        features = self.by_group if self.encoder_features is None else self.encoder_features
        return features.reshape(-1, features.shape[-1])


def _grid_positions(
    media: EncoderInputs, kinds: np.ndarray, segments: np.ndarray, items: dict[int, Sequence[Any]], arrays: VideoArrays
) -> np.ndarray | None:
    stem = media.patch_stem
    if media.positions is None or stem is None:
        return None
    grids: dict[int, Sequence[Any]] = {kind: [image.grid for image in items[kind]] for kind in (IMAGE, VIDEO)}
    seconds = read_seconds(arrays, len(items[VIDEO]))
    return grid_positions(media.positions, kinds, segments, grids, stem.merge, seconds)


def _placeholder_index(kinds: np.ndarray, groups: int) -> np.ndarray:
    """Return, for each token, the index of its placeholder in its group of sequences; -1 for other tokens."""
    placeholders = (kinds != TEXT).reshape(groups, -1)
    index = np.where(placeholders, np.cumsum(placeholders, axis=1) - 1, -1)
    return index.reshape(kinds.shape).astype(np.int32)


def _pack(
    media: EncoderInputs, kinds: np.ndarray, items: dict[int, Sequence[Any]]
) -> tuple[PackedPatches | None, AudioRows | None, np.ndarray]:
    """Pack the images, videos and audio clips (`items`, by kind) of each group.

    Returns the packed images, the packed audio, and `Media.order`.
    """
    items_by_group = {kind: _split_by_group(media, kind, kinds, values) for kind, values in items.items()}
    num_groups = len(kinds)
    images_by_group = [items_by_group[IMAGE][group] + items_by_group[VIDEO][group] for group in range(num_groups)]
    clips_by_group = items_by_group[AUDIO]
    packed_images = None
    packed_audio = None
    image_indices: list[np.ndarray] = []
    audio_indices: list[np.ndarray] = []
    num_image_features = 0  # of a group
    num_audio_features = 0  # of a group
    if any(images_by_group) and (stem := media.patch_stem) is not None:
        tiles = [[tile for image in group for tile in tiles_of(image)] for group in images_by_group]
        packed_images, tile_indices = pack_images(stem, tiles)
        image_indices = in_order([image for group in images_by_group for image in group], tile_indices)
        num_image_features = packed_images.positions.size // stem.group // num_groups
    if any(clips_by_group) and (audio_stem := media.audio_stem) is not None:
        packed_audio, audio_indices = pack_audio(audio_stem, clips_by_group)
        num_audio_features = packed_audio.positions.size // packed_audio.group // num_groups
    # The shapes of the packed arrays already determine the number of features. With this number as the width of
    # `order`, no further shapes need to be compiled. It is not used if it is more than twice the number of
    # placeholders, or smaller than it (because features of padded clips repeat).
    max_placeholders = int((kinds != TEXT).sum(axis=1).max(initial=0))
    num_features = num_image_features + num_audio_features
    is_close = max_placeholders <= num_features <= 2 * max_placeholders
    order = np.zeros((num_groups, num_features if is_close else padded_length(max_placeholders)), np.int32)
    remaining_images = iter(image_indices)
    remaining_audio = iter(audio_indices)
    for group, group_kinds in enumerate(kinds):
        group_kinds = group_kinds[group_kinds != TEXT]
        for kind, remaining, num_kind_features, offset in (
            (IMAGE, remaining_images, num_image_features, 0),
            (VIDEO, remaining_images, num_image_features, 0),
            (AUDIO, remaining_audio, num_audio_features, num_image_features),
        ):
            indices = [next(remaining) for _ in items_by_group[kind][group]]
            if indices:
                index = np.concatenate(indices)
                index = np.where(index < 0, index, index - group * num_kind_features + offset)
                order[group, : len(group_kinds)][group_kinds == kind] = index
    return packed_images, packed_audio, order


def _split_by_group(media: EncoderInputs, kind: int, kinds: np.ndarray, items: Sequence[Any]) -> list[list[Any]]:
    """Split images, videos or audio clips among the groups of sequences, according to their placeholders."""
    patches_per_token = 1 if media.patch_stem is None else media.patch_stem.group
    sizes = [item.num_features if kind == AUDIO else count_tokens(item, patches_per_token) for item in items]
    num_placeholders = (kinds == kind).sum(axis=1).tolist()
    kind_name = {IMAGE: "image", VIDEO: "video", AUDIO: "audio"}[kind]
    noun = "audio clip" if kind == AUDIO else kind_name
    count_and_noun = f"{len(items)} {noun}" if len(items) == 1 else f"{len(items)} {noun}s"
    check(
        sum(num_placeholders) == sum(sizes),
        f"Media.create: input_ids has {sum(num_placeholders)} {kind_name} placeholders, but there are {sum(sizes)} "
        f"features from {count_and_noun}. Pass one placeholder for each feature.",
        DataError,
    )
    items_by_group = []
    next_item = 0
    for count in num_placeholders:
        group_items: list[Any] = []
        while count > 0:
            group_items.append(items[next_item])
            count -= sizes[next_item]
            next_item += 1
        check(
            count == 0,
            f"Media.create: the placeholders of one {noun} are split over sequences of different groups (devices). "
            f"Keep the placeholders of each {noun} in one sequence.",
            DataError,
        )
        items_by_group.append(group_items)
    return items_by_group
