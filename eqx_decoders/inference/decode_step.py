"""Steps of decoding, for `generate`, `stream` and the engine: run prompts, and run the last tokens with their drafts.

One step is: forward pass, choice of the next tokens, check of the drafts, and commit of what is right to the cache.
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
    """Run whole prompts in an empty cache; returns their hidden states, the cache, and the logits after each prompt."""
    prompt, lengths = jnp.asarray(prompt), jnp.asarray(lengths)
    index = jnp.arange(prompt.shape[1], dtype=jnp.int32)[None]
    positions = jnp.where(index < lengths[:, None], index, -1)
    promises = Promises(cache_is_empty=True, contiguous=True)
    hidden, written, _ = model.run(prompt, positions, cache=cache, media=media, encoded=encoded, promises=promises)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    return hidden, written, model.logits(last)[:, 0]


def decode_step(
    model: Decoder,
    cache: Cache,
    tokens: Int[Array, "rows columns"],
    positions: Int[Array, "rows columns"],
    choose: Callable[[Float32[Array, "rows columns vocab"]], tuple[Int[Array, "rows columns"], Report]],
    *,
    rows: Int[Array, "rows"] | None = None,
) -> tuple[Cache, VerifiedStep, Report]:
    """Feed each row its last token and its drafts, choose the token after each, and commit the right ones.

    **Arguments:**

    - `positions`: -1 where a row has no draft, or is idle.
    - `choose`: returns the token after each from logits, and anything else of them. A draft is right where it is the
        token that is chosen after the one before it, and all drafts before it are right.
    - `rows`: rows of the cache, in order if they are all, which are read where they stand; None: all, read at once.
    """
    columns = tokens.shape[1]
    read, promises = cache if rows is None else cache.at_rows(rows), Promises(accept_all=columns == 1)
    hidden, proposal, stats = model.forward_uncommitted(tokens, positions, cache=read, promises=promises)
    following, report = choose(model.logits(hidden))
    same = (following[:, :-1] == tokens[:, 1:]) & (positions[:, 1:] >= 0)
    num_right = jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    num_accepted = jnp.where(positions[:, 0] >= 0, 1 + num_right, 0)
    index = jnp.arange(columns, dtype=jnp.int32)[None]
    accepted = jnp.where(index < num_accepted[:, None], proposal.positions, -1)
    new = proposal.entries, accepted, proposal.rope_offset
    whole = rows is None or len(rows) == len(cache.length)
    cache = cache.commit(*new) if whole else cache.commit_rows(rows, *new)
    first = jnp.maximum(positions[:, 0], 0)
    return cache, VerifiedStep(tokens, accepted, hidden, following, first, num_accepted, stats.choices), report
