"""Measure an accelerator against its data sheet: a training step, attention kernels, experts and decoding.

Each measurement is a program of shapes: it can be compiled for devices that are not here, and runs where they are.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import eqx_decoders as ed
from eqx_decoders.context import AttentionName
from eqx_decoders.data.batch import Batch
from eqx_decoders.inference.unstack import unstack_cache, unstack_in_place
from eqx_decoders.layers.attention.kernels.call import AttentionCall
from eqx_decoders.layers.attention.kernels.registry import KERNELS, attend
from eqx_decoders.layers.mask import Causal, Mask, SlidingWindow
from eqx_decoders.layers.recurrent.scans.recurrence import delta_rule
from eqx_decoders.numerics.einsum import grouped_products
from eqx_decoders.numerics.grouped_matmul import GroupedForm, block_rows, choose_form
from eqx_decoders.planning.traced_memory import abstract_batch
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.sharding.chips import Chip, chip_of, compute_capability
from eqx_decoders.sharding.layout import device_bytes
from eqx_decoders.training.flops import flops_per_token
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.step import Trainer


NEEDED = "This needs a TPU or a GPU that JAX sees: pip install '.[tpu]' or '.[cuda]', without JAX_PLATFORMS=cpu."
_SCORES = 5e9  # bytes: `dot` is left out where all its scores take more


class Attention(NamedTuple):
    """Shapes of one layer's attention."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: Mask = Causal()


class Recurrence(NamedTuple):
    """Shapes of one layer's recurrence; with `delta`, written values are corrected."""

    batch: int
    length: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    delta: bool


class Grouped(NamedTuple):
    """Shapes of a product of sorted rows with a weight for each group."""

    rows: int
    groups: int
    inner: int
    outer: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """Shapes of the measured programs.

    **Arguments:**

    - `model`: the model of the steps, with `rows` of `seq_len` tokens a device.
    - `attention`: layers, each measured with all kernels of the platform.
    - `grouped`: products of experts, in the form that suits the device, and in a loop over blocks.
    - `recurrences`: layers, each in chunks by XLA, and in the form that suits the device.
    - `decoding`: rows that are decoded together, each with `past` tokens behind it.
    """

    model: str = "llama3.2-1b"
    rows: int = 2
    seq_len: int = 4096
    attention: tuple[Attention, ...] = (
        Attention(4, 2048, 32, 8, 64),
        Attention(2, 4096, 32, 8, 128),
        Attention(1, 16_384, 32, 8, 128),
        Attention(1, 16_384, 32, 8, 128, SlidingWindow(1024)),
        Attention(1, 4096, 16, 16, 256),
    )
    grouped: tuple[Grouped, ...] = (
        Grouped(65_536, 128, 2048, 768),  # Qwen3-30B-A3B: 8192 tokens
        Grouped(512, 128, 2048, 768),  # 64 tokens
    )
    recurrences: tuple[Recurrence, ...] = (
        Recurrence(1, 8192, 16, 32, 128, 128, delta=True),  # Qwen3-Next
        Recurrence(1, 8192, 8, 128, 128, 64, delta=False),  # Nemotron-H
    )
    decoding: tuple[int, ...] = (1, 16)
    past: int = 8191


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of shapes.

    **Arguments:**

    - `name`: its name in the output.
    - `function`: compiled by JAX; its first `carried` results take the positions of as many arguments.
    - `arguments`: trees of `jax.ShapeDtypeStruct` with shardings.
    - `flops`, `bytes`: operations and least reads of a device; 0 where they are not measured.
    - `tokens`: of all devices.
    """

    name: str
    function: Any
    arguments: tuple[Any, ...]
    flops: float = 0.0
    bytes: float = 0.0
    tokens: int = 0
    carried: int = 0


def programs(devices: Sequence[Any], shapes: Shapes = Shapes()) -> Iterator[Program]:
    """Yield all programs: the step on all devices, the others on the first."""
    yield training(devices, shapes)
    for case in shapes.attention:
        for name in kernels(case, devices[0]):
            yield from attention(case, name, devices[0])
    for case in shapes.grouped:
        yield from grouped(case, devices[0])
    for case in shapes.recurrences:
        for kernel in (False, True):
            yield from recurrence(case, devices[0], kernel)
    for rows in shapes.decoding:
        yield decoding(rows, devices[0], shapes)


def training(devices: Sequence[Any], shapes: Shapes) -> Program:
    """Make a step with AdamW, state in float32, activations in bfloat16, weights and rows split over the devices."""
    layout, rows = ed.Layout.create(fsdp=-1, devices=list(devices)), shapes.rows * len(devices)
    precision = ed.Precision(compute=jnp.bfloat16)
    model = ed.abstract(ed.get_config(shapes.model), layout=layout, precision=precision, remat="minimal_with_context")
    trainer = Trainer.create(OptimizerConfig(), model, steps=1000)
    state = trainer.abstract(model, key=jax.random.key(0))

    def step(state, tokens):
        positions = jnp.broadcast_to(jnp.arange(shapes.seq_len, dtype=jnp.int32), tokens.shape)
        batch = Batch(tokens=tokens, segment_ids=jnp.ones_like(tokens), positions=positions, contiguous=True)
        return trainer.advance(state, batch)

    tokens = rows * shapes.seq_len
    return Program(
        f"training step of {shapes.model}, {rows} x {shapes.seq_len}",
        jax.jit(step, donate_argnums=0),
        (state, abstract_batch(layout, rows, shapes.seq_len).tokens),
        flops=tokens * flops_per_token(model, shapes.seq_len) / len(devices),
        tokens=tokens,
        carried=1,
    )


def kernels(case: Attention, device: Any) -> list[str]:
    """Return the names of the attention kernels that can do a case on such a device."""
    names = [name for name in get_args(AttentionName) if name != "auto"]
    scores = 4 * case.batch * case.heads * case.length**2
    call = AttentionCall(
        mask=case.mask,
        platform=device.platform,
        compute_capability=compute_capability(device),
        batch=case.batch,
        length=case.length,
        kv_length=case.length,
        head_dim=case.head_dim,
        value_dim=case.head_dim,
        dtypes=(jnp.bfloat16,) * 3,
        aligned=True,
        dense_positions=True,
        needs_lse=False,
    )
    able = [name for name in names if KERNELS[name].lacks(call) is None]
    return [name for name in able if name != "dot" or scores < _SCORES]


def attention(case: Attention, kernel: str, device: Any) -> Iterator[Program]:
    """Yield forward, and forward with backward; FLOPs are of scores that the mask leaves, of 2 and 7 products."""
    sharding = SingleDeviceSharding(device)

    def like(heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((case.batch, case.length, heads, case.head_dim), jnp.bfloat16, sharding=sharding)

    def forward(query, key, value):
        positions = jnp.broadcast_to(jnp.arange(query.shape[1], dtype=jnp.int32), query.shape[:2])
        options: dict[str, Any] = dict(query_positions=positions, key_positions=positions, aligned=True, local=True)
        options |= dict(dense_positions=True, needs_lse=False, platform=device.platform)
        options |= dict(compute_capability=compute_capability(device))
        return attend(query, key, value, mask=case.mask, kernel=kernel, **options)[0]

    def both(query, key, value):
        out, back = jax.vjp(forward, query, key, value)
        return back(out)

    arguments = (like(case.heads), like(case.kv_heads), like(case.kv_heads))
    product = 2.0 * case.batch * case.heads * case.head_dim * visible_pairs(case)
    about = f"{kernel}, {case.batch} x {case.length}, {case.heads} heads of {case.head_dim}, {case.kv_heads} of keys"
    about += f", window {case.mask.size}" if isinstance(case.mask, SlidingWindow) else ""
    yield Program(f"{about}: forward", jax.jit(forward), arguments, flops=2 * product)
    yield Program(f"{about}: both", jax.jit(both), arguments, flops=7 * product)


def grouped(case: Grouped, device: Any) -> Iterator[Program]:
    """Yield forward, and forward with backward; FLOPs are those of the rows, which are spread evenly."""
    sharding, backend = SingleDeviceSharding(device), ed.Layout.create(devices=[device]).backend
    sizes = dict(rows=case.rows, groups=case.groups, largest=case.groups * case.inner * case.outer)
    loop = GroupedForm("blocks", block_rows(case.rows, case.groups))
    flops = 2.0 * case.rows * case.inner * case.outer

    def like(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    for form in dict.fromkeys((choose_form(backend, device, jnp.dtype(jnp.bfloat16), **sizes), loop)):
        count = case.rows + form.block

        def forward(x, weight, form=form):
            counts = jnp.full((case.groups,), case.rows // case.groups, jnp.int32)
            return grouped_products(x, (weight,), counts, form=form)[0]

        def both(x, weight, out_bar, forward=forward):
            out, back = jax.vjp(forward, x, weight)
            return out, back(out_bar)

        arrays = like(count, case.inner), like(case.groups, case.inner, case.outer)
        about = f"grouped product by {form.kind}, {case.rows} rows, {case.groups} x {case.inner} x {case.outer}"
        yield Program(f"{about}: forward", jax.jit(forward), arrays, flops=flops)
        yield Program(f"{about}: both", jax.jit(both), (*arrays, like(count, case.outer)), flops=3 * flops)


def recurrence(case: Recurrence, device: Any, kernel: bool) -> Iterator[Program]:
    """Yield forward, and forward with backward; FLOPs are those of the definition, token by token, and thrice these."""
    sharding = SingleDeviceSharding(device)

    def like(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((case.batch, case.length, *shape), jnp.float32, sharding=sharding)

    platform: dict[str, Any] = dict(platform=device.platform, compute_capability=compute_capability(device))

    def forward(query, key, value, log_decay, beta):
        run = functools.partial(delta_rule, **platform if kernel else {})
        return run(query, key, value, -jnp.abs(log_decay), beta if case.delta else None)[0]

    def both(*arrays):
        out, back = jax.vjp(forward, *arrays)
        return back(out)

    keys, rates = like(case.key_heads, case.key_dim), like(case.heads)
    arguments = (keys, keys, like(case.heads, case.value_dim), like(case.heads, 1), rates)
    operations = 2.0 * (3 if case.delta else 2) * case.batch * case.length * case.heads * case.key_dim * case.value_dim
    name = "delta rule" if case.delta else "linear recurrence"
    about = f"{name} in {'a kernel' if kernel else 'chunks'}, {case.batch} x {case.length}, {case.heads} heads"
    yield Program(f"{about}: forward", jax.jit(forward), arguments, flops=operations)
    yield Program(f"{about}: both", jax.jit(both), arguments, flops=3 * operations)


def visible_pairs(case: Attention) -> int:
    """Count the pairs of a query and a visible key in one row."""
    window = case.mask.size if isinstance(case.mask, SlidingWindow) else case.length
    full = min(window, case.length)
    return full * (full + 1) // 2 + (case.length - full) * full


def decoding(rows: int, device: Any, shapes: Shapes) -> Program:
    """Make a decoding step of one token a row, weights and cache in bfloat16: all of both are read."""
    layout = ed.Layout.create(devices=[device])
    precision = ed.Precision(params=jnp.bfloat16, compute=jnp.bfloat16)
    config = ed.get_config(shapes.model)
    model = unstack_in_place(ed.abstract(config, layout=layout, precision=precision))
    cache = unstack_cache(model, ed.abstract_cache(config, rows, shapes.past + 1, layout=layout))
    sharding = layout.activation_sharding("batch length", (rows, 1))
    tokens = jax.ShapeDtypeStruct((rows, 1), jnp.int32, sharding=sharding)

    def step(cache, model, tokens):
        positions = jnp.full_like(tokens, shapes.past)
        out = model(tokens, positions=positions, cache=cache)
        return out.cache, out.logits

    weights = sum(device_bytes(leaf) for leaf in named_leaves(model).values())
    if not config.tied:
        weights -= device_bytes(model.embedding.table)  # of which a row for each token is read
    read = weights + sum(device_bytes(leaf) for leaf in jax.tree.leaves(cache))
    name = f"decoding by {shapes.model}, {rows} rows, {shapes.past} tokens behind each"
    return Program(name, jax.jit(step, donate_argnums=0), (cache, model, tokens), bytes=read, tokens=rows, carried=1)


def filled(tree: Any) -> Any:
    """Replace shapes by arrays: small random numbers, ones for integers."""
    return jax.tree.map(_array, tree, is_leaf=lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))


def _array(like: jax.ShapeDtypeStruct) -> jax.Array:
    return _fill(like.shape, like.dtype, like.sharding)()


@functools.cache  # one program for all arrays that are alike: layers have hundreds
def _fill(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[], jax.Array]:
    def make() -> jax.Array:
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if jnp.issubdtype(dtype, jnp.floating):
            return 0.02 * jax.random.normal(jax.random.key(0), shape, dtype)
        return jnp.ones(shape, dtype)

    return jax.jit(make, out_shardings=sharding)


def seconds(program: Program, repeats: int, calls: int = 10) -> float:
    """Measure the median time of a call, of which several are given to the device one behind the other."""
    arguments = [filled(each) for each in program.arguments]

    def call() -> Any:
        out = program.function(*arguments)
        if program.carried:
            arguments[0] = out[0]
        return out

    jax.block_until_ready(call())
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls - 1):
            call()
        out = call()
        jax.block_until_ready(out)
        taken.append((time.perf_counter() - begin) / calls)
    return statistics.median(taken)


def format_line(program: Program, time: float, chip: Chip | None) -> str:
    """Format milliseconds and the share of the chip's peak or bandwidth in one line."""
    line = f"{program.name}: {1000 * time:.3f} ms"
    if program.tokens:
        line += f", {program.tokens / time:,.0f} tokens/s"
    if program.flops:
        line += f", {program.flops / time / 1e12:.1f} TFLOP/s a device"
    if program.flops and chip is not None:
        share = program.flops / time / (chip.bf16 / chip.devices)
        line += f", MFU {share:.1%}" if program.tokens else f", {share:.1%} of the peak"
    if program.bytes:
        line += f", {program.bytes / time / 1e9:,.0f} GB/s"
        line += (
            ""
            if chip is None
            else f", {program.bytes / time / (chip.memory_bandwidth / chip.devices):.1%} of its bandwidth"
        )
    return line


def accelerator(repeats: int, shapes: Shapes = Shapes(), say: Callable[[str], None] = print) -> bool:
    """Measure all programs on the devices that are here; errors of a program are printed, and the next one runs."""
    devices = jax.devices()
    if devices[0].platform == "cpu":
        say(NEEDED)
        return False
    measure(devices, repeats, shapes, say)
    return True


def measure(devices: Sequence[Any], repeats: int, shapes: Shapes, say: Callable[[str], None]) -> None:
    """Print a line for each program."""
    chip = chip_of(devices[0].device_kind)
    known = f"figures: {chip.source}" if chip is not None else "no figures of it are known"
    say(f"{len(devices)} x {devices[0].device_kind} ({known})")
    for program in programs(devices, shapes):
        try:
            say(format_line(program, seconds(program, repeats), chip))
        except (jax.errors.JaxRuntimeError, ed.ConfigError) as error:
            say(f"{program.name}: {str(error).splitlines()[0][:200]}")
