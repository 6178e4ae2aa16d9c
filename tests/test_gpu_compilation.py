"""Compilation for H100s, without one: needs the compiler of GPUs (extra "aot-gpu"), and cuDNN for its attention."""

import dataclasses
import functools
import importlib
from importlib.util import find_spec

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import eqx_decoders as ed
from eqx_decoders.inference.unstack import unstack_cache, unstack_in_place
from eqx_decoders.model.caches import abstract_cache
from eqx_decoders.numerics.einsum import grouped_products
from eqx_decoders.numerics.grouped_matmul import GroupedForm
from eqx_decoders.numerics.rounded_weight import Rounded
from eqx_decoders.planning.collectives import collectives
from eqx_decoders.planning.decoding_step import plan_decoding
from eqx_decoders.planning.gpus import GPU_OPTIONS, gpu_devices, gpus_of, tracing_for
from eqx_decoders.planning.hlo import parse
from eqx_decoders.planning.machine import Machine
from eqx_decoders.planning.step_plan import attention_kernels
from eqx_decoders.planning.traced_memory import abstract_batch
from eqx_decoders.serving.engine import programs
from eqx_decoders.serving.engine.engine_weights import Models
from eqx_decoders.serving.engine.sampler import SAMPLING_VARIANTS, SamplingBatch
from eqx_decoders.sharding.offload import Offload
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.step import Trainer
from tests.commands import ROOT


pytestmark = pytest.mark.slow
BF16 = ed.Precision(params=jnp.bfloat16, compute=jnp.bfloat16)
WITHOUT_ASYNCHRONOUS = {"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"}


def gpus(topology):
    """Devices to compile for."""
    found = gpu_devices(gpus_of(topology))
    if found is None:
        pytest.skip("needs the compiler of GPUs, extra aot-gpu")
    return found


@pytest.fixture
def devices():
    found = gpus("h100:1x4")
    if find_spec("nvidia") is None or find_spec("nvidia.cudnn") is None:
        pytest.skip("needs cuDNN: pip install nvidia-cudnn-cu13")
    with tracing_for(found):
        yield found


def lowered_step(name, layout, *, blocks=slice(2), length=1024, **options):
    """A training step of a few layers of a model, of its own sizes: what is compiled has no arrays."""
    config = ed.get_config(name)
    config = dataclasses.replace(config, blocks=config.blocks[blocks], mtp=None)
    options = {"precision": ed.Precision(compute=jnp.bfloat16), "remat": "full"} | options
    model = ed.abstract(config, layout=layout, **options)
    trainer = Trainer.create(OptimizerConfig(), model, steps=100)
    state = trainer.abstract(model, key=jax.random.key(0))
    return jax.jit(trainer.advance, donate_argnums=0).trace(state, abstract_batch(layout, 8, length)).lower()


# model, sizes of the mesh, options, the kernels of attention, and the kinds of collectives besides those of weights
STEPS = {
    "latent attention": ("deepseek2-16b", dict(fsdp=4), {}, ("triton",), ()),
    "linear attention": ("kimi-linear-48b-a3b", dict(fsdp=4), dict(blocks=slice(2, 4)), ("triton",), ()),
    "gemma 3": ("gemma3-4b", dict(fsdp=4), dict(blocks=slice(4, 6)), ("cudnn",), ()),
    "gemma 4": ("gemma4-26b", dict(fsdp=4), dict(blocks=slice(4, 6)), ("chunked", "cudnn"), ()),
    "sinks": ("gpt-oss-20b", dict(fsdp=4), {}, ("triton",), ()),
    "experts, gathered": ("qwen3-30b-a3b", dict(expert=4), dict(blocks=slice(1)), ("cudnn",), ()),
    "experts, exchanged": (
        "qwen3-30b-a3b", dict(fsdp=2, expert=2), dict(blocks=slice(1), expert_exchange="all_to_all"), ("cudnn",),
        ("all-to-all",),
    ),
    "ring": (
        "llama3-8b", dict(context=4), dict(length=4096, context_form="ring"), ("triton",), ("collective-permute",),
    ),
    "ring, zigzag": (
        "llama3-8b", dict(context=4), dict(length=4096, context_form="ring", context_order="zigzag"), ("triton",),
        ("collective-permute",),
    ),
    "exchanged heads": ("llama3-8b", dict(context=4), dict(context_form="all_to_all"), ("cudnn",), ("all-to-all",)),
    "heads": ("llama3-8b", dict(fsdp=2, tensor=2), {}, ("cudnn",), ("all-reduce",)),
    "pipeline": (
        "llama3-8b", dict(stage=2, fsdp=2), dict(pipeline=ed.Pipeline(microbatches=4)), ("cudnn",),
        ("collective-permute",),
    ),
    "int8": ("llama3-8b", dict(fsdp=4), dict(low_precision=ed.LowPrecision(mode="int8")), ("cudnn",), ()),
    "fp8": ("llama3-8b", dict(fsdp=4), dict(low_precision=ed.LowPrecision(mode="fp8")), ("cudnn",), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_training_steps_compile(devices, name):
    """With the kernel that "auto" takes there, and the collectives of the form."""
    model, sizes, options, kernels, kinds = STEPS[name]
    layout = ed.Layout.create(**sizes, devices=devices)
    compiled = lowered_step(model, layout, **options).compile(compiler_options=GPU_OPTIONS)
    text = compiled.as_text()
    program = parse(text)
    sent = {one.kind for one in collectives(program, layout.sizes)}
    assert set(attention_kernels(program)) == set(kernels)
    assert ("__cudnn$fmha" in text) == ("cudnn" in kernels) == ('"mask_type": "CAUSAL"' in text)
    assert sent >= set(kinds) and compiled.memory_analysis().peak_memory_in_bytes > 0


@pytest.mark.parametrize(("remat", "forward"), [("full", 2), ("minimal_with_context", 1), ("none", 1)])
def test_what_cudnn_keeps_is_saved_by_name(devices, remat, forward):
    """Attention is computed again in the backward pass only where its context is not saved."""
    layout = ed.Layout.create(fsdp=4, devices=devices)
    text = lowered_step("llama3-8b", layout, remat=remat).compile(compiler_options=GPU_OPTIONS).as_text()
    assert text.count('"__cudnn$fmhaScaleBiasSoftmax"') == forward
    assert text.count('"__cudnn$fmhaScaleBiasSoftmaxBackward"') == 1


def test_a_step_sends_as_much_at_once_as_beside_others(devices):
    """Its collectives are all asynchronous in one program, and none in the other."""
    layout, found = ed.Layout.create(fsdp=2, tensor=2, devices=devices), []
    lowered = lowered_step("llama3-8b", layout)
    for more in ({}, WITHOUT_ASYNCHRONOUS):
        text = lowered.compile(compiler_options=GPU_OPTIONS | more).as_text()
        sent: dict[tuple[str, str, str], int] = {}
        for one in collectives(parse(text), layout.sizes):
            key = one.kind, one.shape, one.phase
            sent[key] = sent.get(key, 0) + one.total
        found.append((sent, " reduce-scatter-start(" in text))
    assert found[0][0] == found[1][0] and [starts for _, starts in found] == [True, False]


def test_a_step_of_what_the_host_has_compiles(devices):
    """These devices list no memories, so that offload cannot be seen: the step is that without it."""
    layout = ed.Layout.create(fsdp=4, devices=devices)
    layout = dataclasses.replace(layout, offload=Offload(optimizer=("*",)))
    lowered_step("llama3-8b", layout).compile(compiler_options=GPU_OPTIONS)


@pytest.mark.parametrize("topology", ["h100:1x1", "b200:1x1"])
@pytest.mark.parametrize("kind", ["bfloat16", "float32", "int8", "fp8"])
def test_no_row_is_multiplied_by_all_weights(topology, kind):
    """Values and gradients by a kernel each, of whole tiles and of some with remainders, and of a decoding step."""
    found = gpus(topology)
    rounding = ed.LowPrecision(mode=kind) if kind in ("int8", "fp8") else None
    dtype = jnp.dtype("bfloat16" if rounding else kind)

    def run(x, weight, counts, out_bar):
        def product(x, weight):
            weight = weight if rounding is None else Rounded(weight, None, rounding)
            return grouped_products(x, (weight,), counts, form=GroupedForm("triton"))[0]

        out, pull = jax.vjp(product, x, weight)
        return out, *pull(out_bar)

    def like(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(found[0]))

    for rows, groups, inner, outer in ((8192, 16, 2048, 1408), (64, 128, 2048, 768), (8192, 16, 200, 136)):
        weight, counts = like(groups, inner, outer, dtype=jnp.float32), like(groups, dtype=jnp.int32)
        with tracing_for(found):
            lowered = jax.jit(run).lower(like(rows, inner), weight, counts, like(rows, outer))
            compiled = lowered.compile(compiler_options=GPU_OPTIONS)
        text, temporaries = compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes
        assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 3 and " while(" not in text
        assert temporaries < (1e5 if rounding is None else 4 * (rows + groups) * (inner + outer))


def test_a_step_on_one_gpu_compiles():
    """Pallas is told of the kind of GPU where no `shard_map` tells it."""
    found = gpus("h100:1x1")
    with tracing_for(found):
        lowered = lowered_step("gpt-oss-20b", ed.Layout.create(devices=found), blocks=slice(1))
        text = lowered.compile(compiler_options=GPU_OPTIONS).as_text()
    assert set(attention_kernels(parse(text))) == {"triton"} and "grouped_columns_kernel" in text


def test_benchmarks_compile(monkeypatch):
    """Those of an accelerator, on one H100: the kernels that it has, and steps that copy no weights."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    bench, found = importlib.import_module("bench_accelerator"), gpus("h100:1x1")
    shapes = bench.Shapes(model="tiny", rows=1, seq_len=1024, decoding=(2,), attention=bench.Shapes().attention[:1])
    kinds = set()
    with tracing_for(found):
        for program in bench.programs(found, shapes):
            kinds.add(program.name.split(",")[0])
            lowered = program.function.lower(*program.arguments)
            if not program.name.startswith(("cudnn", "dot", "chunked", "training")):
                lowered.compile(compiler_options=GPU_OPTIONS)
    assert {"cudnn", "triton", "grouped product by triton", "grouped product by blocks"} <= kinds


@pytest.mark.parametrize("sizes", [dict(tensor=4), dict(data=4)])
def test_the_loop_of_generation_compiles(devices, sizes):
    layout = ed.Layout.create(**sizes, devices=devices)
    config = ed.get_config("llama3-8b")
    model = ed.abstract(dataclasses.replace(config, blocks=config.blocks[:2]), layout=layout, precision=BF16)
    prompt = jax.ShapeDtypeStruct((8, 512), jnp.int32, sharding=NamedSharding(layout.mesh, PartitionSpec("data")))
    arrays, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def run(arrays, prompt):
        return ed.generate(eqx.combine(arrays, static), prompt, max_new_tokens=64)

    compiled = jax.jit(run).lower(arrays, prompt).compile(compiler_options=GPU_OPTIONS)
    assert compiled.memory_analysis().temp_size_in_bytes < 4e9


@pytest.mark.parametrize(
    ("name", "page_size", "kernels"),
    [("llama3-8b", None, {}), ("llama3-8b", 64, {"paged_attention": 2}),
     ("qwen3-30b-a3b", 64, {"paged_attention": 2, "grouped_rows_kernel": 6})],
)  # fmt: skip
def test_a_step_of_the_engine_compiles(devices, name, page_size, kernels):
    """A decoding step of eight slots copies neither cache nor weights, but small arrays of its sampling."""
    layout = ed.Layout.create(tensor=4, devices=devices)
    config = ed.get_config(name)
    model = ed.abstract(dataclasses.replace(config, blocks=config.blocks[:2]), layout=layout, precision=BF16)
    sizes = dict(rows=8, length=32768, page_size=page_size)
    plan = plan_decoding(model, Machine.of(devices), **sizes, options=GPU_OPTIONS)
    memory = plan.memory
    print(f"{name}: {memory}, copied {plan.copied}")
    assert plan.kernels == kernels and {one.kind for one in plan.collectives} >= {"all-reduce"}
    assert memory.outputs < 1e6 < memory.temporaries < memory.cache and plan.copied < memory.parameters / 20


def test_nothing_in_a_step_of_the_engine_waits_for_the_host(devices):
    """The host reads the condition of a branch, or of a loop of unknown length, before it launches anything more.

    And nothing of a cache is copied, not the small positions either: keys and values are where kernels are tuned.
    """
    layout = ed.Layout.create(devices=devices[:1])
    config = ed.get_config("qwen3-0.6b")
    rows, length, vocab = 8, 256, 4096
    model = unstack_in_place(
        ed.abstract(dataclasses.replace(config, blocks=config.blocks[:2]), layout=layout, precision=BF16)
    )
    arrays, static = eqx.partition(Models(model, None), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    cache = unstack_cache(model, abstract_cache(model.config, rows, length, dtype=jnp.bfloat16, layout=layout))

    def like(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.replicated())

    def forward(arrays, cache, tokens, *inputs):
        state = programs.EngineState(cache=cache, tokens=tokens)
        return programs.forward(eqx.combine(arrays, static), state, *inputs)

    inputs = like(rows), like(rows, 1), like(rows, 1), like(rows)
    lowered = [jax.jit(forward, donate_argnums=(1, 2)).lower(arrays, cache, like(rows, length), *inputs)]
    batch, logits = SamplingBatch.greedy(rows, -(-vocab // 32), 0), like(rows, vocab, dtype=jnp.float32)
    for variant in SAMPLING_VARIANTS:
        sample = functools.partial(programs.sample, num_top=0, variant=variant)
        lowered.append(
            jax.jit(sample, donate_argnums=0).lower(like(rows, length), like(rows), like(rows), logits, batch)
        )
    for each in lowered:
        text = each.compile(compiler_options=GPU_OPTIONS).as_text()
        loops = [line for line in text.splitlines() if " while(" in line]
        assert " conditional(" not in text and all("known_trip_count" in line for line in loops)
        assert f"s32[{rows},{length}]{{1,0}} copy(" not in text
