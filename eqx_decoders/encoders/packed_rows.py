"""Inputs of encoders: packed sequences of image patches, or of chunks or frames of audio clips.

A sequence holds one or several images or clips (as in NaViT). `segment_ids` separates them.
"""

import equinox as eqx
from jaxtyping import Bool, Float, Int, Num

from eqx_decoders.sharding.axes import AnyArray


class PackedPatches(eqx.Module):
    """Packed sequences of image patches.

    **Arguments:**

    - `patches`: values of each patch.
    - `positions`: index of the patch in its image, or its position by windows (`window_order`); -1 for padding.
    - `segment_ids`: index of the image, or of the frame of a video, in its sequence, from 1; None if each sequence is
        one image.
    - `coordinates`: row and column, or column and row, of each patch.
    - `position_index`, `position_weights`: rows of the table of learned positions that are added to each patch, and
        their weights.
    - `class_tokens`: True for class tokens; None without class tokens.
    - `masked`: True for padding patches that are part of a feature, but are masked in attention; None without such
        patches.
    - `group`: number of patches that become one feature.
    """

    patches: Num[AnyArray, "batch length patch"]
    positions: Int[AnyArray, "batch length"]
    segment_ids: Int[AnyArray, "batch length"] | None
    coordinates: Int[AnyArray, "batch length dimensions"]
    position_index: Int[AnyArray, "batch length neighbors"] | None = None
    position_weights: Float[AnyArray, "batch length neighbors"] | None = None
    class_tokens: Bool[AnyArray, "batch length"] | None = None
    masked: Bool[AnyArray, "batch length"] | None = None
    group: int = eqx.field(static=True, default=1)


class PackedChunks(eqx.Module):
    """Packed sequences of audio clips, split into chunks with the same number of frames.

    **Arguments:**

    - `chunks`: log-mel spectrum of each chunk. The stem turns a chunk into several tokens.
    - `positions`: index of each token in its audio clip; -1 for padding.
    - `segment_ids`: index of the audio clip in its sequence, from 1.
    - `group`: number of tokens that become one feature.
    """

    chunks: Float[AnyArray, "batch chunks mel frames"]
    positions: Int[AnyArray, "batch length"]
    segment_ids: Int[AnyArray, "batch length"]
    group: int = eqx.field(static=True, default=1)


class PackedFrames(eqx.Module):
    """Packed sequences of complete audio clips, separated by silence.

    **Arguments:**

    - `frames`: log-mel spectrum; the stem turns several frames into one token.
    - `real`: True for frames of an audio clip, False for padding and silence.
    - `positions`: index of each token in its audio clip; -1 for padding.
    - `segment_ids`: index of the audio clip, or of the silence between two clips, in its sequence, from 1.
    - `group`: number of tokens that become one feature.
    """

    frames: Float[AnyArray, "batch frames mel"]
    real: Bool[AnyArray, "batch frames"]
    positions: Int[AnyArray, "batch length"]
    segment_ids: Int[AnyArray, "batch length"]
    group: int = eqx.field(static=True, default=1)


AudioRows = PackedChunks | PackedFrames
