"""Mixture of experts: a router selects a few of many gated MLPs for each token (Shazeer et al. 2017).

There are four algorithms for the same function. `Execution.experts` selects one of them:

- "dense" runs all experts on all tokens, with a copy of the tokens for each expert.
- "dropless" sorts tokens by expert and drops none.
- "capacity" gives each expert a fixed number of tokens and drops the others.
- "auto" is "capacity" for a layer with a capacity factor, and otherwise "dropless". On TPUs, for a few tokens and
  weights that are plain or quantized arrays, it is one product over all experts instead.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import FiniteFloat, NonNegativeInt, PositiveFloat, PositiveInt, check
from eqx_decoders.layers.base import BranchInputs, BranchResult, ChannelConfig
from eqx_decoders.layers.mlp import ACTIVATIONS, MLP, ActivationName, MLPConfig, check_gating, join_gate
from eqx_decoders.layers.moe.chunked_sum import partition_trained, sum_chunks
from eqx_decoders.layers.moe.dispatch import RoutedTokens, run_on_mesh
from eqx_decoders.layers.moe.router import Router, RouterConfig, RoutingStats
from eqx_decoders.layers.moe.sorted_rows import (
    assign_with_capacity,
    combine,
    dispatch,
    scale_rows,
    sort_by_expert,
    undo_dispatch,
)
from eqx_decoders.layers.norm import ExpertNorms, NormConfig
from eqx_decoders.numerics.einsum import add_bias, as_weight, grouped_products
from eqx_decoders.numerics.grouped_matmul import GroupedForm, choose_form
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.numerics.low_rank import settled
from eqx_decoders.remat import save


# Up to this number of tokens (a decoding step) a TPU runs all experts on all tokens: reading the weights takes longer
# than the products, and a grouped matmul would first copy the layer's experts out of the weights of the scanned layers.
MAX_ALL_EXPERTS_TOKENS = 128
# Rows of a chunk of sorted tokens, relative to the rows of a device if all experts get equally many tokens.
CHUNK_FACTOR = Fraction(5, 4)
# Weights that the experts of a device need. Router, shared MLP, norms and projections of a latent run elsewhere.
EXPERT_WEIGHTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
CHOICES = "experts"  # name of the layer input with experts that replace the selection of the router (see `Router`)


class Routed(NamedTuple):
    """Tokens with their experts, and the statistics of the router; see `StaggeredLayer.route`."""

    tokens: RoutedTokens
    stats: RoutingStats


class OutputAndDropped(NamedTuple):
    """Output of the selected experts, and the number of dropped assignments."""

    out: Float[Array, "batch length embed"]
    dropped: Float32[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig(ChannelConfig):
    """Configuration of `sum over selected experts e of weight_e * down_e(act(gate_e x) * (up_e x + up_offset))`.

    GPT-OSS: `activation="quick_gelu"`, `up_offset=1.0`, `limit=7.0`, `bias`.

    **Arguments:**

    - `num_experts`: number of experts.
    - `num_experts_per_token`: number of experts that each token uses.
    - `mlp_dim`: hidden features of one expert.
    - `router`: configuration of the router that selects them.
    - `activation`, `activation_scale`: as in `MLPConfig`.
    - `gated`: whether a second input projection is multiplied in; without it an expert is `down_e(act(up_e x))`.
    - `latent_dim`: features of a latent that all experts read and write; shared projections map the residual stream to
        the latent and back. Router and shared MLP read the residual stream (Nemotron 3). None: experts read the stream.
    - `up_offset`: added to the up projection.
    - `limit`: gate projections are clipped to at most `limit`, up projections to `[-limit, limit]`; None for no limit.
    - `bias`: whether the projections of the experts (gate, up and down) have a bias.
    - `out_bias`: whether the sum over the experts has a bias (JetMoe).
    - `num_zero_experts`: number of additional experts that return their input (identity experts, LongCat-Flash).
    - `shared`: shared expert, an MLP that every token uses, added to the sum; None for no shared expert.
    - `shortcut`: name of a shortcut (LongCat-Flash). The layer returns the output of the shared MLP only; the later
        block whose `shortcut_from` has this name adds the output of the selected experts to the residual stream. None:
        the layer returns their sum.
    - `shared_gate`: whether the shared MLP is multiplied by `sigmoid(gate x)`, a scalar per token (Qwen3-Next).
    - `norms`: separate norms before and after the selected experts, and before and after the shared MLP. The router
        reads the layer's input, so the block must not have a norm before such a layer (Gemma 4). None: no norms. Needs
        `shared`.
    - `capacity_factor`: an expert accepts the first `max(1, int(ceil(S k / E) * factor))` of its tokens in each
        sequence of S tokens, with E experts and k experts per token; the others are dropped. None for no limit. With
        `Execution.experts="dense"` or `"dropless"` the limit is ignored, so that a model that was trained with a limit
        can be served without it.
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
        check(
            self.num_experts_per_token <= self.num_choices,
            f"ExpertsConfig.num_experts_per_token={self.num_experts_per_token} must be at most the number of experts, "
            f"num_experts={self.num_experts} plus num_zero_experts={self.num_zero_experts}.",
        )
        self.router.check_experts(self.num_choices, self.num_experts_per_token)
        check_gating("ExpertsConfig", gated=self.gated, up_offset=self.up_offset, limit=self.limit)
        for field in ("shared_gate", "norms", "shortcut"):
            value = getattr(self, field)
            check(
                self.shared is not None or not value,
                f"ExpertsConfig.{field}={value} needs a shared MLP: set shared=MLPConfig(...), or leave out {field}.",
            )

    @property
    def num_choices(self) -> int:
        """Number of experts that the router selects from, with zero experts."""
        return self.num_experts + self.num_zero_experts

    @property
    def draws(self) -> bool:
        """Whether dropout uses random numbers."""
        return self.shared is not None and self.shared.dropout > 0

    def capacity(self, length: int) -> int:
        """Return the maximum number of tokens of a sequence that an expert accepts; at least 1."""
        assert self.capacity_factor is not None
        mean = -(-length * self.num_experts_per_token // self.num_experts)
        return max(1, int(mean * self.capacity_factor))

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "Experts":
        keys = jax.random.split(key, 6)
        num_experts = self.num_experts
        mlp_dim = self.mlp_dim
        expert_dim = self.latent_dim or embed_dim

        def bias(size, exists=True):
            return jnp.zeros((num_experts, size)) if self.bias and exists else None

        def projection(number, rows, columns):
            return fan_in(jax.random.fold_in(key, number), (rows, columns), jnp.float32, rows)

        # fan-in of a single expert; MaxText also counts the experts, and so initializes with far smaller weights
        return (Experts if self.latent_dim is None else LatentExperts)(
            router=self.router.build(embed_dim, self.num_choices, self.num_experts_per_token, key=keys[0]),
            latent_in=None if self.latent_dim is None else projection(6, embed_dim, expert_dim),
            latent_out=None if self.latent_dim is None else projection(7, expert_dim, embed_dim),
            gate=fan_in(keys[1], (num_experts, expert_dim, mlp_dim), jnp.float32, expert_dim) if self.gated else None,
            up=fan_in(keys[2], (num_experts, expert_dim, mlp_dim), jnp.float32, expert_dim),
            down=fan_in(keys[3], (num_experts, mlp_dim, expert_dim), jnp.float32, mlp_dim),
            gate_bias=bias(mlp_dim, self.gated),
            up_bias=bias(mlp_dim),
            down_bias=bias(expert_dim),
            out_bias=jnp.zeros((embed_dim,)) if self.out_bias else None,
            shared=None if self.shared is None else self.shared.build(embed_dim, key=keys[4]),
            shared_gate=fan_in(keys[5], (embed_dim,), jnp.float32, embed_dim) if self.shared_gate else None,
            norms=None if self.norms is None else ExpertNorms(*(self.norms.build(embed_dim) for _ in range(4))),
            config=self,
        )


class Experts(eqx.Module):
    """Mixture of experts: `sum over selected e of weight_e * down_e(act(gate_e x) * (up_e x + up_offset)) + shared(x)`.

    `Execution.experts` selects the implementation.
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
        """Return the layer's output and its routing statistics. Dropout needs `key`."""
        result = self.branch(x, ctx, None, key)
        return result.out, result.stats["routing"]

    def branch(self, x: Array, ctx: ForwardContext, past: None, key: PRNGKeyArray | None) -> BranchResult:
        """Run the layer in a block; see `BranchLayer`. It has no cache."""
        inputs = BranchInputs(x, ctx, past, key)
        (result,) = self.run_routed([inputs], [self.route(inputs)])
        return result

    def route(self, inputs: BranchInputs) -> Routed:
        """Route the tokens of one part of the batch (see `StaggeredLayer`)."""
        x, ctx, _, _ = inputs
        indices, gates, stats = self.router(x, ctx, replayed=ctx.layer_inputs.get(CHOICES))
        return Routed(RoutedTokens(self._from_stream(x, ctx), indices, gates), stats)

    def run_routed(self, parts: Sequence[BranchInputs], routed: Sequence[Routed]) -> list[BranchResult]:
        """Run the experts on all parts of the batch; tokens of one part are sent while another part is computed."""
        tokens = [part.tokens for part in routed]
        batch, length, _ = tokens[0].x.shape
        run_experts = self._implementation(parts[0].ctx, batch * length)
        outputs = run_experts(tokens, parts[0].ctx)
        return list(map(self._result, parts, routed, outputs))

    def _result(self, inputs: BranchInputs, routed: Routed, output: OutputAndDropped) -> BranchResult:
        """Return the result of the layer, given the sum over the selected experts."""
        x, ctx, _, key = inputs
        out = self._to_stream(self._add_zero_experts(output.out, *routed.tokens), ctx)
        out = add_bias(out, self.out_bias)
        if self.norms is not None:
            out = self.norms.post_routed(out)
            x = self.norms.pre_shared(x)
        shortcut = None
        if self.shared is not None:
            shared = self._shared(self.shared, x, ctx, key)
            shared = shared if self.norms is None else self.norms.post_shared(shared)
            if self.config.shortcut is None:
                out = out + shared
            else:
                shortcut = out
                out = shared
        stats: dict[str, Any] = {"routing": dataclasses.replace(routed.stats, dropped=output.dropped)}
        if ctx.execution.expert_choices:
            stats["choices"] = routed.tokens.indices
        return BranchResult(ctx.constrain(out, "batch length embed"), stats=stats, shared=shortcut)

    def _from_stream(self, x: Array, ctx: ForwardContext) -> Array:
        """Return the input of the experts: `x`, normalized if there are norms, and projected if there is a latent."""
        x = x if self.norms is None else self.norms.pre_routed(x)
        if self.latent_in is None:
            return x
        return ctx.einsum("batch length embed, embed latent -> batch length latent", x, self.latent_in)

    def _add_zero_experts(self, out: Array, x: Array, indices: Array, gates: Array) -> Array:
        """Add the outputs of the zero experts, `gate * x`, to the sum over the other experts."""
        if self.config.num_zero_experts == 0:
            return out
        is_zero_expert = indices >= self.config.num_experts
        gate = jnp.sum(jnp.where(is_zero_expert, gates, 0.0), axis=-1, keepdims=True)
        return out + (gate * x.astype(gates.dtype)).astype(out.dtype)

    def _to_stream(self, x: Array, ctx: ForwardContext) -> Array:
        """Project the output of the experts from the latent to the residual stream, if there is a latent."""
        if self.latent_out is None:
            return x
        return ctx.einsum("batch length latent, latent embed -> batch length embed", x, self.latent_out)

    def _implementation(
        self, ctx: ForwardContext, num_tokens: int
    ) -> Callable[[list[RoutedTokens], ForwardContext], list[OutputAndDropped]]:
        """Return the function that runs the experts on the tokens of all parts."""
        name = ctx.execution.experts
        has_capacity = self.config.capacity_factor is not None
        if name == "auto":
            prefers_all_experts = (
                ctx.execution.layout.backend.all_experts_for_few_tokens
                and num_tokens <= MAX_ALL_EXPERTS_TOKENS
                and self._has_plain_products()
            )
            name = "capacity" if has_capacity else "all_experts" if prefers_all_experts else "dropless"
        check(
            has_capacity or name != "capacity",
            "Execution.experts='capacity' needs ExpertsConfig.capacity_factor: set it, or use experts='dropless'.",
        )
        if name == "dropless":
            return self._dropless
        run_part = {"dense": self._dense, "all_experts": self._all_experts, "capacity": self._capacity}[name]
        return lambda parts, ctx: [run_part(*part, ctx) for part in parts]

    def _has_plain_products(self) -> bool:
        """Return whether a product of all experts at once needs no further steps for any weight (`plain_product`)."""
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
        saved_gate = None if gate is None else _save(gate, "mlpwi_0")
        saved_up = _save(up, "mlpwi_0" if gate is None else "mlpwi_1")
        return join_gate(
            ACTIVATIONS[self.config.activation],
            saved_gate,
            saved_up,
            activation_scale=self.config.activation_scale,
            up_offset=self.config.up_offset,
            limit=self.config.limit,
        )

    # --- all experts on all tokens ---

    def _dense(self, x: Array, indices: Array, gates: Array, ctx: ForwardContext) -> OutputAndDropped:
        """Run every expert on every token; experts that a token did not select have gate 0."""
        is_selected, expert_gates = self._gates_by_expert(indices, gates)
        is_selected, expert_gates = (y.transpose(2, 0, 1)[..., None] for y in (is_selected, expert_gates))
        inputs = jnp.broadcast_to(x[None], (self.config.num_experts, *x.shape))
        inputs = ctx.constrain(inputs, "experts batch length embed")
        if self.config.router.input_scaling:
            inputs = inputs * expert_gates.astype(x.dtype)
            expert_gates = is_selected.astype(gates.dtype)
        out = ctx.constrain(self._batched_mlp(inputs, ctx), "experts batch length embed").astype(gates.dtype)
        return OutputAndDropped(jnp.sum(out * expert_gates, axis=0).astype(x.dtype), jnp.zeros((), jnp.float32))

    def _gates_by_expert(
        self, indices: Int32[Array, "batch length slots"], gates: Float[Array, "batch length slots"]
    ) -> tuple[Bool[Array, "batch length experts"], Float[Array, "batch length experts"]]:
        """Return whether each token selected each expert, and the gate of the expert; 0 if it is not selected."""
        experts = jnp.arange(self.config.num_experts, dtype=indices.dtype).reshape(1, 1, 1, -1)
        is_expert = indices[..., None] == experts
        return jnp.any(is_expert, axis=2), jnp.sum(jnp.where(is_expert, gates[..., None], 0.0), axis=2)

    def _all_experts(self, x: Array, indices: Array, gates: Array, ctx: ForwardContext) -> OutputAndDropped:
        """Compute `_dense` for few tokens, without a copy of the tokens or the outputs for each expert."""
        is_selected, expert_gates = self._gates_by_expert(indices, gates)
        expert_gates = expert_gates.astype(x.dtype)
        up_pattern = "batch length embed, experts embed mlp -> batch length experts mlp"
        input_scales = expert_gates[..., None] if self.config.router.input_scaling else None

        def project(weight: Array, bias: Array | None) -> Array:
            y = ctx.constrain(ctx.einsum(up_pattern, x, weight), "batch length experts mlp")
            y = y if input_scales is None else y * input_scales
            return y if bias is None else y + bias.astype(y.dtype)[None, None]

        gate = None if self.gate is None else project(self.gate, self.gate_bias)
        hidden = self._hidden(gate, project(self.up, self.up_bias))
        if input_scales is not None:
            expert_gates = is_selected.astype(x.dtype)
        down_pattern = "batch length experts mlp, experts mlp embed -> batch length embed"
        out = ctx.einsum(down_pattern, hidden * expert_gates[..., None], self.down)
        if self.down_bias is not None:
            out += jnp.einsum("ble,ed->bld", expert_gates, self.down_bias.astype(x.dtype))
        return OutputAndDropped(ctx.constrain(out, "batch length embed"), jnp.zeros((), jnp.float32))

    def _batched_mlp(
        self, x: Float[Array, "experts batch places embed"], ctx: ForwardContext
    ) -> Float[Array, "experts batch places embed"]:
        """Run each expert on a separate batch of tokens."""
        up_pattern = "experts batch places embed, experts embed mlp -> experts batch places mlp"
        down_pattern = "experts batch places mlp, experts mlp embed -> experts batch places embed"

        def add_expert_bias(y, bias):
            return y if bias is None else y + bias.astype(y.dtype)[:, None, None]

        gate = None if self.gate is None else add_expert_bias(ctx.einsum(up_pattern, x, self.gate), self.gate_bias)
        up = add_expert_bias(ctx.einsum(up_pattern, x, self.up), self.up_bias)
        out = add_expert_bias(ctx.einsum(down_pattern, self._hidden(gate, up), self.down), self.down_bias)
        return _save(out, "mlpwo")

    # --- tokens sorted by expert ---

    def _dropless(self, parts: list[RoutedTokens], ctx: ForwardContext) -> list[OutputAndDropped]:
        """Sort tokens by expert, run a grouped matmul and return the outputs to the tokens, on each device."""
        no_drops = jnp.zeros((), jnp.float32)
        layer = settled(self)  # column norms of DoRA need complete columns, which a shard does not have
        if ctx.execution.layout.single:
            flat = [[array.reshape(-1, array.shape[-1]) for array in part] for part in parts]
            outputs = [layer._local_experts(x, indices, gates, ctx) for x, indices, gates in flat]
            outputs = [out.reshape(part.x.shape) for out, part in zip(outputs, parts, strict=True)]
        else:
            outputs = run_on_mesh(
                partial(Experts._local_experts, ctx=ctx),
                layer._only(EXPERT_WEIGHTS),
                parts,
                ctx.execution,
                num_experts=self.config.num_experts,
                scale_inputs=self.config.router.input_scaling,
            )
        return [OutputAndDropped(out, no_drops) for out in outputs]

    def _only(self, names: Sequence[str]) -> "Experts":
        """Return a copy in which all other fields with arrays are None."""
        others = [field.name for field in dataclasses.fields(self) if field.name not in (*names, "config")]
        get_others = lambda layer: [getattr(layer, name) for name in others]  # noqa: E731
        return eqx.tree_at(get_others, self, [None] * len(others), is_leaf=lambda leaf: leaf is None)

    @property
    def _num_local_experts(self) -> int:
        """Number of experts whose weights this layer has: on a mesh, inside of `shard_map`, the experts of a device."""
        return as_weight(self.down).shape[0]

    def _local_experts(
        self,
        x: Float[Array, "tokens embed"],
        indices: Int32[Array, "tokens slots"],
        gates: Float[Array, "tokens slots"] | None,
        ctx: ForwardContext,
    ) -> Float[Array, "tokens embed"]:
        """Return the weighted sum over the selected experts of this device; without gates a token has one expert.

        In the worst case all assignments are to experts of this device, but usually only its share is. If that share is
        small, the sorted tokens are processed in chunks of CHUNK_FACTOR times the share, until all are done.
        """
        num_experts = self._num_local_experts
        _, *features = as_weight(self.down).shape
        layout = ctx.execution.layout
        max_rows = len(indices) * min(indices.shape[1], num_experts)
        largest = max(max_rows * max(features), num_experts * math.prod(features))
        form = choose_form(
            layout.backend,
            layout.device,
            x.dtype,
            rows=indices.size,
            groups=self.config.num_experts,
            largest=largest,
        )
        padding = form.block
        chunk_rows = 8 * math.ceil(CHUNK_FACTOR * indices.size * num_experts / (8 * self.config.num_experts))
        # Without gates (after an all-to-all) each row of the buffer has a separate output. The sum over chunks would
        # read and write all of these outputs once per chunk.
        if gates is None or 2 * chunk_rows > max_rows:
            destinations, sources = sort_by_expert(indices, num_experts, padding)
            return self._sorted_experts(x, indices, gates, destinations, sources, form, ctx)
        destinations, sources = sort_by_expert(indices, num_experts)
        num_rows = jnp.sum(sources < indices.size, dtype=jnp.int32)
        sources = jnp.pad(sources, (0, -len(sources) % chunk_rows), constant_values=indices.size)
        trained, frozen, static = partition_trained(self)

        # all traced arrays are arguments: a function with a custom gradient must not close over them
        def run_chunk(chunk: Array, differentiable: Any, constant: Any) -> Array:
            trained, x, gates = differentiable
            frozen, indices, destinations, sources, num_rows = constant
            row = destinations - chunk * chunk_rows
            is_in_chunk = (row >= 0) & (row < chunk_rows) & (destinations < num_rows)
            destinations = jnp.where(is_in_chunk, row, chunk_rows + padding)
            sources = jax.lax.dynamic_slice_in_dim(sources, chunk * chunk_rows, chunk_rows)
            sources = jnp.pad(sources, (0, padding), constant_values=indices.size)
            experts = eqx.combine(trained, frozen, static)
            return experts._sorted_experts(x, indices, gates, destinations, sources, form, ctx)

        num_chunks = -(-num_rows // chunk_rows)
        return sum_chunks(
            run_chunk, num_chunks, (trained, x, gates), (frozen, indices, destinations, sources, num_rows)
        )

    def _sorted_experts(
        self,
        x: Float[Array, "tokens embed"],
        indices: Int32[Array, "tokens slots"],
        gates: Float[Array, "tokens slots"] | None,
        destinations: Int32[Array, "tokens slots"],
        sources: Int32[Array, "places"],
        form: GroupedForm,
        ctx: ForwardContext,
    ) -> Float[Array, "tokens embed"]:
        """Run `_local_experts` for the assignments that have a row in the sorted buffer."""
        num_experts = self._num_local_experts
        rows = dispatch(x, destinations, sources)
        if self.config.router.input_scaling and gates is not None:
            rows, gates = scale_rows(rows, gates, destinations, sources)
        # an empty row has the index num_experts, which no expert has
        row_experts = indices.reshape(-1).at[sources].get(mode="fill", fill_value=num_experts)
        is_expert = row_experts[:, None] == jnp.arange(num_experts, dtype=row_experts.dtype)[None]
        out = self._grouped_mlp(save(rows, "moe_x_sorted"), is_expert, form, ctx)
        if gates is None:
            return undo_dispatch(out, destinations, sources)
        return combine(out, gates, destinations, sources).astype(x.dtype)

    def _grouped_mlp(
        self,
        rows: Float[Array, "rows embed"],
        is_expert: Bool[Array, "rows experts"],
        form: GroupedForm,
        ctx: ForwardContext,
    ) -> Float[Array, "rows embed"]:
        """Run each row through its expert; rows are sorted by expert."""
        product = partial(grouped_products, counts=jnp.sum(is_expert, axis=0, dtype=jnp.int32), form=form)

        def add_expert_bias(y, bias):
            # a product with one-hot rows, because its gradient sums rows without a scatter
            pattern = "rows experts, experts features -> rows features"
            return y if bias is None else y + ctx.einsum(pattern, is_expert.astype(y.dtype), bias)

        if self.gate is None:
            gate = None
            up = product(rows, (self.up,))[0]
        else:
            gate, up = product(rows, (self.gate, self.up))
            gate = add_expert_bias(gate, self.gate_bias)
        hidden = self._hidden(gate, add_expert_bias(up, self.up_bias))
        out = add_expert_bias(product(hidden, (self.down,))[0], self.down_bias)
        return _save(out, "mlpwo")

    # --- limited capacity ---

    def _capacity(self, x: Array, indices: Array, gates: Array, ctx: ForwardContext) -> OutputAndDropped:
        """Run each expert on at most `capacity` tokens of a sequence; drop its other assignments.

        Earlier tokens take precedence, and for the same token experts with a higher rank.
        """
        num_experts = self.config.num_experts
        capacity = self.config.capacity(x.shape[1])
        num_assignments = jnp.sum(indices < num_experts, dtype=jnp.float32)
        assign = partial(assign_with_capacity, num_experts=num_experts, capacity=capacity)
        destinations, sources = jax.vmap(assign)(indices)
        destinations, sources = (save(index, "moe_routing_maps") for index in (destinations, sources))
        rows = jax.vmap(dispatch)(x, destinations, sources)
        if self.config.router.input_scaling:
            rows, gates = jax.vmap(scale_rows)(rows, gates, destinations, sources)
        # rows are gathered and combined on the devices of their tokens; changing the sharding in between is all-to-all
        rows = ctx.constrain(save(rows, "moe_x_sorted"), "batch places embed")
        rows = rows.reshape(len(x), num_experts, capacity, -1).transpose(1, 0, 2, 3)
        out = self._batched_mlp(ctx.constrain(rows, "experts batch places embed"), ctx)
        out = ctx.constrain(out, "experts batch places embed").transpose(1, 0, 2, 3)
        out = ctx.constrain(out.reshape(len(x), num_experts * capacity, -1), "batch places embed")
        out = jax.vmap(combine)(out, gates, destinations, sources).astype(x.dtype)
        num_accepted = jnp.sum(destinations < num_experts * capacity, dtype=jnp.float32)
        return OutputAndDropped(out, num_assignments - num_accepted)


class LatentExperts(Experts):
    """Experts that read and write a latent; shared projections map the residual stream to the latent and back."""

    gate: Float[Array, "experts latent mlp"] | None
    up: Float[Array, "experts latent mlp"]
    down: Float[Array, "experts mlp latent"]
    down_bias: Float[Array, "experts latent"] | None


def _save(x: Array, name: str) -> Array:
    """Name `x` like the same value of an MLP, and with the prefix `moe_` (see `remat.save`)."""
    return save(save(x, name), f"moe_{name}")
