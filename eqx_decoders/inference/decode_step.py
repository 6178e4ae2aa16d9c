"""Prefill and decoding steps, shared by `generate`, `stream` and the serving engine.

A decoding step runs the model on the last token and its drafts, chooses the next tokens, verifies the drafts, and
commits the accepted tokens to the cache.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from eqx_decoders.context import Promises
from eqx_decoders.encoders.media import Encoded, Media
from eqx_decoders.inference.draft_state import VerifiedStep
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import AnyArray


Report = TypeVar("Report")
Prefilled = tuple[Float[Array, "batch length embed"], Any, Float32[Array, "batch vocab"]]


def prefill_prompts(
    model: Decoder,
    prompt: Int[AnyArray, "batch length"],
    lengths: Int[AnyArray, "batch"],
    cache: Cache,
    *,
    media: Media | None = None,
    encoded: Encoded | None = None,
) -> Prefilled:
    """Run complete prompts in an empty cache.

    Returns the hidden states, the new cache, and the logits after the last token of each prompt.

    **Arguments:**

    - `prompt`: token ids, padded on the right.
    - `lengths`: number of tokens of each prompt.
    """
    prompt = jnp.asarray(prompt)
    lengths = jnp.asarray(lengths)
    index = jnp.arange(prompt.shape[1], dtype=jnp.int32)[None]
    positions = jnp.where(index < lengths[:, None], index, -1)
    promises = Promises(cache_is_empty=True, documents_are_contiguous=True)
    hidden, new_cache, _ = model.run(prompt, positions, cache=cache, media=media, encoded=encoded, promises=promises)
    last_hidden = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    return hidden, new_cache, model.logits(last_hidden)[:, 0]


def decode_step(
    model: Decoder,
    cache: Cache,
    tokens: Int[Array, "rows columns"],
    positions: Int[Array, "rows columns"],
    choose: Callable[[Float32[Array, "rows columns vocab"]], tuple[Int[Array, "rows columns"], Report]],
    *,
    rows: Int[Array, "rows"] | None = None,
) -> tuple[Cache, VerifiedStep, Report]:
    """Run the last token of each sequence and its drafts, choose the next tokens, and commit the accepted tokens.

    A draft is accepted if it equals the token chosen after the preceding token, and all earlier drafts of the sequence
    are accepted. The last token (column 0) is always accepted.

    **Arguments:**

    - `tokens`: the last token of each sequence, followed by its drafts.
    - `positions`: position of each token; -1 where a sequence has no draft, and for all tokens of an idle sequence.
    - `choose`: maps logits to the token chosen after each token, and a report that is returned as it is.
    - `rows`: cache row of each sequence; only these rows are read and written. If there are as many as the cache has
        rows, they must be in order. None: the sequences are all rows of the cache.

    **Returns:**

    The new cache, the verified tokens, and the report of `choose`.
    """
    columns = tokens.shape[1]
    read_cache = cache if rows is None else cache.at_rows(rows)
    promises = Promises(accept_all=columns == 1)
    hidden, proposal, stats = model.forward_uncommitted(tokens, positions, cache=read_cache, promises=promises)
    following, report = choose(model.logits(hidden))
    matches = (following[:, :-1] == tokens[:, 1:]) & (positions[:, 1:] >= 0)
    num_accepted_drafts = jnp.sum(jnp.cumprod(matches.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    num_accepted = jnp.where(positions[:, 0] >= 0, 1 + num_accepted_drafts, 0)
    index = jnp.arange(columns, dtype=jnp.int32)[None]
    accepted = jnp.where(index < num_accepted[:, None], proposal.positions, -1)
    new_state = proposal.entries, accepted, proposal.rope_offset
    if rows is None or len(rows) == len(cache.length):
        cache = cache.commit(*new_state)
    else:
        cache = cache.commit_rows(rows, *new_state)
    start = jnp.maximum(positions[:, 0], 0)
    return cache, VerifiedStep(tokens, accepted, hidden, following, start, num_accepted, stats.choices), report
