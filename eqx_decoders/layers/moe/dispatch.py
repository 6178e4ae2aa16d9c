"""Expert parallelism: run experts that a mesh splits over devices, with collectives that move tokens to experts.

Two exchanges bring tokens and experts together:

- Gather: devices that share experts all-gather their tokens. Each device sums the outputs of its own experts, and a
  reduce-scatter returns the total to the owners of the tokens (as MaxText's ring of experts).
- All-to-all: each token travels to the devices that have its selected experts, and the outputs travel back (GShard,
  Lepikhin et al. 2020; dropless, as in MegaBlocks, Gale et al. 2022).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32, PyTree

from eqx_decoders.context import Execution
from eqx_decoders.layers.moe.sorted_rows import combine, dispatch, gather_rows, scale_rows, sort_by_expert
from eqx_decoders.numerics.einsum import RingWeight
from eqx_decoders.numerics.matmul import cast_in_loop
from eqx_decoders.numerics.quantized_weight import is_quantized
from eqx_decoders.numerics.rings.grouped_product import GroupRing, group_ring
from eqx_decoders.remat import get_remat
from eqx_decoders.sharding.axes import axes, names_of, path_name
from eqx_decoders.sharding.layout import Layout


# (experts, x, indices, gates) -> sum_k gates[k] * experts[indices[k]](x); with gates=None each token has exactly one
# expert. Indices are relative to the first local expert; all other indices are experts of other devices or padding.
LocalExperts = Callable[[Any, Array, Array, Array | None], Array]
OUTPUT_BIAS_AXES = (("experts", "embed"), ("experts", "latent"))


class RoutedTokens(NamedTuple):
    """Tokens, the indices of their selected experts, and the gates (router weights) of these experts."""

    x: Float[Array, "*tokens embed"]
    indices: Int32[Array, "*tokens slots"]
    gates: Float[Array, "*tokens slots"]


def run_on_mesh(
    experts: LocalExperts,
    weights: PyTree,
    parts: Sequence[RoutedTokens],
    execution: Execution,
    *,
    num_experts: int,
    scale_inputs: bool = False,
) -> list[Float[Array, "batch length embed"]]:
    """Run experts with expert parallelism inside a `shard_map`; return one output for each part of the batch.

    Weights arrive sharded as the layout says. Each device all-gathers them in the dtype of `x`, except along the mesh
    axes that split experts or hidden features; so it computes a partial result, and partial results are summed over
    these axes. If such an axis also splits tokens, tokens are all-gathered over it first and sums are
    reduce-scattered; with `Execution.expert_exchange="all_to_all"`, tokens are sent over the expert axes instead.

    No token is dropped: buffers have room for the worst case. If this worst case needs more than
    `Execution.exchange_bytes`, a device processes its tokens in several rounds.

    **Arguments:**

    - `experts`: function that runs the local experts.
    - `weights`: module with the weights of all experts.
    - `parts`: parts of the batch, equal in size. Communication of one part overlaps with computation of another.
    - `num_experts`: number of experts of all devices.
    - `scale_inputs`: gates multiply the inputs of experts instead of their outputs.
    """
    layout = execution.layout
    weight_axes = axes(weights)
    dtype = parts[0].x.dtype
    plan = _make_plan(execution, parts[0].x.shape, parts[0].indices.shape[2], num_experts)

    def weight_spec(path: Any, leaf: Any) -> Any:
        name = path_name(path)
        if is_quantized(leaf):
            return leaf.specs(layout.weight_spec(weight_axes[f"{name}.values"], leaf.shape, f"{name} of experts"))
        return layout.weight_spec(weight_axes[name], leaf.shape, f"{name} of experts")

    def gather_weight(is_used_once: bool, path: Any, leaf: Any) -> Any:
        name = path_name(path)
        if is_quantized(leaf):
            gather = partial(_gather_weight, split_axes=plan.split_axes)
            return leaf.gathered(layout.weight_spec(weight_axes[f"{name}.values"]), gather)
        ring = None
        if is_used_once and len(path) == 1:
            ring = plan.ring(layout, layout.weight_spec(weight_axes[name]), leaf.shape)
        if ring is not None:
            return RingWeight(cast_in_loop(leaf, dtype), ring)
        leaf = _gather_weight(leaf, layout.weight_spec(weight_axes[name]), plan.split_axes, dtype)
        # devices that split the hidden features sum their results: only the first one of them adds the output bias
        is_output_bias = len(path) == 1 and weight_axes[name] in OUTPUT_BIAS_AXES
        return jnp.where(plan.adds_output_bias(), leaf, 0.0) if plan.mlp_axes and is_output_bias else leaf

    def run(weights, parts):
        flat = [RoutedTokens(*(array.reshape(-1, array.shape[-1]) for array in part)) for part in parts]
        x, indices, _ = flat[0]
        token_bytes = x.shape[1] * dtype.itemsize
        num_rounds = plan.num_rounds(len(x), indices.shape[1], token_bytes, execution.exchange_bytes)
        gather = partial(gather_weight, num_rounds * len(parts) == 1)
        local_experts = partial(experts, jax.tree_util.tree_map_with_path(gather, weights, is_leaf=is_quantized))
        exchange = (_AllToAllExchange if plan.all_to_all else _GatherExchange)(local_experts, plan, scale_inputs)
        if num_rounds == 1:
            outputs = _run_overlapped(exchange, flat)
            return [output.reshape(part.x.shape) for output, part in zip(outputs, parts, strict=True)]
        remat = get_remat(execution.remat)
        run_round = lambda tokens: _run_overlapped(exchange, [tokens])[0]  # noqa: E731
        if remat is not None:
            run_round = jax.checkpoint(run_round, policy=remat.policy(), prevent_cse=False)
        padding = -len(x) % num_rounds
        no_expert = plan.local_experts * plan.expert_shards  # index of padding tokens

        def split(array: Array, fill: int) -> Array:
            padded = jnp.pad(array, ((0, padding), (0, 0)), constant_values=fill)
            return padded.reshape(num_rounds, -1, array.shape[1])

        outputs = [
            lax.map(run_round, RoutedTokens(split(x, 0), split(indices, no_expert), split(gates, 0)))
            for x, indices, gates in flat
        ]
        return [
            output.reshape(-1, output.shape[2])[: len(x)].reshape(part.x.shape)
            for output, part in zip(outputs, parts, strict=True)
        ]

    specs = jax.tree_util.tree_map_with_path(weight_spec, weights, is_leaf=is_quantized)
    mapped = layout.shard_map(run, (specs, plan.token_spec), plan.token_spec)
    return mapped(weights, list(parts))


def _run_overlapped(exchange: "_GatherExchange | _AllToAllExchange", parts: Sequence[RoutedTokens]) -> list[Array]:
    """Run the experts on the parts of a device's tokens; return one output for each part.

    While part i is computed, part i + 1 is sent and the outputs of part i - 1 are returned. Without
    `optimization_barrier` XLA would send all parts first and then compute all of them.
    """
    waiting = list(parts[1:])
    results = []
    sent = exchange.send(*parts[0])
    outputs = None
    while True:
        next_sent = None
        if waiting:
            # send the next part only after this part has arrived, and compute this part only when the next is ready
            sent, tokens = lax.optimization_barrier((sent, waiting.pop(0)))
            next_sent = exchange.send(*tokens)
        if outputs is not None:
            sent, outputs = lax.optimization_barrier((sent, outputs))
            results.append(exchange.receive(outputs))
        outputs = exchange.compute(sent)
        if next_sent is None:
            return [*results, exchange.receive(outputs)]
        sent = next_sent


@dataclasses.dataclass(frozen=True)
class _ExchangePlan:
    """Placement of tokens and experts on a mesh. All axes are mesh axes.

    **Arguments:**

    - `token_spec`: partition of the tokens' `batch length`.
    - `expert_axes`, `mlp_axes`: axes that split the experts and their hidden features.
    - `gather_axes`: axes over which tokens are all-gathered and sums reduce-scattered.
    - `psum_axes`: axes over which partial results are summed; tokens are replicated along them.
    - `all_to_all`: whether tokens are sent over `expert_axes` by all-to-all.
    - `ragged`: whether the all-to-all is ragged; otherwise all devices exchange equal, padded sizes.
    - `local_experts`: number of experts of each device.
    - `expert_shards`: number of shards into which the experts are split.
    - `gather_size`: number of devices along `gather_axes`.
    """

    token_spec: PartitionSpec
    expert_axes: tuple[str, ...]
    mlp_axes: tuple[str, ...]
    gather_axes: tuple[str, ...]
    psum_axes: tuple[str, ...]
    all_to_all: bool
    ragged: bool
    local_experts: int
    expert_shards: int
    gather_size: int

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Axes along which weights are not gathered."""
        return self.expert_axes + self.mlp_axes

    def num_rounds(self, tokens: int, experts_per_token: int, token_bytes: int, max_bytes: int) -> int:
        """Return the smallest number of rounds for the tokens of a device; at most one round per token.

        In a round, the tokens that a device gathers, or may receive in the worst case, fit into `max_bytes`.
        """
        copies = self.gather_size
        if self.all_to_all:
            copies *= self.expert_shards * min(experts_per_token, self.local_experts)
        max_tokens = max(1, max_bytes // (copies * token_bytes))
        return max(1, -(-tokens // max_tokens))

    def ring(self, layout: Layout, spec: PartitionSpec, shard_shape: tuple[int, ...]) -> GroupRing | None:
        """Return the ring reduce-scatter for the gradient of a weight that is multiplied once; None if it has none.

        All devices of a ring must run the same number of products, so experts must not be split over the mesh; and the
        axes of the ring must split the tokens.
        """
        missing = _missing_axes(spec, self.split_axes)
        token_axes = sum(map(names_of, self.token_spec), ())
        if self.expert_axes or len(shard_shape) != 3 or len(missing) != 1:
            return None
        ((dimension, names),) = missing.items()
        if dimension == 0 or not set(names) <= set(token_axes):
            return None
        return group_ring(layout, names, shard_shape, dimension)

    def adds_output_bias(self) -> Array:
        """Return whether this device adds the output bias: the first of the devices that split its hidden features."""
        return lax.axis_index(self.mlp_axes) == 0

    def gather(self, array: Array) -> Array:
        """All-gather the tokens of the devices that share experts."""
        return lax.all_gather(array, self.gather_axes, tiled=True) if self.gather_axes else array

    def reduce(self, array: Array) -> Array:
        """Sum the partial results of all devices; each device gets the sums of its own tokens."""
        array = lax.psum_scatter(array, self.gather_axes, tiled=True) if self.gather_axes else array
        return _psum(array, self.psum_axes) if self.psum_axes else array


def _make_plan(execution: Execution, shape: tuple[int, ...], experts_per_token: int, num_experts: int) -> _ExchangePlan:
    layout = execution.layout
    token_spec = layout.activation_spec("batch length", shape[:2])
    token_axes = sum(map(names_of, token_spec), ())
    expert_axes, _, stored_mlp_axes = map(names_of, layout.weight_spec("experts embed mlp"))
    (activation_mlp_axes,) = map(names_of, layout.activation_spec("mlp"))
    mlp_axes = tuple(name for name in stored_mlp_axes if name in activation_mlp_axes and name not in expert_axes)
    expert_shards = math.prod(layout.sizes[name] for name in expert_axes)
    all_to_all = (
        bool(expert_axes)
        and set(expert_axes) <= set(token_axes)
        and sends_rows(execution, experts_per_token, expert_shards)
    )
    split_axes = expert_axes + mlp_axes
    gather_axes = tuple(name for name in split_axes if name in token_axes and not (all_to_all and name in expert_axes))
    return _ExchangePlan(
        token_spec=token_spec,
        expert_axes=expert_axes,
        mlp_axes=mlp_axes,
        gather_axes=gather_axes,
        psum_axes=tuple(name for name in split_axes if name not in token_axes),
        all_to_all=all_to_all,
        ragged=layout.backend.ragged_exchange,
        local_experts=num_experts // expert_shards,
        expert_shards=expert_shards,
        gather_size=math.prod(layout.sizes[name] for name in gather_axes),
    )


def sends_rows(execution: Execution, experts_per_token: int, expert_shards: int) -> bool:
    """Return whether tokens travel by all-to-all instead of being all-gathered.

    With `expert_exchange="auto"`, only a ragged all-to-all is considered: a padded one has room for all tokens in every
    message and never moves less than an all-gather. A ragged one moves each token `experts_per_token` times, an
    all-gather `expert_shards` times. The threshold is half of that, because a torus runs an all-gather at the full rate
    of its links, but not an all-to-all.
    """
    exchange = execution.expert_exchange
    ragged = execution.layout.backend.ragged_exchange
    return exchange == "all_to_all" or (exchange == "auto" and ragged and 2 * experts_per_token <= expert_shards)


def _gather_weight(
    leaf: Array, spec: PartitionSpec, split_axes: tuple[str, ...], dtype: np.dtype | None = None
) -> Array:
    """All-gather a weight along all mesh axes except `split_axes`; cast it to `dtype` first, unless that is None."""
    for dimension, names in _missing_axes(spec, split_axes).items():
        leaf = leaf if dtype is None else cast_in_loop(leaf, dtype)
        leaf = lax.all_gather(leaf, names, axis=dimension, tiled=True)
    return leaf


def _missing_axes(spec: PartitionSpec, split_axes: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
    """Return the mesh axes over which a weight must be gathered, by dimension of the weight."""
    missing = [tuple(name for name in names if name not in split_axes) for names in map(names_of, spec)]
    return {dimension: names for dimension, names in enumerate(missing) if names}


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _psum(x: Array, names: tuple[str, ...]) -> Array:
    """Sum over mesh axes. The output's gradient is equal on all devices, so the backward pass needs no collective."""
    return lax.psum(x, names)


_psum.defvjp(lambda x, names: (_psum(x, names), None), lambda names, _, gradient: (gradient * lax.psum(1, names),))


class _GatherExchange(NamedTuple):
    """Exchange by all-gather: each device gets all tokens that share its experts, and sums its experts' outputs."""

    experts: Callable[..., Array]
    plan: _ExchangePlan
    scale_inputs: bool

    def send(self, x: Array, indices: Array, gates: Array) -> tuple[Array, ...]:
        """Return gathered tokens, local expert indices (`local_experts` for experts of other devices), and gates."""
        x, indices, gates = (self.plan.gather(array) for array in (x, indices, gates))
        if self.plan.expert_axes:
            num_experts = self.plan.local_experts
            indices = indices - lax.axis_index(self.plan.expert_axes).astype(indices.dtype) * num_experts
            indices = jnp.where((indices >= 0) & (indices < num_experts), indices, num_experts)
        return x, indices, gates

    def compute(self, sent: tuple[Array, ...]) -> tuple[Array, ...]:
        return (self.experts(*sent),)

    def receive(self, outputs: tuple[Array, ...]) -> Array:
        return self.plan.reduce(*outputs)


class _AllToAllExchange(NamedTuple):
    """Exchange by all-to-all: tokens go to the devices that have their experts; outputs come back and are combined."""

    experts: Callable[..., Array]
    plan: _ExchangePlan
    scale_inputs: bool

    def send(self, x: Array, indices: Array, gates: Array) -> tuple[Any, ...]:
        """Return the received tokens and their local expert indices, the gates, and the route of the outputs."""
        plan = self.plan
        x, indices, gates = (plan.gather(array) for array in (x, indices, gates))
        route = (_ragged_route if plan.ragged else _padded_route)(indices, plan)
        rows = dispatch(x, route.destinations, route.sources)
        if self.scale_inputs:
            rows, gates = scale_rows(rows, gates, route.destinations, route.sources)
        # send negative indices: a row that receives nothing is 0, which must not become the index of an expert
        shifted = indices.reshape(-1, 1) % plan.local_experts - plan.local_experts
        received_indices = route.send(gather_rows(shifted, route.sources)) + plan.local_experts
        return route.send(rows), received_indices, gates, route

    def compute(self, sent: tuple[Any, ...]) -> tuple[Any, ...]:
        rows, indices, gates, route = sent
        return self.experts(rows, indices, None), gates, route

    def receive(self, outputs: tuple[Any, ...]) -> Array:
        out, gates, route = outputs
        out = combine(route.receive(out), gates, route.destinations, route.sources).astype(out.dtype)
        return self.plan.reduce(out)


class _Route(eqx.Module):
    """Route of assignments by all-to-all; `receive` is the reverse of `send`, and each is the gradient of the other.

    **Arguments:**

    - `destinations`, `sources`: positions in the send buffer, as in `sorted_rows`.
    - `offsets`: arguments of `_ragged_all_to_all` for the way out and the way back; None for equal, padded sizes.
    - `axis_names`: mesh axes of the all-to-all.
    - `receive_rows`: rows of the receive buffer.
    """

    destinations: Int32[Array, "tokens slots"]
    sources: Int32[Array, "places"]
    offsets: Any
    axis_names: tuple[str, ...] = eqx.field(static=True)
    receive_rows: int = eqx.field(static=True)

    def send(self, rows: Array) -> Array:
        if self.offsets is None:
            return lax.all_to_all(rows, self.axis_names, 0, 0, tiled=True)
        return _ragged_all_to_all(self.axis_names, (self.sources.size, self.receive_rows), rows, *self.offsets)

    def receive(self, rows: Array) -> Array:
        if self.offsets is None:
            return lax.all_to_all(rows, self.axis_names, 0, 0, tiled=True)
        return _ragged_all_to_all(self.axis_names, (self.receive_rows, self.sources.size), rows, *self.offsets[::-1])


def _padded_route(indices: Int32[Array, "tokens slots"], plan: _ExchangePlan) -> _Route:
    """Plan messages of equal size: each has room for the worst case, and most of its rows are empty."""
    message_rows = len(indices) * min(indices.shape[1], plan.local_experts)
    destinations, sources = sort_by_expert(indices, plan.local_experts * plan.expert_shards)
    shard, counts = _count_by_shard(indices, plan)
    starts = jnp.cumsum(counts) - counts
    offset = jnp.arange(message_rows, dtype=jnp.int32)[None]
    messages = sources.at[starts[:, None] + offset].get(mode="fill", fill_value=indices.size)
    sources = jnp.where(offset < counts[:, None], messages, indices.size).reshape(-1)
    rows = shard * message_rows + destinations - gather_rows(starts, shard)
    destinations = jnp.where(shard < plan.expert_shards, rows, sources.size)
    return _Route(destinations, sources, None, plan.expert_axes, sources.size)


def _ragged_route(indices: Int32[Array, "tokens slots"], plan: _ExchangePlan) -> _Route:
    """Plan ragged messages: each device sends only used rows; the receive buffer has room for the worst case."""
    destinations, sources = sort_by_expert(indices, plan.local_experts * plan.expert_shards)
    receive_rows = plan.expert_shards * len(indices) * min(indices.shape[1], plan.local_experts)
    sizes = lax.all_gather(_count_by_shard(indices, plan)[1], plan.expert_axes)  # [sender, receiver]
    device = lax.axis_index(plan.expert_axes)
    send_offsets = jnp.cumsum(sizes, axis=1) - sizes
    receive_offsets = jnp.cumsum(sizes, axis=0) - sizes
    outbound = send_offsets[device], sizes[device], receive_offsets[device], sizes[:, device]
    inbound = receive_offsets[:, device], sizes[:, device], send_offsets[:, device], sizes[device]
    return _Route(destinations, sources, (outbound, inbound), plan.expert_axes, receive_rows)


def _count_by_shard(indices: Array, plan: _ExchangePlan) -> tuple[Int32[Array, "tokens slots"], Int32[Array, "parts"]]:
    """Return the shard of each selected expert (`expert_shards` for padding), and the assignments of each shard."""
    shard = jnp.minimum(indices // plan.local_experts, plan.expert_shards)
    is_shard = shard.reshape(-1, 1) == jnp.arange(plan.expert_shards, dtype=shard.dtype)[None]
    return shard, jnp.sum(is_shard, axis=0, dtype=jnp.int32)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ragged_all_to_all(
    names: tuple[str, ...],
    buffer_rows: tuple[int, int],
    rows: Array,
    outbound: tuple[Array, ...],
    inbound: tuple[Array, ...],
) -> Array:
    """Send rows to a buffer of zeros on each device.

    **Arguments:**

    - `buffer_rows`: rows of the send and of the receive buffer.
    - `outbound`: offsets and sizes for `lax.ragged_all_to_all`.
    - `inbound`: offsets and sizes of the reverse direction, for the backward pass.
    """
    buffer = jnp.zeros((buffer_rows[1], *rows.shape[1:]), rows.dtype)
    return lax.ragged_all_to_all(rows, buffer, *outbound, axis_name=names)


def _ragged_forward(names, buffer_rows, rows, outbound, inbound):
    return _ragged_all_to_all(names, buffer_rows, rows, outbound, inbound), (outbound, inbound)


def _ragged_backward(names, buffer_rows, residuals, gradient):
    outbound, inbound = residuals
    return _ragged_all_to_all(names, buffer_rows[::-1], gradient, inbound, outbound), None, None


_ragged_all_to_all.defvjp(_ragged_forward, _ragged_backward)
