"""Measurements of single layers for `bench.py`: experts by dispatch, and recurrences with attention."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import eqx_decoders as ed
from eqx_decoders.layers.attention.kernels.registry import attend
from eqx_decoders.layers.mask import Causal
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.recurrent.scans.recurrence import delta_rule as gated_delta_rule, linear_recurrence
from eqx_decoders.numerics.einsum import grouped_products
from eqx_decoders.numerics.grouped_matmul import GroupedForm
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.training.head.cross_entropy import linear_cross_entropy
from eqx_decoders.training.head.log_probs import linear_log_probs
from eqx_decoders.training.head.vocab_parallel import HeadWeights


def both(function: Callable, *args: Any) -> Callable:
    """Return the compiled gradient of a function by all arguments, as a function without arguments."""

    def pair(*args):
        out, back = jax.vjp(function, *args)
        return back(out)

    program = jax.jit(pair).lower(*args).compile()
    return lambda: program(*args)


def in_turns(programs: dict[str, Callable], repeats: int, once: tuple[str, ...] = ()) -> dict[str, list[float]]:
    """Measure each program `repeats` times in turn, so that other load of the machine slows all of them.

    Those in `once` are timed once.
    """
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(repeats + 1):
        for name, program in programs.items():
            if turn > 1 and name in once:
                continue
            begin = time.perf_counter()
            jax.block_until_ready(program())
            if turn > 0:  # the first one pays for empty memory
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def experts(repeats: int) -> dict[str, list[float]]:
    """Measure 64 experts, of which each of 2048 tokens uses four, forward and backward, by dispatch.

    The first row is the yardstick: the same active work as three plain products.
    """
    tokens, count, chosen, embed, mlp = 2048, 64, 4, 512, 256
    config = ExpertsConfig(num_experts=count, num_experts_per_token=chosen, mlp_dim=mlp, capacity_factor=1.25)
    layer = config.build(embed, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (1, tokens, embed))
    rows = jax.random.normal(jax.random.key(2), (tokens * chosen, embed))
    counts = jnp.full((count,), len(rows) // count, jnp.int32)

    ragged_dot = GroupedForm("ragged_dot")

    def products(gate, up, down, rows):
        return (jax.nn.silu(rows @ gate[0]) * (rows @ up[0])) @ down[0]

    def ragged(gate, up, down, rows):
        gates, ups = grouped_products(rows, (gate, up), counts, form=ragged_dot)
        return grouped_products(jax.nn.silu(gates) * ups, (down,), counts, form=ragged_dot)[0]

    def run(form):
        ctx = ed.ForwardContext(positions=jnp.arange(tokens)[None], execution=ed.Execution(experts=form))
        return lambda layer, x: layer(x, ctx)[0]

    weights = (layer.gate, layer.up, layer.down)
    cases = {
        "dense products": both(products, *(each[:1] for each in weights if each is not None), rows),
        "dropless": both(run("dropless"), layer, x),
        "capacity 1.25": both(run("capacity"), layer, x),
        "ragged_dot, products alone": both(ragged, *weights, rows),
    }
    return in_turns(cases, repeats, once=("ragged_dot, products alone",))  # a hundred times slower


def log_probs(vocab: int, repeats: int) -> dict[str, list[float]]:
    """Measure log-probs beside the loss of next tokens, 2048 tokens of 1024 features, forward and backward, in f32."""
    layout = Layout()
    hidden, kernel = jax.random.normal(jax.random.key(0), (4, 512, 1024)), jnp.full((1024, vocab), 0.01)
    targets = jax.random.randint(jax.random.key(1), hidden.shape[:2], 0, vocab)
    options: dict[str, Any] = dict(tied=False, flatten=layout.backend.flat_products, layout=layout)
    weights = jnp.ones(targets.shape)
    forms = {
        "loss of next tokens": lambda x, w: linear_cross_entropy(x, HeadWeights(w), targets, weights, **options)[0],
        "log-probs": lambda x, w: jnp.sum(linear_log_probs(x, HeadWeights(w), targets, **options).log_probs),
    }
    return in_turns({name: both(form, hidden, kernel) for name, form in forms.items()}, repeats)


def delta_rule(length: int, repeats: int) -> dict[str, list[float]]:
    """Measure two rows in four heads of 64, forward and backward, in f32."""
    shape = (2, length, 4, 64)
    query, key, value, decay = (jax.random.normal(jax.random.key(seed), shape) for seed in range(4))
    key, decay = key / jnp.linalg.norm(key, axis=-1, keepdims=True), -jax.nn.softplus(decay)
    beta, positions = jnp.full(shape[:3], 0.5), jnp.tile(jnp.arange(length), (2, 1))
    options: dict[str, Any] = dict(mask=Causal(), query_positions=positions, key_positions=positions, aligned=True)
    forms = {
        "attention": lambda q, k, v: attend(q, k, v, kernel="chunked", **options)[0],
        "delta rule": lambda q, k, v: gated_delta_rule(q, k, v, decay[..., :1], beta)[0],
        "delta rule by channel": lambda q, k, v: gated_delta_rule(q, k, v, decay, beta)[0],
        "linear recurrence": lambda q, k, v: linear_recurrence(q, k, v, decay[..., :1])[0],
    }
    return in_turns({name: both(form, query, key, value) for name, form in forms.items()}, repeats)
