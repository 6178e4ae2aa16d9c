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

    **Arguments:**

    - `tokens`: token ids; 0 for padding.
    - `segment_ids`: 1, 2, … for the documents in a row, 0 for padding. None: each row is one document.
    - `positions`: position of each token in its document's piece, counted from 0. None: 0, 1, …
    - `loss_mask`: weight of token `t` as a target, predicted from token `t-1`. None: all tokens have weight 1. The
        first token after padding is never a target, because no token predicts it.
    - `spans`: index of each token's span; 0 outside of spans. In layers with `AttentionConfig.spans`, the tokens of a
        span attend to each other in both directions. A token in a span sees the next token, so only the last token of a
        span should predict a target.
    - `media`: images and audio of these tokens. Their placeholders are not targets.
    - `signals`: numbers for each token that an objective reads. None: the loss is next-token cross-entropy.
    - `contiguous`: promise that no document contains padding or a gap in positions, as in the batches of `Batches`.
        Ring attention with windows then sends only the keys within the windows, and the selection of key blocks takes
        fewer bits. Results are wrong if the promise is broken.

    Ids and positions are converted to int32. Raises ConfigError if they are not integers.
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
        """Inputs of layers other than tokens, positions and documents."""
        return Inputs(spans=self.spans)
