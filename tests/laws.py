"""The laws of a whole decoder, for those that have parts of their own: each fast form equals the plain one."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np

import eqx_decoders as ed
from eqx_decoders.model.decoder import Decoder
from tests.compare import assert_array_equal, assert_close
from tests.models import extend as extend_at, packed, run, some_tokens


forward = eqx.filter_jit(lambda model, *inputs: model(*inputs).logits)
extend = eqx.filter_jit(lambda model, tokens, cache: model(tokens, cache=cache))


def check_pieces(model: Decoder, pieces: tuple[int, ...]) -> None:
    """A cache filled piece by piece gives the logits of one call."""
    tokens = np.asarray(some_tokens(2, sum(pieces)))
    whole, begin, found = forward(model, tokens), 0, []
    cache = ed.init_cache(model.config, 2, tokens.shape[1], dtype=jnp.float32)
    for piece in pieces:
        out = extend(model, tokens[:, begin : begin + piece], cache)
        cache, begin = out.cache, begin + piece
        found.append(np.asarray(out.logits))
    assert_close(np.concatenate(found, axis=1), whole)


def check_ragged_pieces(model: Decoder, layout: ed.Layout, piece: int = 5, slots: int = 13) -> None:
    """Two pieces of a padded prefill, then each row at its own place, on a mesh: the logits of one call."""
    tokens, lengths = np.asarray(some_tokens(4, 13)), np.minimum([9, 1, 5, 8], 2 * piece).astype(np.int32)
    want = np.asarray(forward(model, tokens))
    model = model.place(layout)
    cache = ed.init_cache(model.config, 4, slots, dtype=jnp.float32, layout=layout)
    for begin in (0, piece):
        here = np.arange(begin, begin + piece, dtype=np.int32)[None]
        positions = np.where(here < lengths[:, None], here, -1)
        logits, cache = extend_at(model, tokens[:, begin : begin + piece], cache, positions)
        logits, counts = np.asarray(logits), np.clip(lengths - begin, 0, piece)
        for row, length in ((row, counts[row]) for row in np.flatnonzero(counts)):
            assert_close(logits[row, :length], want[row, begin : begin + length], units=256)
    for _ in range(4):
        here = np.asarray(cache.length)[:, None]
        logits, cache = extend_at(model, np.take_along_axis(tokens, here, axis=1), cache)
        assert_close(np.asarray(logits)[:, 0], np.take_along_axis(want, here[:, :, None], axis=1)[:, 0], units=256)
    assert cache.length.tolist() == (lengths + 4).tolist()


def check_documents(model: Decoder) -> None:
    """Packed documents equal each alone, and nothing of one reaches the next."""
    tokens, segments = map(np.asarray, packed(1))
    logits = np.asarray(forward(model, tokens, None, segments))
    for begin, end in ((0, 5), (5, 6), (6, 10)):
        assert_close(logits[:, begin:end], forward(model, tokens[:, begin:end]))
    changed = np.where(np.arange(tokens.shape[1])[None] < 2, (tokens + 3) % 32, tokens)
    other = np.asarray(forward(model, changed, None, segments))
    assert_array_equal(logits[:, 5:10], other[:, 5:10])


def check_rejection(model: Decoder) -> None:
    """Tokens that are proposed and then rejected leave no trace."""
    tokens = np.asarray(some_tokens(2, 9))
    forward_uncommitted = eqx.filter_jit(lambda model, tokens, cache: model.forward_uncommitted(tokens, cache=cache)[1])
    cache = extend(model, tokens[:, :4], ed.init_cache(model.config, 2, 12, dtype=jnp.float32)).cache
    proposal = forward_uncommitted(model, tokens[:, 4:7], cache)
    accepted = np.arange(3)[None] < np.asarray([[1], [2]])
    kept = eqx.filter_jit(lambda c, p: c.commit(p.entries, jnp.where(accepted, p.positions, -1)))(cache, proposal)
    for row, count in enumerate((5, 6)):
        plain = extend(model, tokens[:, :count], ed.init_cache(model.config, 2, 12, dtype=jnp.float32)).cache
        got, want = (np.asarray(extend(model, tokens[:, 7:], each).logits)[row] for each in (kept, plain))
        assert_close(got, want)


def check_execution(model: Decoder, **mesh: int) -> None:
    """Loop, remat and a mesh change neither logits nor gradients."""
    tokens, segments = packed(4)
    want = run(model, tokens, segments)
    assert_close(run(model.replace(scan=False), tokens, segments), want, units=256)
    assert_close(run(model.replace(remat="full"), tokens, segments), want, units=256)
    assert_close(run(model.place(ed.Layout.create(**mesh)), tokens, segments), want, units=256)
