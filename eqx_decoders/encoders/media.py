"""What a model is given to see and hear beside its tokens."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from eqx_decoders.core.input_checks import as_int32
from eqx_decoders.encoders.audio import Audio, from_spectra, pack_audio
from eqx_decoders.encoders.images import Image, from_patches, from_pixels, from_positions
from eqx_decoders.encoders.media_config import MediaConfig
from eqx_decoders.encoders.packed_rows import AudioRows, PatchRows
from eqx_decoders.encoders.packing import finer_sizes, pack_images
from eqx_decoders.encoders.rope_positions import AUDIO, IMAGE, TEXT, VIDEO, grid_positions
from eqx_decoders.errors import ConfigError, DataError, check
from eqx_decoders.sharding.axes import AnyArray


@runtime_checkable
class HasMedia(Protocol):
    """The field of a `DecoderConfig` that says what a model sees and hears."""

    @property
    def media(self) -> MediaConfig | None: ...


class Media(eqx.Module):
    """Images, videos and audio, packed for a model's encoders, and the places of their features among the tokens.

    Made by `Media.create`. The rows of a batch are in `groups` of equally many, each with images of its own: one
    where the batch is on one device, else as many as it is split into, so that no features have to be sent.

    **Arguments:**

    - `images`, `audio`: what the encoders read; None where there are none.
    - `order`: for each group, which row of what the encoders make belongs to its next placeholder.
    - `index`: of each token which of its group's features stands in its place; -1 for none.
    - `spans`: 1 where a token is an image's and images are seen whole; None where they are not.
    - `real`: 0 where a token is padding; None where none is known to be.
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
    def create(
        cls,
        config: HasMedia,
        input_ids: Any,
        *,
        pixel_values: Any = None,
        image_grid_thw: Any = None,
        image_position_ids: Any = None,
        image_sizes: Any = None,
        pixel_attention_mask: Any = None,
        pixel_values_videos: Any = None,
        video_grid_thw: Any = None,
        video_position_ids: Any = None,
        num_frames_per_video: Any = None,
        video_second_per_grid: Any = None,
        second_per_grid_ts: Any = None,
        use_audio_in_video: Any = None,
        input_features: Any = None,
        feature_attention_mask: Any = None,
        input_features_mask: Any = None,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        mm_token_type_ids: Any = None,
        segment_ids: Any = None,
        groups: int = 1,
    ) -> "Media":
        """What processors of transformers give, under their names, packed for a model.

        Placeholders among `input_ids` say where features stand: as many as the images and audio make, in their
        order. DataError, with both counts, where they are fewer or more.

        **Arguments:**

        - `config`: of a model that has encoders.
        - `input_ids`: tokens, `[batch, length]`.
        - `pixel_values`: images of one size, `[images, channels, height, width]`; or, with `image_grid_thw`
            (`[images, 3]`: frames, rows and columns), their patches one behind the other, `[patches, numbers]`; or,
            with `image_position_ids` (`[images, patches, 2]`: column and row, -1 for padding), those of each image.
            Those of each row may stand apart, `[batch, images, channels, height, width]`: one that is 0 is none.
        - `image_sizes`: height and width of each image in pixels, `[images, 2]`, where they are padded to one size.
        - `pixel_attention_mask`: likewise, 0 where a pixel is padding: the shape of `pixel_values` without channels.
        - `pixel_values_videos`, `video_grid_thw`, `video_position_ids`: likewise of videos.
        - `num_frames_per_video`: accepted; with `video_position_ids` each frame is an image of its own.
        - `video_second_per_grid`, or `second_per_grid_ts`: time between the frames of each video, in seconds.
        - `use_audio_in_video`: whether videos have audio, whose tokens stand among theirs: accepted, the ids show it.
        - `input_features`: log-mel spectra, of which `feature_attention_mask` (`[audio, frames]`) says which frames
            are real: `[audio, bands, frames]`, or `[audio, frames, bands]` for an encoder that reads whole audio.
        - `input_features_mask`: the same mask under Gemma 4's name.
        - `attention_mask`: 0 where a token is padding.
        - `token_type_ids`, `mm_token_type_ids`: which tokens are placeholders: accepted, and compared with the ids.
        - `segment_ids`: documents packed into a row, whose positions begin anew; 0 marks padding.
        - `groups`: into how many groups of rows the batch is split.
        """
        media = config.media
        if media is None:
            raise ConfigError("Media.create: this model has no encoders (DecoderConfig.media is None): it reads text.")
        ids = _integers("input_ids", input_ids)
        check(ids.ndim == 2, f"Media.create: input_ids of shape {ids.shape} must be [batch, length].", DataError)
        good = groups > 0 and len(ids) % groups == 0
        check(good, f"Media.create: groups={groups} must divide the {len(ids)} rows of input_ids.", DataError)
        kinds = _kinds(media, ids)
        for name, given in (("token_type_ids", token_type_ids), ("mm_token_type_ids", mm_token_type_ids)):
            rule = "differs from where input_ids has placeholders"
            same = given is None or np.array_equal(np.asarray(given) > 0, kinds != TEXT)
            check(same, f"Media.create: {name} {rule}.", DataError)
        found: dict[int, Sequence[Any]] = {
            IMAGE: _images(
                *(media, pixel_values, image_grid_thw, image_position_ids, "pixel_values", "image"),
                sizes=image_sizes,
                mask=pixel_attention_mask,
            ),
            VIDEO: _images(
                media, pixel_values_videos, video_grid_thw, video_position_ids, "pixel_values_videos", "video"
            ),
            AUDIO: _heard(media, input_features, feature_attention_mask, input_features_mask, groups),
        }
        segments = _documents(ids, attention_mask, segment_ids)
        images, audio, order = _packed(media, kinds.reshape(groups, -1), found)
        seconds = second_per_grid_ts if video_second_per_grid is None else video_second_per_grid
        positions = None
        stem = media.patch_stem
        if media.positions is not None and stem is not None:
            grids: dict[int, Sequence[Any]] = {kind: [image.grid for image in found[kind]] for kind in (IMAGE, VIDEO)}
            seconds = None if seconds is None else np.asarray(seconds, np.float32).reshape(-1)
            times, videos = None if seconds is None else len(seconds), len(found[VIDEO])
            rule = f"for {videos} videos: give one for each"
            check(times in (None, videos), f"Media.create: {times} times between frames {rule}.", DataError)
            positions = grid_positions(media.positions, kinds, segments, grids, stem.merge, seconds)
        return cls(
            images=images,
            audio=audio,
            order=order,
            index=_counted(kinds, groups),
            spans=np.isin(kinds, (IMAGE, VIDEO)).astype(np.int32) if media.spans else None,
            real=None if attention_mask is None and segment_ids is None else segments,
            grid_positions=positions,
        )

    @property
    def rope_positions(self) -> Num[AnyArray, "dimensions batch length"] | None:
        """Time, row and column of each token, as transformers has them."""
        return None if self.grid_positions is None else np.moveaxis(np.asarray(self.grid_positions), -1, 0)

    def cut(self, length: int) -> "Media":
        """The same for the first so many tokens of each row."""
        names = ("index", "spans", "real", "grid_positions")
        parts = {name: getattr(self, name) for name in names}
        return dataclasses.replace(self, **{name: None if x is None else x[:, :length] for name, x in parts.items()})

    def padded(self, length: int) -> "Media":
        """The same for tokens that are padded on the right to this length."""
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
    """What encoders make of images and audio.

    **Arguments:**

    - `by_group`: for each group of rows the features that stand for its placeholders, in their order.
    - `deepstack`: those that are added behind the first layers; empty where there are none.
    - `own`: the encoders' features, of which one more matrix makes those for placeholders; None where they are these.
    """

    by_group: Float[Array, "groups features embed"]
    deepstack: tuple[Float[Array, "groups features embed"], ...] = ()
    own: Float[Array, "groups features inner"] | None = None

    @property
    def features(self) -> Float[Array, "rows inner"]:
        """The encoders' features in the order of placeholders; behind those of each group may be some that are none.

        They are the rows that replace placeholders, unless `EncoderConfig.into` stands in between.
        """
        found = self.by_group if self.own is None else self.own
        return found.reshape(-1, found.shape[-1])


def placed(
    features: Float[Array, "groups features embed"], index: Int[Array, "batch length"]
) -> Float[Array, "batch length embed"]:
    """`features[index]` of each row's group; zeros where the index is -1."""
    groups, (batch, length) = features.shape[0], index.shape
    flat = index.reshape(groups, -1)
    rows = jnp.take_along_axis(features, jnp.maximum(flat, 0)[:, :, None], axis=1)
    rows = jnp.where((flat >= 0)[:, :, None], rows, jnp.zeros((), rows.dtype))
    return rows.reshape(batch, length, features.shape[-1])


def merge_features(
    embeds: Float[Array, "batch length embed"],
    features: Float[Array, "groups features embed"],
    index: Int[Array, "batch length"],
) -> Float[Array, "batch length embed"]:
    """Embeddings whose placeholders are replaced by rows of features: `features[index]` where the index is not -1."""
    return jnp.where((index >= 0)[:, :, None], placed(features, index).astype(embeds.dtype), embeds)


def _kinds(media: MediaConfig, ids: np.ndarray) -> np.ndarray:
    kinds = np.full(ids.shape, TEXT)
    tokens = ((IMAGE, media.image_token), (VIDEO, media.video_token), (AUDIO, media.audio_token))
    for kind, token in tokens:
        if token is not None:
            kinds[ids == token] = kind
    return kinds


def _images(
    media: MediaConfig, pixels: Any, grids: Any, positions: Any, name: str, kind: str, **extent: Any
) -> list[Image]:
    if pixels is None:
        return []
    stem = media.patch_stem
    if stem is None:
        raise DataError(f"Media.create: {name} is given, but this model has no vision encoder.")
    if grids is not None:
        return from_patches(stem, pixels, grids, name, f"{kind}_grid_thw")
    if positions is not None:
        return from_positions(stem, pixels, positions, name, f"{kind}_position_ids")
    return from_pixels(stem, pixels, name, **extent)


def _heard(media: MediaConfig, features: Any, mask: Any, other: Any, groups: int) -> list[Audio]:
    """The audio, by whichever name their mask has."""
    names = "feature_attention_mask and input_features_mask"
    check(mask is None or other is None, f"Media.create: {names} are the same: give one.", DataError)
    if features is None:
        return []
    stem = media.audio_stem
    if stem is None:
        raise DataError("Media.create: input_features is given, but this model has no audio encoder.")
    name, given = ("feature_attention_mask", mask) if other is None else ("input_features_mask", other)
    return from_spectra(stem, features, given, name, whole_chunks=groups > 1)


def _integers(name: str, array: Any) -> np.ndarray:
    array = np.asarray(array)
    rule = "must be integers"
    check(array.dtype.kind in "iu", f"Media.create: {name} of shape {array.shape}, {array.dtype} {rule}.", DataError)
    return np.asarray(as_int32(f"Media.create: {name}", array))


def _documents(ids: np.ndarray, attention_mask: Any, segment_ids: Any) -> np.ndarray:
    """The document of each token; 0 for padding."""
    found = np.ones(ids.shape, np.int32) if segment_ids is None else _integers("segment_ids", segment_ids)
    mask = np.ones(ids.shape, np.int32) if attention_mask is None else np.asarray(attention_mask)
    for name, given in (("segment_ids", found), ("attention_mask", mask)):
        rule = f"must be {ids.shape}, as input_ids"
        check(given.shape == ids.shape, f"Media.create: {name} of shape {given.shape} {rule}.", DataError)
    return np.where(mask > 0, found, 0).astype(np.int32)


def _counted(kinds: np.ndarray, groups: int) -> np.ndarray:
    """Of each token the number of its placeholder among those of its group of rows; -1 for others."""
    seen = (kinds != TEXT).reshape(groups, -1)
    return np.where(seen, np.cumsum(seen, axis=1) - 1, -1).reshape(kinds.shape).astype(np.int32)


_NAMES = {IMAGE: "image", VIDEO: "video", AUDIO: "audio"}


def _packed(
    media: MediaConfig, kinds: np.ndarray, found: dict[int, Sequence[Any]]
) -> tuple[PatchRows | None, AudioRows | None, np.ndarray]:
    """What the encoders read, and for each group the rows of features of its placeholders."""
    shares = {kind: _shares(media, kind, kinds, items) for kind, items in found.items()}
    seen = [shares[IMAGE][group] + shares[VIDEO][group] for group in range(len(kinds))]
    heard, images, audio, made = shares[AUDIO], None, None, 0
    rows: list[list[np.ndarray]] = [[], []]
    if any(seen) and (stem := media.patch_stem) is not None:
        images, rows[0] = pack_images(stem, seen)
        made = images.positions.size // stem.group // len(kinds)
    if any(heard) and (ears := media.audio_stem) is not None:
        audio, rows[1] = pack_audio(ears, heard)
    heard_rows = 0 if audio is None else audio.positions.size // len(kinds)
    most, room = int((kinds != TEXT).sum(axis=1).max(initial=0)), made + heard_rows
    # as many as there is room for, unless that is far more: a size less that a program depends on
    order = np.zeros((len(kinds), room if room <= 2 * most else finer_sizes(most)), np.int32)
    of_images, of_audio = iter(rows[0]), iter(rows[1])
    for group, own in enumerate(kinds):
        own = own[own != TEXT]
        for kind, shift, source in ((IMAGE, 0, of_images), (VIDEO, 0, of_images), (AUDIO, made, of_audio)):
            parts = [next(source) for _ in shares[kind][group]]
            if parts:
                size = made if kind != AUDIO else heard_rows
                order[group, : len(own)][own == kind] = np.concatenate(parts) - group * size + shift
    return images, audio, order


def _shares(media: MediaConfig, kind: int, kinds: np.ndarray, items: Sequence[Any]) -> list[list[Any]]:
    """The images, or audio, of each group of rows: as many as its placeholders ask for."""
    group = 1 if media.vision is None else media.vision.stem.group
    sizes = [item[1] if kind == AUDIO else len(item.patches) // group for item in items]
    wanted = (kinds == kind).sum(axis=1).tolist()
    name, things = _NAMES[kind], "audio" if kind == AUDIO else "images"
    rule = f"but {len(items)} {things} make {sum(sizes)} rows of features"
    check(
        sum(wanted) == sum(sizes), f"Media.create: input_ids has {sum(wanted)} {name} placeholders, {rule}.", DataError
    )
    shares, at = [], 0
    for count in wanted:
        own: list[Any] = []
        while count > 0:
            own.append(items[at])
            count -= sizes[at]
            at += 1
        rule = "must not be split over rows that are on different devices"
        check(count == 0, f"Media.create: the placeholders of one of the {things} {rule}.", DataError)
        shares.append(own)
    return shares
