"""`Batch`: the input arrays of a training or evaluation step."""

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
    - `segment_ids`: 1, 2, … for the packed documents in a row; 0 for padding. None: each row is one document.
    - `positions`: position of each token in its segment, from 0. None: 0, 1, …
    - `loss_mask`: weight of token `t` as a target, predicted from token `t-1`. None: all tokens have weight 1. The
        first token after padding is never a target, because no token predicts it.
    - `spans`: index of the span of each token; 0 outside of spans. In layers with `AttentionConfig.spans`, the tokens
        of a span attend to each other in both directions. So only the last token of a span should predict a target: the
        other tokens attend to the next token.
    - `media`: images and audio of these tokens. Placeholder tokens are not targets.
    - `signals`: per-token inputs of an objective. None: the loss is next-token cross-entropy.
    - `contiguous`: whether no document contains padding or a gap in positions, as in the batches of `Batches`. Then
        ring attention with windows sends only the keys within the windows, and the selection of key blocks uses fewer
        bits. Results are wrong if this is True but documents have gaps.

    Token ids, segment ids, positions and spans are converted to int32. Raises ConfigError if they are not integers.
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
        """Additional inputs of layers, besides tokens, positions and segments."""
        return Inputs(spans=self.spans)
