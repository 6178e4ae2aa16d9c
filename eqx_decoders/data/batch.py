"""Batch of sequences: the arrays that one training or evaluation step reads."""

import equinox as eqx
from jaxtyping import Bool, Integer, Num

from eqx_decoders.context import Inputs
from eqx_decoders.core.input_checks import as_int32
from eqx_decoders.data.signals import Signals
from eqx_decoders.encoders.media import Media
from eqx_decoders.sharding.axes import AnyArray


class Batch(eqx.Module):
    """Batch of sequences for one step, as NumPy or JAX arrays.

    - `tokens`: ids, 0 where there is padding.
    - `segment_ids`: 1, 2, … for the documents within a row, 0 for padding. None: each row is one document.
    - `positions`: number in the document's piece, from 0. None: 0, 1, …
    - `loss_mask`: weight of token `t` *as a target*, predicted from token `t-1`. None: all count. Behind padding a
        token has none to be predicted from, and is no target.
    - `spans`: number of each token's span, whose tokens attend to each other in both directions where a layer says so
        (`AttentionConfig.spans`); 0 for none. A token in a span sees the next one: only its last should have a target.
    - `media`: images and audio of these tokens, whose placeholders are no targets.
    - `signals`: what an objective reads of each token; None: the loss of next tokens reads nothing more.
    - `contiguous`: promise that no document has padding inside or a gap in positions, as in those of `Batches`: ring
        attention with windows then sends no more than the windows reach, and choices of blocks of keys take fewer
        bits. Results are wrong where it is broken.

    Ids and positions are converted to int32. Raises ConfigError where they are no integers.
    """

    tokens: Integer[AnyArray, "batch length"]
    segment_ids: Integer[AnyArray, "batch length"] | None = None
    positions: Integer[AnyArray, "batch length"] | None = None
    loss_mask: Num[AnyArray, "batch length"] | Bool[AnyArray, "batch length"] | None = None
    spans: Integer[AnyArray, "batch length"] | None = None
    media: Media | None = None
    signals: Signals | None = None
    contiguous: bool = eqx.field(static=True, default=False)

    def __post_init__(self):
        for name in ("tokens", "segment_ids", "positions", "spans"):
            setattr(self, name, as_int32(f"Batch.{name}", getattr(self, name)))

    @property
    def inputs(self) -> Inputs:
        """Inputs of layers besides tokens, positions and documents."""
        return Inputs(spans=self.spans)
