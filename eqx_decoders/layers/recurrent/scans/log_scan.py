"""Running log-sum-exp, weighted mean and maximum, with decay.

    l_t = log(exp(l_{t-1} + g_t) + exp(k_t))    or    l_t = max(l_{t-1} + g_t, k_t)

g is the log decay, and k the log weight of a token. `DECAYING_MEAN` computes the first l, and the mean of the values
v_t with these weights, updated as a convex combination. `DECAYING_MAX` computes the second l. Logarithms avoid
overflow: no exponent is above 0. Both operations are associative, so an associative scan combines the tokens of a
chunk, and a loop carries the state from chunk to chunk.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float32

from eqx_decoders.context import Execution
from eqx_decoders.layers.recurrent.scans.selective_scan import scan_chunks
from eqx_decoders.layers.recurrent.scans.sharded_scan import states_of_shards
from eqx_decoders.sharding.axes import names_of


CHUNK = 64  # tokens per chunk
LOG_ZERO = -1e30  # stands for log(0): its exponential is 0, and sums of a few such values are finite

# The effect of one or several consecutive tokens: their total log decay, and the state that they produce from the
# initial state. For a single token this is (g, k), or (g, k, v).
Span = tuple[Array, ...]
State = tuple[Array, ...]


class DecayingReduction(NamedTuple):
    """Associative operation over tokens.

    **Arguments:**

    - `combine`: function of the spans of earlier and of later tokens that returns the span of both.
    - `initial`: values of the initial state.
    """

    combine: Callable[[Span, Span], Span]
    initial: tuple[float, ...]

    def advance(self, state: State, span: Span) -> State:
        """Return the state after the tokens of a span."""
        return self.combine((jnp.zeros_like(state[0]), *state), span)[1:]

    def initial_state(self, like: Array) -> State:
        """Return the initial state, with arrays of the shape and dtype of `like`."""
        return tuple(jnp.full_like(like, value) for value in self.initial)


def _combine_maxima(earlier: Span, later: Span) -> Span:
    earlier_decay, earlier_level = earlier
    later_decay, later_level = later
    return earlier_decay + later_decay, jnp.maximum(earlier_level + later_decay, later_level)


def _combine_means(earlier: Span, later: Span) -> Span:
    earlier_decay, earlier_level, earlier_mean = earlier
    later_decay, later_level, later_mean = later
    decayed = earlier_level + later_decay
    level = jnp.logaddexp(decayed, later_level)
    return earlier_decay + later_decay, level, weighted_mean(decayed, earlier_mean, later_level, later_mean)


def weighted_mean(log_weight: Array, x: Array, other_log_weight: Array, other: Array) -> Array:
    """Return the mean of `x` and `other` with the given log weights."""
    return other + jax.nn.sigmoid(log_weight - other_log_weight) * (x - other)


DECAYING_MAX = DecayingReduction(_combine_maxima, (LOG_ZERO,))
DECAYING_MEAN = DecayingReduction(_combine_means, (LOG_ZERO, 0.0))


def scan_states(reduction: DecayingReduction, tokens: Span, start: State, chunk: int = CHUNK) -> tuple[State, State]:
    """Return the state before each token, and the state after the last token.

    `tokens` holds arrays [batch, length, channels]; `start` is the state before the first token.
    """

    def advance(state: State, tokens: Span) -> tuple[State, State]:
        spans = lax.associative_scan(reduction.combine, tokens)
        after = reduction.advance(tuple(x[None] for x in state), spans)
        before = tuple(jnp.concatenate([x[None], y[:-1]]) for x, y in zip(state, after, strict=True))
        return tuple(y[-1] for y in after), before

    end, before = scan_chunks(advance, start, tokens, chunk, (0.0, *reduction.initial))
    return before, end


def log_scan_on_mesh(
    reduction: DecayingReduction,
    tokens: tuple[Float32[Array, "batch length channels"], ...],
    start: tuple[Float32[Array, "batch channels"], ...],
    *,
    execution: Execution,
) -> tuple[tuple[Float32[Array, "batch length channels"], ...], tuple[Float32[Array, "batch channels"], ...]]:
    """Run `scan_states` on the mesh of `execution`.

    If the mesh shards sequences, each device scans its shard twice, as in `selective_scan.selective_scan_on_mesh`.
    """
    layout = execution.layout
    spec = layout.activation_spec("batch length channels", tokens[0].shape)
    batch_axes, length_axes, channel_axes = map(names_of, spec)
    if layout.single or not length_axes:
        return scan_states(reduction, tokens, start)

    def run(tokens: Span, start: State) -> tuple[State, State]:
        _, end = scan_states(reduction, tokens, reduction.initial_state(start[0]))
        shard_start, end = states_of_shards(start, (tokens[0].sum(1), *end), reduction.advance, length_axes)
        return scan_states(reduction, tokens, shard_start)[0], end

    batch_axes = layout.with_unit_axes(batch_axes)
    specs = PartitionSpec(batch_axes, length_axes, channel_axes), PartitionSpec(batch_axes, channel_axes)
    return layout.shard_map(run, specs, specs)(tokens, start)
