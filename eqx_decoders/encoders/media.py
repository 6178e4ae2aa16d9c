"""Images, videos and audio of a batch of tokens, packed for a model's encoders."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from eqx_decoders.encoders.audio.audio import pack_audio
from eqx_decoders.encoders.packed_rows import AudioRows, PatchRows
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
    """Images, videos and audio clips, packed for a model's encoders, and the positions of their features.

    `Media.create` builds it. The rows of a batch are divided into `groups`, each with images of its own: one group
    for a batch on one device, else one for each part of the batch, so that no features have to be sent.

    **Arguments:**

    - `images`, `audio`: rows of patches, chunks or frames for the encoders; None where there are none.
    - `order`: for each group, the row of the encoders' features that belongs to its next placeholder; below 0 for
        learned vectors among an image's tokens.
    - `index`: for each token, the index of its feature in its group; -1 for none.
    - `spans`: 1 where a token is an image's and attends to all of it; None where the model has no spans.
    - `real`: 0 where a token is padding; None where no padding is known.
    - `grid_positions`: time, row and column of each token; None where tokens are counted.
    """

    images: PatchRows | None
    audio: AudioRows | None
    order: Int[AnyArray, "groups features"]
    index: Int[AnyArray, "batch length"]
    spans: Int[AnyArray, "batch length"] | None = None
    real: Int[AnyArray, "batch length"] | None = None
    grid_positions: Num[AnyArray, "batch length dimensions"] | None = None

    @classmethod
    def create(cls, config: HasMedia, input_ids: Any, *, groups: int = 1, **arrays: Unpack[ProcessorArrays]) -> "Media":
        """Pack the arrays of transformers' processors, under their names, for a model.

        Placeholders among `input_ids` say where features stand: as many as the images and audio clips make, in their
        order. DataError, with both counts, where they are fewer or more.

        **Arguments:**

        - `config`: configuration of a model that has encoders.
        - `input_ids`: tokens, `[batch, length]`.
        - `groups`: number of groups of rows into which the batch is split.
        - `arrays`: `pixel_values`, `image_grid_thw`, `input_features`, …: see `ProcessorArrays` and its bases.
        """
        check_names(arrays)
        arrays = with_one_name(arrays)
        media = config.media
        if media is None:
            raise ConfigError("Media.create: this model has no encoders (DecoderConfig.media is None): it reads text.")
        ids = read_tokens(input_ids, groups)
        kinds = token_kinds(media, ids, arrays)
        items: dict[int, Sequence[Any]] = {
            IMAGE: read_images(media, arrays),
            VIDEO: read_videos(media, arrays),
            AUDIO: read_audio(media, arrays, groups),
        }
        segments = read_segments(ids, arrays)
        images, audio, order = _pack(media, kinds.reshape(groups, -1), items)
        padded = any(arrays.get(name) is not None for name in ("attention_mask", "segment_ids"))
        return cls(
            images=images,
            audio=audio,
            order=order,
            index=_placeholder_index(kinds, groups),
            spans=np.isin(kinds, (IMAGE, VIDEO)).astype(np.int32) if media.spans else None,
            real=segments if padded else None,
            grid_positions=_grid_positions(media, kinds, segments, items, arrays),
        )

    @property
    def rope_positions(self) -> Num[AnyArray, "dimensions batch length"] | None:
        """Time, row and column of each token, as transformers has them."""
        return None if self.grid_positions is None else np.moveaxis(np.asarray(self.grid_positions), -1, 0)

    def cut(self, length: int) -> "Media":
        """Return the same for the first `length` tokens of each row."""
        names = ("index", "spans", "real", "grid_positions")
        parts = {name: getattr(self, name) for name in names}
        return dataclasses.replace(self, **{name: None if x is None else x[:, :length] for name, x in parts.items()})

    def padded(self, length: int) -> "Media":
        """Return the same for tokens that are padded on the right to this length."""
        more = length - self.index.shape[1]

        def longer(x: Any, value: int) -> Any:
            return None if x is None else np.pad(np.asarray(x), ((0, 0), (0, more)) + ((0, 0),) * (x.ndim - 2),
                                                 constant_values=value)  # fmt: skip

        return dataclasses.replace(
            self,
            index=longer(self.index, -1),
            spans=longer(self.spans, 0),
            real=longer(self.real, 0),
            grid_positions=longer(self.grid_positions, 0),
        )


class Encoded(eqx.Module):
    """Features of images and audio clips, in the order of their placeholders.

    **Arguments:**

    - `by_group`: features that replace placeholders, for each group of rows.
    - `deepstack`: features that are added behind the first layers; empty where there are none.
    - `encoder_features`: the encoders' features before `EncoderConfig.into`; None where no encoder has it.
    """

    by_group: Float[Array, "groups features embed"]
    deepstack: tuple[Float[Array, "groups features embed"], ...] = ()
    encoder_features: Float[Array, "groups features inner"] | None = None

    @property
    def features(self) -> Float[Array, "rows inner"]:
        """The encoders' features in the order of placeholders; those of each group may end in unused rows.

        They are the rows that replace placeholders, unless `EncoderConfig.into` stands in between.
        """
        features = self.by_group if self.encoder_features is None else self.encoder_features
        return features.reshape(-1, features.shape[-1])


def gather_features(
    features: Float[Array, "groups features embed"], index: Int[Array, "batch length"]
) -> Float[Array, "batch length embed"]:
    """Return `features[index]` of each row's group; zeros where the index is -1."""
    groups, (batch, length) = features.shape[0], index.shape
    flat = index.reshape(groups, -1)
    rows = jnp.take_along_axis(features, jnp.maximum(flat, 0)[:, :, None], axis=1)
    rows = jnp.where((flat >= 0)[:, :, None], rows, jnp.zeros((), rows.dtype))
    return rows.reshape(batch, length, features.shape[-1])


def merge_features(
    embeds: Float[Array, "batch length embed"],
    features: Float[Array, "groups features embed"],
    index: Int[Array, "batch length"],
    *,
    scale: float = 1.0,
) -> Float[Array, "batch length embed"]:
    """Replace the embeddings of placeholders by `scale * features[index]`; the index is -1 for other tokens."""
    rows = gather_features(features, index).astype(embeds.dtype)
    return jnp.where((index >= 0)[:, :, None], rows if scale == 1.0 else rows * scale, embeds)


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
    """Return, for each token, the index of its placeholder in its group of rows; -1 for others."""
    placeholders = (kinds != TEXT).reshape(groups, -1)
    index = np.where(placeholders, np.cumsum(placeholders, axis=1) - 1, -1)
    return index.reshape(kinds.shape).astype(np.int32)


_NAMES = {IMAGE: "image", VIDEO: "video", AUDIO: "audio"}


def _pack(
    media: EncoderInputs, kinds: np.ndarray, items: dict[int, Sequence[Any]]
) -> tuple[PatchRows | None, AudioRows | None, np.ndarray]:
    """Return the encoders' rows, and for each group the rows of features of its placeholders."""
    shares = {kind: _split_by_group(media, kind, kinds, values) for kind, values in items.items()}
    vision_groups = [shares[IMAGE][group] + shares[VIDEO][group] for group in range(len(kinds))]
    audio_groups, images, audio, vision_rows = shares[AUDIO], None, None, 0
    rows: list[list[np.ndarray]] = [[], []]
    if any(vision_groups) and (stem := media.patch_stem) is not None:
        tiles = [[tile for image in group for tile in tiles_of(image)] for group in vision_groups]
        images, tokens = pack_images(stem, tiles)
        rows[0] = in_order([image for group in vision_groups for image in group], tokens)
        vision_rows = images.positions.size // stem.group // len(kinds)
    if any(audio_groups) and (audio_stem := media.audio_stem) is not None:
        audio, rows[1] = pack_audio(audio_stem, audio_groups)
    audio_rows = 0 if audio is None else audio.positions.size // audio.group // len(kinds)
    most, room = int((kinds != TEXT).sum(axis=1).max(initial=0)), vision_rows + audio_rows
    # the size of the rows, unless that is far more, or less, since clips are filled up: few programs depend on it
    order = np.zeros((len(kinds), room if most <= room <= 2 * most else padded_length(most)), np.int32)
    of_images, of_audio = iter(rows[0]), iter(rows[1])
    for group, group_kinds in enumerate(kinds):
        group_kinds = group_kinds[group_kinds != TEXT]
        for kind, shift, source in ((IMAGE, 0, of_images), (VIDEO, 0, of_images), (AUDIO, vision_rows, of_audio)):
            parts = [next(source) for _ in shares[kind][group]]
            if parts:
                size = vision_rows if kind != AUDIO else audio_rows
                index = np.concatenate(parts)
                index = np.where(index < 0, index, index - group * size + shift)
                order[group, : len(group_kinds)][group_kinds == kind] = index
    return images, audio, order


def _split_by_group(media: EncoderInputs, kind: int, kinds: np.ndarray, items: Sequence[Any]) -> list[list[Any]]:
    """Return the images or audio clips of each group of rows: as many as its placeholders ask for."""
    group = 1 if media.patch_stem is None else media.patch_stem.group
    sizes = [item.rows if kind == AUDIO else count_tokens(item, group) for item in items]
    wanted = (kinds == kind).sum(axis=1).tolist()
    name, noun = _NAMES[kind], "audio clip" if kind == AUDIO else "image"
    supply = f"1 {noun} makes" if len(items) == 1 else f"{len(items)} {noun}s make"
    rule = f"but {supply} {sum(sizes)} rows of features"
    check(
        sum(wanted) == sum(sizes), f"Media.create: input_ids has {sum(wanted)} {name} placeholders, {rule}.", DataError
    )
    shares, at = [], 0
    for count in wanted:
        share: list[Any] = []
        while count > 0:
            share.append(items[at])
            count -= sizes[at]
            at += 1
        rule = "must not be split over rows that are on different devices"
        check(count == 0, f"Media.create: the placeholders of one of the {noun}s {rule}.", DataError)
        shares.append(share)
    return shares
