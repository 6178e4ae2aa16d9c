"""What encoders read: patches of any number of images, or pieces of any number of audio, packed into rows."""

import equinox as eqx
from jaxtyping import Bool, Float, Int, Num

from eqx_decoders.sharding.axes import AnyArray


class PatchRows(eqx.Module):
    """Patches of images, several of which may share a row.

    **Arguments:**

    - `patches`: the numbers of each patch.
    - `positions`: of a patch in its image, or among its windows; -1 where there is none.
    - `segment_ids`: the number of an image, or of a video's frame, in its row; None where each row is one image.
    - `coordinates`: row and column, or column and row, of each patch.
    - `places`, `place_weights`: rows of the table of learned positions, and what each of them counts.
    - `class_tokens`: where a class token stands; None where there is none.
    - `group`: how many become one feature.
    """

    patches: Num[AnyArray, "batch length patch"]
    positions: Int[AnyArray, "batch length"]
    segment_ids: Int[AnyArray, "batch length"] | None
    coordinates: Int[AnyArray, "batch length dimensions"]
    places: Int[AnyArray, "batch length places"] | None = None
    place_weights: Float[AnyArray, "batch length places"] | None = None
    class_tokens: Bool[AnyArray, "batch length"] | None = None
    group: int = eqx.field(static=True, default=1)


class ChunkRows(eqx.Module):
    """Spectra of audio, cut into chunks of equally many frames; several audio may share a row.

    **Arguments:**

    - `chunks`: mel bands of each frame of each chunk.
    - `positions`: of a token, one of several of a chunk, in its audio; -1 where there is none.
    - `segment_ids`: the number of an audio clip in its row.
    - `group`: how many tokens become one feature.
    """

    chunks: Float[AnyArray, "batch chunks mel frames"]
    positions: Int[AnyArray, "batch length"]
    segment_ids: Int[AnyArray, "batch length"]
    group: int = eqx.field(static=True, default=1)


class FrameRows(eqx.Module):
    """Spectra of whole audio, frame by frame; several audio may share a row, with silence in between.

    **Arguments:**

    - `frames`: mel bands of each frame; so many frames become a token.
    - `real`: which frames are an audio clip's.
    - `positions`: of a token in its audio; -1 where there is none.
    - `segment_ids`: the number of an audio clip, or of the silence between two, in its row.
    - `group`: how many tokens become one feature.
    """

    frames: Float[AnyArray, "batch frames mel"]
    real: Bool[AnyArray, "batch frames"]
    positions: Int[AnyArray, "batch length"]
    segment_ids: Int[AnyArray, "batch length"]
    group: int = eqx.field(static=True, default=1)


AudioRows = ChunkRows | FrameRows
