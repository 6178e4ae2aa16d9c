"""Tokens travel to their experts and back: by gathers within a device, by collectives between devices.

On a mesh the experts are split over the devices of some axes. Two ways to bring tokens and experts together: all tokens
of these devices are gathered, each device adds up what its experts make of them, and the sums are added and scattered
(MaxText's ring of experts); or each row travels to the one device that has its expert, and back (GShard, Lepikhin et
al. 2020; without loss, as in MegaBlocks, Gale et al. 2022).
"""

import dataclasses
import functools
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
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, PyTree

from eqx_decoders.context import Execution
from eqx_decoders.numerics.matmul import cast_in_loop
from eqx_decoders.numerics.quantized_weight import QuantizedWeight, is_quantized
from eqx_decoders.remat import get_remat, save
from eqx_decoders.sharding.axes import axes, path_name
from eqx_decoders.sharding.rules import names_of


# --- within a device ---

# Tokens go to their places and come back by gathers alone: `places` says where each of a token's slots is, `sources`
# which slot is at each place, counted token by token. Either may point beyond its end: there is a row of zeros. XLA
# would make the gradient of a gather a scatter, which is slow everywhere; here each is the other's gradient.


def sort_by_expert(
    chosen: Int32[Array, "tokens slots"], experts: int, spare: int = 0
) -> tuple[Int32[Array, "tokens slots"], Int32[Array, "places"]]:
    """The place of each choice in the order of experts, then tokens, and the choice at each place.

    A token chooses an expert at most once; choices of `experts` or more are of none of them. There are places for
    `tokens * min(slots, experts)` choices and `spare` more, which stay empty. Where there is none: one beyond the
    last place, one beyond the last choice.
    """
    flat = chosen.reshape(-1)
    size = len(chosen) * min(chosen.shape[1], experts)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    places = jnp.where(flat < experts, jnp.argsort(order).astype(jnp.int32), size + spare)
    sources = jnp.where(flat[order] < experts, order, flat.size)[:size]
    places, sources = places.reshape(chosen.shape), jnp.pad(sources, (0, spare), constant_values=flat.size)
    return save(places, "moe_routing_maps"), save(sources, "moe_routing_maps")


@jax.custom_vjp
def dispatch(
    x: Float[Array, "tokens embed"], places: Int32[Array, "tokens slots"], sources: Int32[Array, "places"]
) -> Float[Array, "places embed"]:
    """A copy of each token at each of its places."""
    return _rows(x, sources // places.shape[1])


def _dispatch_backward(places, gradient):
    wide = np.promote_types(gradient.dtype, np.float32)
    return functools.reduce(jnp.add, _slots(gradient, places, wide)).astype(gradient.dtype), None, None


dispatch.defvjp(lambda x, places, sources: (dispatch(x, places, sources), places), _dispatch_backward)


@jax.custom_vjp
def combine(
    y: Float[Array, "places embed"],
    weights: Float[Array, "tokens slots"],
    places: Int32[Array, "tokens slots"],
    sources: Int32[Array, "places"],
) -> Float[Array, "tokens embed"]:
    """For each token the weighted sum of what is at its places, in the dtype of the weights."""
    pieces = _slots(y, places, weights.dtype)
    return functools.reduce(jnp.add, (piece * weights[:, slot, None] for slot, piece in enumerate(pieces)))


def _combine_forward(y, weights, places, sources):
    return combine(y, weights, places, sources), (y, weights, places, sources)


def _combine_backward(saved, gradient):
    y, weights, places, sources = saved
    to_y = _rows(gradient, sources // places.shape[1]) * _rows(weights.reshape(-1, 1), sources)
    pieces = _slots(y, places, weights.dtype)
    to_weights = jnp.stack([jnp.sum(gradient * piece, axis=1) for piece in pieces], axis=1)
    return to_y.astype(y.dtype), to_weights, None, None


combine.defvjp(_combine_forward, _combine_backward)


def scale_rows(
    rows: Float[Array, "places embed"],
    weights: Float[Array, "tokens slots"],
    places: Int32[Array, "tokens slots"],
    sources: Int32[Array, "places"],
) -> tuple[Float[Array, "places embed"], Float[Array, "tokens slots"]]:
    """Rows multiplied by their weights, and weights of one instead."""
    own = dispatch(weights.reshape(-1, 1), places.reshape(-1, 1), sources)
    return rows * own.astype(rows.dtype), (places < len(sources)).astype(weights.dtype)


def _slots(x: Array, places: Array, dtype: DTypeLike) -> list[Array]:
    """What stands at each token's first, second, … place. XLA fuses each with its use, but no sum over all of them."""
    return [_rows(x, places[:, slot]).astype(dtype) for slot in range(places.shape[1])]


def _rows(x: Array, index: Array) -> Array:
    """Rows of `x`; zeros for an index beyond the last one."""
    return x.at[index].get(mode="fill", fill_value=0)


# --- between devices ---

# What a device makes of tokens with some experts, `sum of gate * expert(x)`, and one expert for each row without gates.
# Experts are numbered from its first one; any other number is an expert of another device, or an empty row.
LocalExperts = Callable[[Any, Array, Array, Array | None], Array]
RESULTS = (("experts", "embed"), ("experts", "latent"))  # axes of biases of what experts give back


# Tokens, the experts that each has chosen, and with what weights.
Tokens = tuple[
    Float[Array, "batch length embed"], Int32[Array, "batch length slots"], Float[Array, "batch length slots"]
]


def run_on_mesh(
    own: LocalExperts, weights: PyTree, parts: Sequence[Tokens], execution: Execution, *, scale_inputs: bool = False
) -> list[Float[Array, "batch length embed"]]:
    """`own` on every device of the mesh, for tokens that are there and with experts that are there.

    Weights come as the layout splits them. A device gathers what it lacks, in the dtype of `x`, but for the experts and
    the hidden features of others. So it gets a part of a result, and parts are added up over the mesh axes that split
    experts or hidden features. Where such an axis splits tokens too, these are gathered over it first, and sums are
    scattered. With `Execution.expert_exchange="all_to_all"` rows travel over the experts' axes instead.

    No routing loses a token: there is room for the worst case. Where that is much, a device's tokens go in several
    rounds (`Execution.exchange_bytes`). `scale_inputs`: gates multiply what goes into experts.

    Of several parts of a batch, equal in size, one travels while the device works on another.
    """
    layout, words = execution.layout, axes(weights)
    (x, chosen, _), *_ = parts
    plan = _make_plan(execution, x.shape, chosen.shape[2], jax.tree.leaves(weights)[0].shape[0])

    def spec(path: Any, leaf: Any) -> Any:
        name = path_name(path)
        if isinstance(leaf, QuantizedWeight):
            return leaf.specs(layout.weight_spec(words[f"{name}.values"], leaf.shape, f"{name} of experts"))
        return layout.weight_spec(words[name], leaf.shape, f"{name} of experts")

    def ready(path: Any, leaf: Any) -> Any:
        name = path_name(path)
        if isinstance(leaf, QuantizedWeight):
            return _gather_quantized(leaf, layout.weight_spec(words[f"{name}.values"]), plan.split_axes)
        leaf = _gather_weight(leaf, layout.weight_spec(words[name]), plan.split_axes, x.dtype)
        # a bias of results counts once among those who add up their parts of a result
        return jnp.where(plan.adds_bias(), leaf, 0.0) if plan.hidden and words[name] in RESULTS else leaf

    def run(weights, parts):
        mine = partial(own, jax.tree_util.tree_map_with_path(ready, weights, is_leaf=is_quantized))
        way = (_AllToAll if plan.all_to_all else _Gathered)(mine, plan, scale_inputs)
        flat = [tuple(each.reshape(-1, each.shape[-1]) for each in part) for part in parts]
        (rows, slots, _), *_ = flat
        count = plan.rounds(len(rows), slots.shape[1], rows.shape[1] * rows.dtype.itemsize, execution.exchange_bytes)
        if count == 1:
            return [out.reshape(part[0].shape) for out, part in zip(_in_turn(way, flat), parts, strict=True)]
        remat = get_remat(execution.remat)
        one = lambda tokens: _in_turn(way, [tokens])[0]  # noqa: E731
        one = one if remat is None else jax.checkpoint(one, policy=remat.policy(), prevent_cse=False)
        cut = [jax.tree.map(lambda each: each.reshape(count, -1, each.shape[1]), part) for part in flat]
        return [lax.map(one, each).reshape(part[0].shape) for each, part in zip(cut, parts, strict=True)]

    specs = jax.tree_util.tree_map_with_path(spec, weights, is_leaf=is_quantized)
    mapped = layout.shard_map(run, (specs, plan.tokens), plan.tokens)
    return mapped(weights, list(parts))


def _in_turn(way: "_Gathered | _AllToAll", parts: Sequence[tuple[Array, Array, Array]]) -> list[Array]:
    """What experts make of a device's tokens, part by part.

    A part's rows are on their way while the part before is worked on, and so is what experts made of the one before
    that: `optimization_barrier` keeps XLA from sending all of them first and working on all of them then.
    """
    waiting, outs = list(parts[1:]), []
    sent, made = way.send(*parts[0]), None
    while True:
        later = None
        if waiting:
            # the next part's tokens leave when this one's are there, and work on these begins when those are ready
            sent, tokens = lax.optimization_barrier((sent, waiting.pop(0)))
            later = way.send(*tokens)
        if made is not None:
            sent, made = lax.optimization_barrier((sent, made))
            outs.append(way.receive(made))
        made = way.work(sent)
        if later is None:
            return [*outs, way.receive(made)]
        sent = later


@dataclasses.dataclass(frozen=True)
class _ExchangePlan:
    """How experts run on a mesh; names are those of mesh axes.

    **Arguments:**

    - `tokens`: how `batch length` is split.
    - `owners`, `hidden`: what splits experts and their hidden features.
    - `shared`: over which tokens are gathered and sums scattered.
    - `summed`: over which parts of results are added up, tokens being the same there.
    - `all_to_all`: whether rows travel over `owners`.
    - `ragged`: whether they travel as they are, or in pieces of one size.
    - `experts`, `parts`: how many experts a device has, and how many devices have different ones.
    - `sharing`: how many devices gather their tokens together.
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
        """In how many rounds a device's tokens, of `row` bytes each, meet the experts: the least number that divides
        them so that what it gathers or may get fits `most` bytes."""
        sharing = self.parts * min(slots, self.experts) if self.all_to_all else self.sharing
        wanted = min(tokens, -(-tokens * sharing * row // most))
        return next(count for count in range(max(1, wanted), tokens + 1) if tokens % count == 0) if tokens else 1

    def adds_bias(self) -> Array:
        """Whether this device is the first of those that have other hidden features of the same experts."""
        return lax.axis_index(self.hidden) == 0

    def gather(self, rows: Array) -> Array:
        """Those of all devices that need them."""
        return lax.all_gather(rows, self.shared, tiled=True) if self.shared else rows

    def reduce(self, rows: Array) -> Array:
        """Sums of the parts that devices have; each gets those of its own tokens."""
        rows = lax.psum_scatter(rows, self.shared, tiled=True) if self.shared else rows
        return _psum(rows, self.summed) if self.summed else rows


def _make_plan(execution: Execution, shape: tuple[int, ...], slots: int, experts: int) -> _ExchangePlan:
    layout = execution.layout
    tokens = layout.activation_spec("batch length", shape[:2])
    splitting = sum(map(names_of, tokens), ())
    owners, _, mlp = map(names_of, layout.weight_spec("experts embed mlp"))
    (stays,) = map(names_of, layout.activation_spec("mlp"))
    hidden = tuple(name for name in mlp if name in stays and name not in owners)
    parts, ragged = math.prod(layout.sizes[name] for name in owners), layout.platform == "tpu"
    routed = bool(owners) and set(owners) <= set(splitting) and sends_rows(execution, slots, parts, ragged)
    shared = tuple(name for name in owners + hidden if name in splitting and not (routed and name in owners))
    summed = tuple(name for name in owners + hidden if name not in splitting)
    sharing = math.prod(layout.sizes[name] for name in shared)
    return _ExchangePlan(tokens, owners, hidden, shared, summed, routed, ragged, experts // parts, parts, sharing)


def sends_rows(execution: Execution, slots: int, parts: int, ragged: bool) -> bool:
    """Whether rows travel. A piece of one size has room for all tokens, so gathering these never moves more; rows as
    they are number `slots` a token, against one for each of the other parts: they must be half of that at most, since a
    torus gathers at the full rate of its links but not so when all send to all."""
    chosen = execution.expert_exchange
    return chosen == "all_to_all" or (chosen == "auto" and ragged and 2 * slots <= parts)


def _gather_quantized(weight: QuantizedWeight, spec: PartitionSpec, kept: tuple[str, ...]) -> QuantizedWeight:
    """`_gather_weight` of one in few bits, which travel as they are."""
    weight, beside = weight.with_own_scales(spec)

    def whole(x: Array | None, spec: PartitionSpec) -> Array | None:
        return None if x is None else _gather_weight(x, spec, kept, None)

    parts = dict(scales=whole(weight.scales, beside), zeros=whole(weight.zeros, beside))
    return dataclasses.replace(weight, values=whole(weight.values, spec), **parts)


def _gather_weight(leaf: Array, spec: PartitionSpec, kept: tuple[str, ...], dtype: np.dtype | None) -> Array:
    """A weight with all of its dimensions whole but for the axes in `kept`; it is cast first, unless to None."""
    for dimension, names in enumerate(map(names_of, spec)):
        missing = tuple(name for name in names if name not in kept)
        if missing:
            leaf = leaf if dtype is None else cast_in_loop(leaf, dtype)
            leaf = lax.all_gather(leaf, missing, axis=dimension, tiled=True)
    return leaf


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _psum(x: Array, names: tuple[str, ...]) -> Array:
    """The sum over mesh axes. What comes back is the same on all their devices: no need to add it up again."""
    return lax.psum(x, names)


_psum.defvjp(lambda x, names: (_psum(x, names), None), lambda names, _, gradient: (gradient * lax.psum(1, names),))


class _Gathered(NamedTuple):
    """Each device gets the tokens of all that share experts, and adds up what its own make of them."""

    own: Callable[..., Array]
    plan: _ExchangePlan
    scale_inputs: bool

    def send(self, x: Array, chosen: Array, gates: Array) -> tuple[Array, ...]:
        """Tokens, the number of each choice among a device's experts (one beyond the last for others), and weights."""
        x, chosen, gates = (self.plan.gather(each) for each in (x, chosen, gates))
        if self.plan.owners:
            chosen = chosen - lax.axis_index(self.plan.owners).astype(chosen.dtype) * self.plan.experts
            chosen = jnp.where((chosen >= 0) & (chosen < self.plan.experts), chosen, self.plan.experts)
        return x, chosen, gates

    def work(self, sent: tuple[Array, ...]) -> tuple[Array, ...]:
        return (self.own(*sent),)

    def receive(self, made: tuple[Array, ...]) -> Array:
        return self.plan.reduce(*made)


class _AllToAll(NamedTuple):
    """Rows go to the devices that have their experts, and what these make of them comes back to be added up."""

    own: Callable[..., Array]
    plan: _ExchangePlan
    scale_inputs: bool

    def send(self, x: Array, chosen: Array, gates: Array) -> tuple[Any, ...]:
        """Rows that have arrived and their experts, weights, and the way back."""
        plan = self.plan
        x, chosen, gates = (plan.gather(each) for each in (x, chosen, gates))
        route = (_ragged_route if plan.ragged else _padded_route)(chosen, plan)
        rows = dispatch(x, route.places, route.sources)
        if self.scale_inputs:
            rows, gates = scale_rows(rows, gates, route.places, route.sources)
        # below zero: a row that receives nothing holds 0, which must not be the number of an expert
        owners = chosen.reshape(-1, 1) % plan.experts - plan.experts
        arrived = route.send(_rows(owners, route.sources)) + plan.experts
        return route.send(rows), arrived, gates, route

    def work(self, sent: tuple[Any, ...]) -> tuple[Any, ...]:
        rows, arrived, gates, route = sent
        return self.own(rows, arrived, None), gates, route

    def receive(self, made: tuple[Any, ...]) -> Array:
        out, gates, route = made
        out = combine(route.receive(out), gates, route.places, route.sources).astype(out.dtype)
        return self.plan.reduce(out)


class _Route(eqx.Module):
    """Where choices stand before they travel, and the way `send` and `receive`; each is the other's gradient.

    Without a way, pieces of one size are swapped; else it is what `_ragged` needs for both directions.
    """

    places: Int32[Array, "tokens slots"]
    sources: Int32[Array, "places"]
    ways: Any
    owners: tuple[str, ...] = eqx.field(static=True)
    room: int = eqx.field(static=True)

    def send(self, rows: Array) -> Array:
        if self.ways is None:
            return lax.all_to_all(rows, self.owners, 0, 0, tiled=True)
        return _ragged(self.owners, (self.sources.size, self.room), rows, *self.ways)

    def receive(self, rows: Array) -> Array:
        if self.ways is None:
            return lax.all_to_all(rows, self.owners, 0, 0, tiled=True)
        return _ragged(self.owners, (self.room, self.sources.size), rows, *self.ways[::-1])


def _padded_route(chosen: Int32[Array, "tokens slots"], plan: _ExchangePlan) -> _Route:
    """Each device sends as many rows to each other as it could have for it at most; most of them are empty."""
    room = len(chosen) * min(chosen.shape[1], plan.experts)
    places, sources = sort_by_expert(chosen, plan.experts * plan.parts)
    owner, counts = _count_by_part(chosen, plan)
    starts = jnp.cumsum(counts) - counts
    inside = jnp.arange(room, dtype=jnp.int32)[None]
    here = sources.at[starts[:, None] + inside].get(mode="fill", fill_value=chosen.size)
    sources = jnp.where(inside < counts[:, None], here, chosen.size).reshape(-1)
    places = jnp.where(owner < plan.parts, owner * room + places - _rows(starts, owner), sources.size)
    return _Route(places, sources, None, plan.owners, sources.size)


def _ragged_route(chosen: Int32[Array, "tokens slots"], plan: _ExchangePlan) -> _Route:
    """Each device sends the rows it has; there is room for all that could arrive."""
    places, sources = sort_by_expert(chosen, plan.experts * plan.parts)
    room = plan.parts * len(chosen) * min(chosen.shape[1], plan.experts)
    sent = lax.all_gather(_count_by_part(chosen, plan)[1], plan.owners)  # from whom, to whom
    me = lax.axis_index(plan.owners)
    leaves, lands = jnp.cumsum(sent, axis=1) - sent, jnp.cumsum(sent, axis=0) - sent
    there = leaves[me], sent[me], lands[me], sent[:, me]
    back = lands[:, me], sent[:, me], leaves[:, me], sent[me]
    return _Route(places, sources, (there, back), plan.owners, room)


def _count_by_part(chosen: Array, plan: _ExchangePlan) -> tuple[Int32[Array, "tokens slots"], Int32[Array, "parts"]]:
    """The part that has each chosen expert, one beyond the last for padding, and how many choices it gets."""
    owner = jnp.minimum(chosen // plan.experts, plan.parts)
    mine = owner.reshape(-1, 1) == jnp.arange(plan.parts, dtype=owner.dtype)[None]
    return owner, jnp.sum(mine, axis=0, dtype=jnp.int32)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ragged(
    names: tuple[str, ...], sizes: tuple[int, int], rows: Array, there: tuple[Array, ...], back: tuple[Array, ...]
) -> Array:
    """`sizes[0]` rows to a buffer of `sizes[1]`; zeros where nothing arrives."""
    buffer = jnp.zeros((sizes[1], *rows.shape[1:]), rows.dtype)
    return lax.ragged_all_to_all(rows, buffer, *there, axis_name=names)


def _ragged_forward(names, sizes, rows, there, back):
    return _ragged(names, sizes, rows, there, back), (there, back)


def _ragged_backward(names, sizes, saved, gradient):
    there, back = saved
    return _ragged(names, sizes[::-1], gradient, back, there), None, None


_ragged.defvjp(_ragged_forward, _ragged_backward)
