"""Dispatch of tokens to experts on other devices of a mesh, and back, by collectives.

On a mesh the experts are split over the devices of some axes. Two ways to bring tokens and experts together: all
tokens of these devices are gathered, each device adds up the outputs of its experts, and the sums are added and
scattered (MaxText's ring of experts); or each row travels to the one device that has its expert, and back (GShard,
Lepikhin et al. 2020; without loss, as in MegaBlocks, Gale et al. 2022).
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
from eqx_decoders.layers.moe.sorted_rows import combine, dispatch, rows_at, scale_rows, sort_by_expert
from eqx_decoders.numerics.einsum import RingWeight
from eqx_decoders.numerics.gradient_ring import GroupRing, group_ring
from eqx_decoders.numerics.matmul import cast_in_loop
from eqx_decoders.numerics.quantized_weight import is_quantized
from eqx_decoders.remat import get_remat
from eqx_decoders.sharding.axes import axes, names_of, path_name
from eqx_decoders.sharding.layout import Layout


# What a device makes of tokens with some experts, `sum of gate * expert(x)`, and one expert for each row without gates.
# Experts are numbered from its first one; any other number is an expert of another device, or an empty row.
LocalExperts = Callable[[Any, Array, Array, Array | None], Array]
RESULTS = (("experts", "embed"), ("experts", "latent"))  # axes of biases of what experts give back


# Tokens, the experts that each has chosen, and with what weights.
Tokens = tuple[
    Float[Array, "batch length embed"], Int32[Array, "batch length slots"], Float[Array, "batch length slots"]
]


def run_on_mesh(
    experts: LocalExperts, weights: PyTree, parts: Sequence[Tokens], execution: Execution, *, scale_inputs: bool = False
) -> list[Float[Array, "batch length embed"]]:
    """Run experts on every device of the mesh, for the tokens and with the experts that the device has.

    Weights come as the layout splits them. A device gathers what it lacks, in the dtype of `x`, but for the experts and
    the hidden features of others. So it gets a part of a result, and parts are added up over the mesh axes that split
    experts or hidden features. Where such an axis splits tokens too, these are gathered over it first, and sums are
    scattered. With `Execution.expert_exchange="all_to_all"` rows travel over the experts' axes instead.

    No routing loses a token: there is room for the worst case. Where that is much, a device's tokens go in several
    rounds (`Execution.exchange_bytes`). `scale_inputs`: gates multiply what goes into experts.

    With several parts of a batch, equal in size, one travels while the device works on another.
    """
    layout, words = execution.layout, axes(weights)
    (x, chosen, _), *_ = parts
    plan = _make_plan(execution, x.shape, chosen.shape[2], jax.tree.leaves(weights)[0].shape[0])

    def spec(path: Any, leaf: Any) -> Any:
        name = path_name(path)
        if is_quantized(leaf):
            return leaf.specs(layout.weight_spec(words[f"{name}.values"], leaf.shape, f"{name} of experts"))
        return layout.weight_spec(words[name], leaf.shape, f"{name} of experts")

    def ready(once: bool, path: Any, leaf: Any) -> Any:
        name = path_name(path)
        if is_quantized(leaf):
            gather = partial(_gather_weight, split_axes=plan.split_axes)
            return leaf.gathered(layout.weight_spec(words[f"{name}.values"]), gather)
        ring = plan.ring(layout, layout.weight_spec(words[name]), leaf.shape) if once and len(path) == 1 else None
        if ring is not None:
            return RingWeight(cast_in_loop(leaf, x.dtype), ring)
        leaf = _gather_weight(leaf, layout.weight_spec(words[name]), plan.split_axes, x.dtype)
        # a bias of results counts once among those who add up their parts of a result
        is_bias = len(path) == 1 and words[name] in RESULTS
        return jnp.where(plan.adds_bias(), leaf, 0.0) if plan.hidden and is_bias else leaf

    def run(weights, parts):
        flat = [tuple(each.reshape(-1, each.shape[-1]) for each in part) for part in parts]
        (rows, slots, _), *_ = flat
        count = plan.rounds(len(rows), slots.shape[1], rows.shape[1] * rows.dtype.itemsize, execution.exchange_bytes)
        whole = partial(ready, count * len(parts) == 1)
        mine = partial(experts, jax.tree_util.tree_map_with_path(whole, weights, is_leaf=is_quantized))
        exchange = (_AllToAll if plan.all_to_all else _Gathered)(mine, plan, scale_inputs)
        if count == 1:
            return [out.reshape(part[0].shape) for out, part in zip(_run_in_turn(exchange, flat), parts, strict=True)]
        remat = get_remat(execution.remat)
        one = lambda tokens: _run_in_turn(exchange, [tokens])[0]  # noqa: E731
        one = one if remat is None else jax.checkpoint(one, policy=remat.policy(), prevent_cse=False)
        cut = [jax.tree.map(lambda each: each.reshape(count, -1, each.shape[1]), part) for part in flat]
        return [lax.map(one, each).reshape(part[0].shape) for each, part in zip(cut, parts, strict=True)]

    specs = jax.tree_util.tree_map_with_path(spec, weights, is_leaf=is_quantized)
    mapped = layout.shard_map(run, (specs, plan.tokens), plan.tokens)
    return mapped(weights, list(parts))


def _run_in_turn(exchange: "_Gathered | _AllToAll", parts: Sequence[tuple[Array, Array, Array]]) -> list[Array]:
    """Run the experts on a device's tokens, part by part.

    A part's rows are on their way while the part before is worked on, and so are the outputs of the part before that:
    `optimization_barrier` keeps XLA from sending all of them first and working on all of them then.
    """
    waiting, outs = list(parts[1:]), []
    sent, outputs = exchange.send(*parts[0]), None
    while True:
        later = None
        if waiting:
            # the next part's tokens leave when this one's are there, and work on these begins when those are ready
            sent, tokens = lax.optimization_barrier((sent, waiting.pop(0)))
            later = exchange.send(*tokens)
        if outputs is not None:
            sent, outputs = lax.optimization_barrier((sent, outputs))
            outs.append(exchange.receive(outputs))
        outputs = exchange.work(sent)
        if later is None:
            return [*outs, exchange.receive(outputs)]
        sent = later


@dataclasses.dataclass(frozen=True)
class _ExchangePlan:
    """Placement of experts on a mesh; names are mesh axes.

    **Arguments:**

    - `tokens`: axes that split `batch length`.
    - `owners`, `hidden`: axes that split experts and their hidden features.
    - `shared`: axes over which tokens are gathered and sums scattered.
    - `summed`: axes over which partial results are added up, tokens being the same there.
    - `all_to_all`: whether rows travel over `owners`.
    - `ragged`: whether they travel as they are, or in pieces of one size.
    - `experts`, `parts`: number of a device's experts, and of devices that have different ones.
    - `sharing`: number of devices that gather their tokens together.
    """

    tokens: PartitionSpec
    owners: tuple[str, ...]
    hidden: tuple[str, ...]
    shared: tuple[str, ...]
    summed: tuple[str, ...]
    all_to_all: bool
    ragged: bool
    experts: int
    parts: int
    sharing: int

    @property
    def split_axes(self) -> tuple[str, ...]:
        return self.owners + self.hidden

    def rounds(self, tokens: int, slots: int, row: int, most: int) -> int:
        """Return the number of rounds for a device's tokens, of `row` bytes each: the least that divides them.

        In a round, what the device gathers or may get fits `most` bytes.
        """
        sharing = self.parts * min(slots, self.experts) if self.all_to_all else self.sharing
        wanted = min(tokens, -(-tokens * sharing * row // most))
        return next(count for count in range(max(1, wanted), tokens + 1) if tokens % count == 0) if tokens else 1

    def ring(self, layout: Layout, spec: PartitionSpec, part: tuple[int, ...]) -> GroupRing | None:
        """Return the ring for the gradient of a weight that is multiplied once, given its parts; None if it has none.

        Its devices have all experts, so that they multiply equally often, and tokens of their own.
        """
        missing, tokens = _missing(spec, self.split_axes), sum(map(names_of, self.tokens), ())
        if self.owners or len(part) != 3 or len(missing) != 1:
            return None
        ((dimension, names),) = missing.items()
        return group_ring(layout, names, part, dimension) if dimension and set(names) <= set(tokens) else None

    def adds_bias(self) -> Array:
        """Return whether this device is the one that adds the output bias, among those that share its experts."""
        return lax.axis_index(self.hidden) == 0

    def gather(self, rows: Array) -> Array:
        """Gather the rows of all devices that share experts."""
        return lax.all_gather(rows, self.shared, tiled=True) if self.shared else rows

    def reduce(self, rows: Array) -> Array:
        """Add up the partial sums of all devices; each gets the sums of its own tokens."""
        rows = lax.psum_scatter(rows, self.shared, tiled=True) if self.shared else rows
        return _psum(rows, self.summed) if self.summed else rows


def _make_plan(execution: Execution, shape: tuple[int, ...], slots: int, experts: int) -> _ExchangePlan:
    layout = execution.layout
    tokens = layout.activation_spec("batch length", shape[:2])
    splitting = sum(map(names_of, tokens), ())
    owners, _, mlp = map(names_of, layout.weight_spec("experts embed mlp"))
    (stays,) = map(names_of, layout.activation_spec("mlp"))
    hidden = tuple(name for name in mlp if name in stays and name not in owners)
    parts, ragged = math.prod(layout.sizes[name] for name in owners), layout.backend.ragged_exchange
    routed = bool(owners) and set(owners) <= set(splitting) and sends_rows(execution, slots, parts)
    shared = tuple(name for name in owners + hidden if name in splitting and not (routed and name in owners))
    summed = tuple(name for name in owners + hidden if name not in splitting)
    sharing = math.prod(layout.sizes[name] for name in shared)
    return _ExchangePlan(tokens, owners, hidden, shared, summed, routed, ragged, experts // parts, parts, sharing)


def sends_rows(execution: Execution, slots: int, parts: int) -> bool:
    """Return whether rows travel instead of being gathered.

    A piece of one size has room for all tokens, so gathering these never moves more; rows as they are number `slots` a
    token, against one for each of the other parts: they must be half of that at most, since a torus gathers at the full
    rate of its links but not so when all send to all.
    """
    chosen, ragged = execution.expert_exchange, execution.layout.backend.ragged_exchange
    return chosen == "all_to_all" or (chosen == "auto" and ragged and 2 * slots <= parts)


def _gather_weight(
    leaf: Array, spec: PartitionSpec, split_axes: tuple[str, ...], dtype: np.dtype | None = None
) -> Array:
    """Gather a weight along all of its dimensions but the axes in `split_axes`; it is cast first, unless to None."""
    for dimension, names in _missing(spec, split_axes).items():
        leaf = leaf if dtype is None else cast_in_loop(leaf, dtype)
        leaf = lax.all_gather(leaf, names, axis=dimension, tiled=True)
    return leaf


def _missing(spec: PartitionSpec, split_axes: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
    """Return the dimensions of a weight along which a device lacks parts, and the mesh axes that have them."""
    missing = [tuple(name for name in names if name not in split_axes) for names in map(names_of, spec)]
    return {dimension: names for dimension, names in enumerate(missing) if names}


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _psum(x: Array, names: tuple[str, ...]) -> Array:
    """Sum over mesh axes. The gradient is the same on all their devices: no need to add it up again."""
    return lax.psum(x, names)


_psum.defvjp(lambda x, names: (_psum(x, names), None), lambda names, _, gradient: (gradient * lax.psum(1, names),))


class _Gathered(NamedTuple):
    """Exchange by gathering: each device gets all tokens that share its experts, and adds up their outputs."""

    experts: Callable[..., Array]
    plan: _ExchangePlan
    scale_inputs: bool

    def send(self, x: Array, chosen: Array, gates: Array) -> tuple[Array, ...]:
        """Return tokens, the numbers of choices among this device's experts (one beyond for others), and gates."""
        x, chosen, gates = (self.plan.gather(each) for each in (x, chosen, gates))
        if self.plan.owners:
            chosen = chosen - lax.axis_index(self.plan.owners).astype(chosen.dtype) * self.plan.experts
            chosen = jnp.where((chosen >= 0) & (chosen < self.plan.experts), chosen, self.plan.experts)
        return x, chosen, gates

    def work(self, sent: tuple[Array, ...]) -> tuple[Array, ...]:
        return (self.experts(*sent),)

    def receive(self, outputs: tuple[Array, ...]) -> Array:
        return self.plan.reduce(*outputs)


class _AllToAll(NamedTuple):
    """Exchange by all-to-all: rows go to the devices that have their experts, and outputs come back to be added."""

    experts: Callable[..., Array]
    plan: _ExchangePlan
    scale_inputs: bool

    def send(self, x: Array, chosen: Array, gates: Array) -> tuple[Any, ...]:
        """Return the arrived rows and their experts, weights, and the route back."""
        plan = self.plan
        x, chosen, gates = (plan.gather(each) for each in (x, chosen, gates))
        route = (_ragged_route if plan.ragged else _padded_route)(chosen, plan)
        rows = dispatch(x, route.destinations, route.sources)
        if self.scale_inputs:
            rows, gates = scale_rows(rows, gates, route.destinations, route.sources)
        # below zero: a row that receives nothing holds 0, which must not be the number of an expert
        owners = chosen.reshape(-1, 1) % plan.experts - plan.experts
        arrived = route.send(rows_at(owners, route.sources)) + plan.experts
        return route.send(rows), arrived, gates, route

    def work(self, sent: tuple[Any, ...]) -> tuple[Any, ...]:
        rows, arrived, gates, route = sent
        return self.experts(rows, arrived, None), gates, route

    def receive(self, outputs: tuple[Any, ...]) -> Array:
        out, gates, route = outputs
        out = combine(route.receive(out), gates, route.destinations, route.sources).astype(out.dtype)
        return self.plan.reduce(out)


class _Route(eqx.Module):
    """Route of choices: their places before they travel, and the offsets of ragged pieces.

    `send` and `receive` are each other's gradient. Without `offsets`, pieces of one size are swapped; else they are the
    arguments of `_ragged` for both directions.
    """

    destinations: Int32[Array, "tokens slots"]
    sources: Int32[Array, "places"]
    offsets: Any
    owners: tuple[str, ...] = eqx.field(static=True)
    room: int = eqx.field(static=True)

    def send(self, rows: Array) -> Array:
        if self.offsets is None:
            return lax.all_to_all(rows, self.owners, 0, 0, tiled=True)
        return _ragged(self.owners, (self.sources.size, self.room), rows, *self.offsets)

    def receive(self, rows: Array) -> Array:
        if self.offsets is None:
            return lax.all_to_all(rows, self.owners, 0, 0, tiled=True)
        return _ragged(self.owners, (self.room, self.sources.size), rows, *self.offsets[::-1])


def _padded_route(chosen: Int32[Array, "tokens slots"], plan: _ExchangePlan) -> _Route:
    """Plan pieces of one size: each device sends as many rows as any could need; most of them are empty."""
    room = len(chosen) * min(chosen.shape[1], plan.experts)
    destinations, sources = sort_by_expert(chosen, plan.experts * plan.parts)
    owner, counts = _count_by_part(chosen, plan)
    starts = jnp.cumsum(counts) - counts
    inside = jnp.arange(room, dtype=jnp.int32)[None]
    pieces = sources.at[starts[:, None] + inside].get(mode="fill", fill_value=chosen.size)
    sources = jnp.where(inside < counts[:, None], pieces, chosen.size).reshape(-1)
    destinations = jnp.where(owner < plan.parts, owner * room + destinations - rows_at(starts, owner), sources.size)
    return _Route(destinations, sources, None, plan.owners, sources.size)


def _ragged_route(chosen: Int32[Array, "tokens slots"], plan: _ExchangePlan) -> _Route:
    """Plan ragged pieces: each device sends the rows it has; there is room for all that could arrive."""
    destinations, sources = sort_by_expert(chosen, plan.experts * plan.parts)
    room = plan.parts * len(chosen) * min(chosen.shape[1], plan.experts)
    sent = lax.all_gather(_count_by_part(chosen, plan)[1], plan.owners)  # from whom, to whom
    me = lax.axis_index(plan.owners)
    leaves, lands = jnp.cumsum(sent, axis=1) - sent, jnp.cumsum(sent, axis=0) - sent
    outbound = leaves[me], sent[me], lands[me], sent[:, me]
    inbound = lands[:, me], sent[:, me], leaves[:, me], sent[me]
    return _Route(destinations, sources, (outbound, inbound), plan.owners, room)


def _count_by_part(chosen: Array, plan: _ExchangePlan) -> tuple[Int32[Array, "tokens slots"], Int32[Array, "parts"]]:
    """Return the part that has each chosen expert, one beyond the last for padding, and the number of its choices."""
    owner = jnp.minimum(chosen // plan.experts, plan.parts)
    mine = owner.reshape(-1, 1) == jnp.arange(plan.parts, dtype=owner.dtype)[None]
    return owner, jnp.sum(mine, axis=0, dtype=jnp.int32)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ragged(
    names: tuple[str, ...], sizes: tuple[int, int], rows: Array, outbound: tuple[Array, ...], inbound: tuple[Array, ...]
) -> Array:
    """Send `sizes[0]` rows to a buffer of `sizes[1]`; zeros where nothing arrives."""
    buffer = jnp.zeros((sizes[1], *rows.shape[1:]), rows.dtype)
    return lax.ragged_all_to_all(rows, buffer, *outbound, axis_name=names)


def _ragged_forward(names, sizes, rows, outbound, inbound):
    return _ragged(names, sizes, rows, outbound, inbound), (outbound, inbound)


def _ragged_backward(names, sizes, saved, gradient):
    outbound, inbound = saved
    return _ragged(names, sizes[::-1], gradient, inbound, outbound), None, None


_ragged.defvjp(_ragged_forward, _ragged_backward)
