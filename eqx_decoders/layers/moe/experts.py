"""Experts: many gated MLPs, of which each token uses a few (Shazeer et al. 2017).

Three forms compute the same: all experts on all tokens, the oracle; rows sorted by expert, without loss; and as many
places as a capacity allows, where tokens without a place are dropped.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import FiniteFloat, NonNegativeInt, PositiveFloat, PositiveInt, check
from eqx_decoders.layers.base import BranchInputs, BranchResult, ChannelConfig
from eqx_decoders.layers.mlp import ACTIVATIONS, MLP, ActivationName, MLPConfig, check_gating, join_gate
from eqx_decoders.layers.moe.chunked_sum import split_trained, sum_of_pieces
from eqx_decoders.layers.moe.dispatch import run_on_mesh
from eqx_decoders.layers.moe.router import Router, RouterConfig, RoutingStats
from eqx_decoders.layers.moe.sorted_rows import assign_places, combine, dispatch, scale_rows, sort_by_expert
from eqx_decoders.layers.norm import ExpertNorms, NormConfig
from eqx_decoders.numerics.einsum import add_bias, as_weight, grouped_products
from eqx_decoders.numerics.grouped_matmul import GroupedForm, choose_form
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.numerics.low_rank import settled
from eqx_decoders.remat import save


# So few tokens (a decoding step's) go through all experts on a TPU: reading the weights takes longer than multiplying,
# and the grouped product would first copy the weights of all experts of a layer out of the stack.
FEW_TOKENS = 128
CHOICES = "experts"  # the input of a layer with experts that chooses them in place of its router (see `Router`)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig(ChannelConfig):
    """Configuration of `sum over chosen experts e of weight_e * down_e(act(gate_e x) * (up_e x + up_offset))`.

    GPT-OSS: `activation="quick_gelu"`, `up_offset=1.0`, `limit=7.0`, `bias`.

    **Arguments:**

    - `num_experts`: number of experts.
    - `num_experts_per_token`: number of experts that each token uses.
    - `mlp_dim`: hidden features of one expert.
    - `router`: configuration of their choice.
    - `activation`, `activation_scale`: as in `MLPConfig`.
    - `gated`: whether a second input projection is multiplied in; without it an expert is `down_e(act(up_e x))`.
    - `latent_dim`: features that all experts read and write, between a projection from the stream and one back to it;
        router and shared MLP read the stream (Nemotron 3). None: experts read the stream.
    - `up_offset`: added to the up projection.
    - `limit`: gate projections are clipped above it, up projections beyond it on both sides; None for no limit.
    - `bias`: whether all projections have a bias.
    - `out_bias`: whether the sum over the experts has one (JetMoe).
    - `num_zero_experts`: further experts of the router, which return what they read (LongCat-Flash).
    - `shared`: an MLP that every token uses, added to the sum; None for none.
    - `shortcut`: name by which a later block (its `shortcut_from`) adds what the chosen experts return to the stream;
        the layer returns the output of the shared MLP alone (LongCat-Flash). None: it returns both.
    - `shared_gate`: the shared MLP is multiplied by `sigmoid(gate x)`, one number a token (Qwen3-Next).
    - `norms`: shared and other experts have norms of their own before and after them, and the router reads what none of
        these has normalized (Gemma 4): give the block no norm before such a layer. None for none; needs `shared`.
    - `capacity_factor`: of a sequence of S tokens an expert takes `int(max(ceil(S k / E) * factor, factor))`, the
        earliest ones; the others are dropped. None for no limit. If `Execution.experts` is set to "dense" or
        "dropless", the limit is ignored: a model that was trained with a limit can be served without it.
    """

    takes: ClassVar[tuple[str, ...]] = (CHOICES,)
    num_experts: PositiveInt
    num_experts_per_token: PositiveInt
    mlp_dim: PositiveInt
    router: RouterConfig = RouterConfig()
    activation: ActivationName = "silu"
    activation_scale: PositiveFloat = 1.0
    gated: bool = True
    latent_dim: PositiveInt | None = None
    up_offset: FiniteFloat = 0.0
    limit: PositiveFloat | None = None
    bias: bool = False
    out_bias: bool = False
    num_zero_experts: NonNegativeInt = 0
    shared: MLPConfig | None = None
    shared_gate: bool = False
    shortcut: str | None = None
    norms: NormConfig | None = None
    capacity_factor: PositiveFloat | None = None

    @property
    def shares_as(self) -> str | None:
        """Name by which `BlockConfig.shortcut_from` of a later block refers to the output."""
        return self.shortcut

    def __post_init__(self):
        super().__post_init__()
        chosen, rule = self.num_experts_per_token, f"must be at most num_experts={self.num_experts}"
        check(chosen <= self.num_choices, f"ExpertsConfig.num_experts_per_token={chosen} {rule}.")
        self.router.check_experts(self.num_choices, chosen)
        check_gating(self, "ExpertsConfig", self.gated)
        for field in ("shared_gate", "norms", "shortcut"):
            idle, value = self.shared is None, getattr(self, field)
            check(not (idle and value), f"ExpertsConfig.{field}={value} needs an MLPConfig as shared.")

    @property
    def num_choices(self) -> int:
        """Experts of the router."""
        return self.num_experts + self.num_zero_experts

    @property
    def draws(self) -> bool:
        """True if routing or dropout draws random numbers."""
        return self.router.random or (self.shared is not None and self.shared.dropout > 0)

    def capacity(self, length: int) -> int:
        """Return the number of tokens of a sequence that an expert takes."""
        assert self.capacity_factor is not None
        mean = -(-length * self.num_experts_per_token // self.num_experts)
        return int(max(mean * self.capacity_factor, self.capacity_factor))

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "Experts":
        keys = jax.random.split(key, 6)
        experts, mlp, inner = self.num_experts, self.mlp_dim, self.latent_dim or embed_dim

        def zeros(size, wanted=True):
            return jnp.zeros((experts, size)) if self.bias and wanted else None

        def outer(number, rows, columns):
            return fan_in(jax.random.fold_in(key, number), (rows, columns), jnp.float32, rows)

        # variances by what one expert contracts; MaxText also counts the experts, and starts with far smaller ones
        return (Experts if self.latent_dim is None else LatentExperts)(
            router=self.router.build(embed_dim, self.num_choices, self.num_experts_per_token, key=keys[0]),
            latent_in=None if self.latent_dim is None else outer(6, embed_dim, inner),
            latent_out=None if self.latent_dim is None else outer(7, inner, embed_dim),
            gate=fan_in(keys[1], (experts, inner, mlp), jnp.float32, inner) if self.gated else None,
            up=fan_in(keys[2], (experts, inner, mlp), jnp.float32, inner),
            down=fan_in(keys[3], (experts, mlp, inner), jnp.float32, mlp),
            gate_bias=zeros(mlp, self.gated),
            up_bias=zeros(mlp),
            down_bias=zeros(inner),
            out_bias=jnp.zeros((embed_dim,)) if self.out_bias else None,
            shared=None if self.shared is None else self.shared.build(embed_dim, key=keys[4]),
            shared_gate=fan_in(keys[5], (embed_dim,), jnp.float32, embed_dim) if self.shared_gate else None,
            norms=None if self.norms is None else ExpertNorms(*(self.norms.build(embed_dim) for _ in range(4))),
            config=self,
        )


class Experts(eqx.Module):
    """Experts `sum over chosen experts e of weight_e * down_e(act(gate_e x) * (up_e x + up_offset))`, plus shared ones.

    `Execution.experts` selects the form of computation.
    """

    router: Router
    latent_in: Float[Array, "embed latent"] | None
    latent_out: Float[Array, "latent embed"] | None
    gate: Float[Array, "experts embed mlp"] | None
    up: Float[Array, "experts embed mlp"]
    down: Float[Array, "experts mlp embed"]
    gate_bias: Float[Array, "experts mlp"] | None
    up_bias: Float[Array, "experts mlp"] | None
    down_bias: Float[Array, "experts embed"] | None
    out_bias: Float[Array, "embed"] | None
    shared: MLP | None
    shared_gate: Float[Array, "embed"] | None
    norms: ExpertNorms | None
    config: ExpertsConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "batch length embed"], RoutingStats]:
        """Return the layer's output and routing statistics. The key is for random routing and dropout."""
        result = self.branch(x, ctx, None, key)
        return result.out, result.stats["routing"]

    def branch(self, x: Array, ctx: ForwardContext, past: None, key: PRNGKeyArray | None) -> BranchResult:
        """Call the layer for a block."""
        inputs = BranchInputs(x, ctx, past, key)
        (result,) = self.finish([inputs], [self.begin(inputs)])
        return result

    def begin(self, inputs: BranchInputs) -> "tuple[Tokens, RoutingStats]":
        """Route the tokens of a part of the batch."""
        x, ctx, _, key = inputs
        key = None if key is None else jax.random.split(key)[0]
        indices, weights, stats = self.router(x, ctx, key=key, replayed=ctx.layer_inputs.get(CHOICES))
        return (self._into_experts(x, ctx), indices, weights), stats

    def finish(
        self, parts: Sequence[BranchInputs], prepared: "Sequence[tuple[Tokens, RoutingStats]]"
    ) -> list[BranchResult]:
        """Run the experts on each part: while tokens of one travel, they work on another."""
        tokens, norms = [tokens for tokens, _ in prepared], self.norms
        (rows, _, _), *_ = tokens
        outputs = self._implementation(parts[0].ctx, rows.shape[0] * rows.shape[1])(tokens, parts[0].ctx)
        results = []
        for (x, ctx, _, key), (out, dropped), (routed, routing) in zip(parts, outputs, prepared, strict=True):
            out = add_bias(self._out_of_experts(self._plus_unchanged(out, *routed), ctx), self.out_bias)
            if norms is not None:
                out, x = norms.post_routed(out), norms.pre_shared(x)
            lent = None
            if self.shared is not None:
                shared = self._shared(self.shared, x, ctx, None if key is None else jax.random.split(key)[1])
                shared = shared if norms is None else norms.post_shared(shared)
                out, lent = (out + shared, None) if self.config.shortcut is None else (shared, out)
            stats: dict[str, Any] = {"routing": dataclasses.replace(routing, dropped=dropped)}
            if ctx.execution.expert_choices:
                stats["choices"] = routed[1]
            results.append(BranchResult(ctx.constrain(out, "batch length embed"), stats=stats, lent=lent))
        return results

    def _into_experts(self, x: Array, ctx: ForwardContext) -> Array:
        """Return what the chosen experts read: the stream, normalized or projected to the latent."""
        x = x if self.norms is None else self.norms.pre_routed(x)
        if self.latent_in is None:
            return x
        return ctx.einsum("batch length embed, embed latent -> batch length latent", x, self.latent_in)

    def _plus_unchanged(self, out: Array, x: Array, indices: Array, weights: Array) -> Array:
        """Add what the zero experts return to the sum over the others."""
        if self.config.num_zero_experts == 0:
            return out
        shares = jnp.sum(jnp.where(indices >= self.config.num_experts, weights, 0.0), axis=-1, keepdims=True)
        return out + (shares * x.astype(weights.dtype)).astype(out.dtype)

    def _out_of_experts(self, x: Array, ctx: ForwardContext) -> Array:
        """Return the output of the chosen experts to the stream."""
        if self.latent_out is None:
            return x
        return ctx.einsum("batch length latent, latent embed -> batch length embed", x, self.latent_out)

    def _implementation(
        self, ctx: ForwardContext, tokens: int
    ) -> "Callable[[list[Tokens], ForwardContext], list[Made]]":
        """Choose a form of computation: a function from parts of the batch to outputs and counts of dropped choices."""
        chosen, limited = ctx.execution.experts, self.config.capacity_factor is not None
        if chosen == "auto":
            few = ctx.execution.layout.backend.few_token_experts and tokens <= FEW_TOKENS and self._plain_products()
            chosen = "capacity" if limited else "few" if few else "dropless"
        check(limited or chosen != "capacity", "Execution.experts='capacity' needs ExpertsConfig.capacity_factor.")
        if chosen == "dropless":
            return self._dropless
        form = {"dense": self._dense, "few": self._few, "capacity": self._capacity}[chosen]
        return lambda parts, ctx: [form(*part, ctx) for part in parts]

    def _plain_products(self) -> bool:
        """Return whether no weight has a low-rank pair, or is rounded for each expert."""
        weights = (self.gate, self.up, self.down)
        return all(as_weight(weight).plain_product for weight in weights if weight is not None)

    def _shared(self, mlp: MLP, x: Array, ctx: ForwardContext, key: PRNGKeyArray | None) -> Array:
        out = mlp(x, ctx, key=key)
        if self.shared_gate is None:
            return out
        gate = ctx.einsum("batch length embed, embed -> batch length", x, self.shared_gate)
        return out * jax.nn.sigmoid(gate)[..., None]

    def _hidden(self, gate: Array | None, up: Array) -> Array:
        """Compute the input of the down projection."""
        act = ACTIVATIONS[self.config.activation]
        if gate is None:
            return join_gate(self.config, act, None, save(save(up, "mlpwi_0"), "moe_mlpwi_0"))
        gate = save(save(gate, "mlpwi_0"), "moe_mlpwi_0")
        return join_gate(self.config, act, gate, save(save(up, "mlpwi_1"), "moe_mlpwi_1"))

    # --- all experts on all tokens ---

    def _dense(self, x: Array, indices: Array, weights: Array, ctx: ForwardContext) -> tuple[Array, Array]:
        """Send every token through every expert; experts that it did not choose have weight 0."""
        experts = self.config.num_experts
        chosen = indices[..., None] == jnp.arange(experts, dtype=indices.dtype).reshape(1, 1, 1, -1)
        matrix = jnp.sum(jnp.where(chosen, weights[..., None], 0.0), axis=2).transpose(2, 0, 1)[..., None]
        inputs = ctx.constrain(jnp.broadcast_to(x[None], (experts, *x.shape)), "experts batch length embed")
        if self.config.router.input_scaling:
            inputs = inputs * matrix.astype(x.dtype)
            matrix = jnp.any(chosen, axis=2).transpose(2, 0, 1)[..., None].astype(weights.dtype)
        out = ctx.constrain(self._batched_mlp(inputs, ctx), "experts batch length embed").astype(weights.dtype) * matrix
        return jnp.sum(out, axis=0).astype(x.dtype), jnp.zeros((), jnp.float32)

    def _few(self, x: Array, indices: Array, weights: Array, ctx: ForwardContext) -> tuple[Array, Array]:
        """Run `_dense` on a few tokens, without a copy of tokens or outputs for each expert."""
        chosen = indices[..., None] == jnp.arange(self.config.num_experts, dtype=indices.dtype).reshape(1, 1, 1, -1)
        shares = jnp.sum(jnp.where(chosen, weights[..., None], 0.0), axis=2).astype(x.dtype)
        into = "batch length embed, experts embed mlp -> batch length experts mlp"
        scales = shares[..., None] if self.config.router.input_scaling else None

        def projected(weight: Array, bias: Array | None) -> Array:
            y = ctx.constrain(ctx.einsum(into, x, weight), "batch length experts mlp")
            y = y if scales is None else y * scales
            return y if bias is None else y + bias.astype(y.dtype)[None, None]

        gate = None if self.gate is None else projected(self.gate, self.gate_bias)
        hidden = self._hidden(gate, projected(self.up, self.up_bias))
        if scales is not None:
            shares = jnp.any(chosen, axis=2).astype(x.dtype)
        out_of = "batch length experts mlp, experts mlp embed -> batch length embed"
        out = ctx.einsum(out_of, hidden * shares[..., None], self.down)
        if self.down_bias is not None:
            out += jnp.einsum("ble,ed->bld", shares, self.down_bias.astype(x.dtype))
        return ctx.constrain(out, "batch length embed"), jnp.zeros((), jnp.float32)

    def _batched_mlp(
        self, x: Float[Array, "experts batch places embed"], ctx: ForwardContext
    ) -> Float[Array, "experts batch places embed"]:
        """Run each expert on tokens of its own."""
        into = "experts batch places embed, experts embed mlp -> experts batch places mlp"
        out_of = "experts batch places mlp, experts mlp embed -> experts batch places embed"

        def plus(y, bias):
            return y if bias is None else y + bias.astype(y.dtype)[:, None, None]

        gate = None if self.gate is None else plus(ctx.einsum(into, x, self.gate), self.gate_bias)
        up = plus(ctx.einsum(into, x, self.up), self.up_bias)
        out = plus(ctx.einsum(out_of, self._hidden(gate, up), self.down), self.down_bias)
        return save(save(out, "mlpwo"), "moe_mlpwo")

    # --- sorted rows ---

    def _dropless(self, parts: "list[Tokens]", ctx: ForwardContext) -> "list[Made]":
        """Sort rows by expert, multiply by each expert, and return them to their tokens: each device for itself."""
        none, whole = jnp.zeros((), jnp.float32), settled(self)  # columns of a device's part have other lengths
        if ctx.execution.layout.single:
            flat = [[each.reshape(-1, each.shape[-1]) for each in part] for part in parts]
            outputs = [whole._local_experts(x, chosen, weights, ctx) for x, chosen, weights in flat]
            return [(out.reshape(part[0].shape), none) for out, part in zip(outputs, parts, strict=True)]
        rest = ("router", "shared", "shared_gate", "norms", "latent_in", "latent_out", "out_bias")
        of_rest, nothing = (lambda m: [getattr(m, name) for name in rest]), [None] * len(rest)
        alone = eqx.tree_at(of_rest, whole, nothing, is_leaf=lambda m: m is None)
        run_local, scale_inputs = partial(Experts._local_experts, ctx=ctx), self.config.router.input_scaling
        outs = run_on_mesh(run_local, alone, parts, ctx.execution, scale_inputs=scale_inputs)
        return [(out, none) for out in outs]

    def _local_experts(
        self,
        x: Float[Array, "tokens embed"],
        chosen: Int32[Array, "tokens slots"],
        weights: Float[Array, "tokens slots"] | None,
        ctx: ForwardContext,
    ) -> Float[Array, "tokens embed"]:
        """Compute the weighted sum over chosen experts of this device; without weights each token has one expert.

        There may be rows for all choices, but usually there are as many as this device's share of the experts: rows are
        worked on in pieces of a quarter more, as many as it takes.
        """
        experts, *features = as_weight(self.down).shape
        layout, room = ctx.execution.layout, len(chosen) * min(chosen.shape[1], experts)
        largest = max(room * max(features), experts * math.prod(features))
        sizes = dict(rows=chosen.size, groups=self.config.num_experts, largest=largest)
        form = choose_form(layout.backend, layout.device, x.dtype, **sizes)
        spare = form.block
        piece = -(-5 * chosen.size * experts // (4 * self.config.num_experts * 8)) * 8
        if weights is None or 2 * piece > room:
            destinations, sources = sort_by_expert(chosen, experts, spare)
            return self._sorted_experts(x, chosen, weights, destinations, sources, form, ctx)
        destinations, sources = sort_by_expert(chosen, experts)
        count = jnp.sum(sources < chosen.size, dtype=jnp.int32)
        sources = jnp.pad(sources, (0, -len(sources) % piece), constant_values=chosen.size)
        arrays, frozen, static = split_trained(self)

        def run(index: Array, inputs: Any, indices: Any) -> Array:
            (arrays, x, weights), (frozen, chosen, destinations, sources, count) = inputs, indices
            offset = destinations - index * piece
            destinations = jnp.where((offset >= 0) & (offset < piece) & (destinations < count), offset, piece + spare)
            sources = jax.lax.dynamic_slice_in_dim(sources, index * piece, piece)
            sources = jnp.pad(sources, (0, spare), constant_values=chosen.size)
            experts_of_piece = eqx.combine(arrays, frozen, static)
            return experts_of_piece._sorted_experts(x, chosen, weights, destinations, sources, form, ctx)

        # nothing that is traced may be in a function's closure if it has a gradient of its own
        return sum_of_pieces(
            run, -(-count // piece), (arrays, x, weights), (frozen, chosen, destinations, sources, count)
        )

    def _sorted_experts(
        self,
        x: Float[Array, "tokens embed"],
        chosen: Int32[Array, "tokens slots"],
        weights: Float[Array, "tokens slots"] | None,
        destinations: Int32[Array, "tokens slots"],
        sources: Int32[Array, "places"],
        form: GroupedForm,
        ctx: ForwardContext,
    ) -> Float[Array, "tokens embed"]:
        """Run `_local_experts` for the choices that have a place."""
        experts = len(jax.tree.leaves(self.down)[0])
        rows = dispatch(x, destinations, sources)
        if self.config.router.input_scaling and weights is not None:
            rows, weights = scale_rows(rows, weights, destinations, sources)
        # the number after the last expert marks an empty row
        owners = chosen.reshape(-1).at[sources].get(mode="fill", fill_value=experts)
        mine = owners[:, None] == jnp.arange(experts, dtype=owners.dtype)[None]
        out = self._grouped_mlp(save(rows, "moe_x_sorted"), mine, form, ctx)
        if weights is None:
            return dispatch(out, sources[:, None], destinations[:, 0])
        return combine(out, weights, destinations, sources).astype(x.dtype)

    def _grouped_mlp(
        self,
        rows: Float[Array, "rows embed"],
        mine: Bool[Array, "rows experts"],
        form: GroupedForm,
        ctx: ForwardContext,
    ) -> Float[Array, "rows embed"]:
        """Send each row through its expert; rows are sorted by expert."""
        product = partial(grouped_products, counts=jnp.sum(mine, axis=0, dtype=jnp.int32), form=form)

        def plus(y, bias):
            # as a product: its gradient adds rows up without a scatter
            pattern = "rows experts, experts features -> rows features"
            return y if bias is None else y + ctx.einsum(pattern, mine.astype(y.dtype), bias)

        if self.gate is None:
            gate, up = None, product(rows, (self.up,))[0]
        else:
            gate, up = product(rows, (self.gate, self.up))
            gate = plus(gate, self.gate_bias)
        hidden = self._hidden(gate, plus(up, self.up_bias))
        out = plus(product(hidden, (self.down,))[0], self.down_bias)
        return save(save(out, "mlpwo"), "moe_mlpwo")

    # --- places for a few ---

    def _capacity(self, x: Array, indices: Array, weights: Array, ctx: ForwardContext) -> tuple[Array, Array]:
        """Give each expert so many places in a sequence, in the order of tokens, and of slots within one."""
        experts, room = self.config.num_experts, self.config.capacity(x.shape[1])
        routed = jnp.sum(indices < experts, dtype=jnp.float32)
        if room == 0:
            return jnp.zeros_like(x), routed
        destinations, sources = jax.vmap(partial(assign_places, experts=experts, room=room))(indices)
        destinations, sources = (save(index, "moe_routing_maps") for index in (destinations, sources))
        rows = jax.vmap(dispatch)(x, destinations, sources)
        if self.config.router.input_scaling:
            rows, weights = jax.vmap(scale_rows)(rows, weights, destinations, sources)
        # found and collected where the tokens are; between the two, all-to-all
        rows = ctx.constrain(save(rows, "moe_x_sorted"), "batch places embed")
        rows = rows.reshape(len(x), experts, room, -1).transpose(1, 0, 2, 3)
        out = self._batched_mlp(ctx.constrain(rows, "experts batch places embed"), ctx)
        out = ctx.constrain(out, "experts batch places embed").transpose(1, 0, 2, 3).reshape(len(x), experts * room, -1)
        out = jax.vmap(combine)(ctx.constrain(out, "batch places embed"), weights, destinations, sources).astype(
            x.dtype
        )
        return out, routed - jnp.sum(destinations < experts * room, dtype=jnp.float32)


# Tokens, the experts that each chose, and their weights; and outputs, and the number of dropped choices.
Tokens = tuple[Array, Array, Array]
Made = tuple[Array, Array]


class LatentExperts(Experts):
    """Experts that read and write a latent, between two projections that all of them share."""

    gate: Float[Array, "experts latent mlp"] | None
    up: Float[Array, "experts latent mlp"]
    down: Float[Array, "experts mlp latent"]
    down_bias: Float[Array, "experts latent"] | None
