"""Inputs of encoders: patches of images, or chunks or frames of audio clips, packed into rows."""

import equinox as eqx
from jaxtyping import Bool, Float, Int, Num

from eqx_decoders.sharding.axes import AnyArray


class PatchRows(eqx.Module):
    """Patches of images, several of which may share a row.

    **Arguments:**

    - `patches`: the numbers of each patch.
    - `positions`: index of a patch in its image, or among its windows; -1 for padding.
    - `segment_ids`: number of an image, or of a video's frame, in its row; None where each row is one image.
    - `coordinates`: row and column, or column and row, of each patch.
    - `position_index`, `position_weights`: rows of the table of learned positions, and their weights.
    - `class_tokens`: True for class tokens; None where there are none.
    - `unseen`: True for patches of padding that become part of a token; None where there are none.
    - `group`: number of patches that become one feature.
    """

    patches: Num[AnyArray, "batch length patch"]
    positions: Int[AnyArray, "batch length"]
    segment_ids: Int[AnyArray, "batch length"] | None
    coordinates: Int[AnyArray, "batch length dimensions"]
    position_index: Int[AnyArray, "batch length neighbors"] | None = None
    position_weights: Float[AnyArray, "batch length neighbors"] | None = None
    class_tokens: Bool[AnyArray, "batch length"] | None = None
    unseen: Bool[AnyArray, "batch length"] | None = None
    group: int = eqx.field(static=True, default=1)


class ChunkRows(eqx.Module):
    """Spectra of audio clips, cut into chunks of equally many frames; several clips may share a row.

    **Arguments:**

    - `chunks`: mel bands of each frame of each chunk.
    - `positions`: index of a token, one of several of a chunk, in its audio clip; -1 for padding.
    - `segment_ids`: number of an audio clip in its row.
    - `group`: number of tokens that become one feature.
    """

    chunks: Float[AnyArray, "batch chunks mel frames"]
    positions: Int[AnyArray, "batch length"]
    segment_ids: Int[AnyArray, "batch length"]
    group: int = eqx.field(static=True, default=1)


class FrameRows(eqx.Module):
    """Spectra of whole audio clips, frame by frame; several clips may share a row, with silence in between.

    **Arguments:**

    - `frames`: mel bands of each frame; several frames become a token.
    - `real`: True for an audio clip's frames.
    - `positions`: index of a token in its audio clip; -1 for padding.
    - `segment_ids`: number of an audio clip, or of the silence between two, in its row.
    - `group`: number of tokens that become one feature.
    """

    frames: Float[AnyArray, "batch frames mel"]
    real: Bool[AnyArray, "batch frames"]
    positions: Int[AnyArray, "batch length"]
    segment_ids: Int[AnyArray, "batch length"]
    group: int = eqx.field(static=True, default=1)


AudioRows = ChunkRows | FrameRows
