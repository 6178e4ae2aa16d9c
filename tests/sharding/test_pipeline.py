"""Pipeline parallelism: its schedule, and its equality with the scan in values, gradients and statistics."""

import dataclasses
import itertools
import os

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import eqx_decoders as ed
from eqx_decoders.blocks.pipelined_stack import run_in_pipeline
from eqx_decoders.data.config import DataConfig
from eqx_decoders.layers.embedding.per_layer_embedding import PerLayerEmbeddingConfig, PerLayerInputConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.sharding.pipeline import run_pipeline
from eqx_decoders.sharding.pipeline_config import PipelineConfig
from eqx_decoders.training.describe import describe_pipeline
from eqx_decoders.training.settings.run import TrainConfig
from eqx_decoders.training.settings.step import MeshConfig
from tests.cases import check, draw, legal
from tests.compare import assert_array_equal, assert_close
from tests.errors import refused
from tests.models import EMBED, VOCAB, filled, packed, rich_decoder, some_tokens
from tests.programs import drop_compiled_programs
from tests.steps import ATTENTION, DENSE, NORM, ROUTED, SPARSE, decoder, results


SHAPES = [(2, 2, 1, False), (2, 4, 2, False), (4, 4, 1, False), (2, 3, 2, False), (4, 5, 2, False), (2, 4, 2, True)]
# repeats of one, of fewer than stages, of a number without a common divisor, of more
ORDERS = [*SHAPES, (4, 8, 3, False), (4, 8, 6, True), (8, 9, 2, False), (2, 5, 1, True)]


# --- the schedule ---


@pytest.mark.parametrize("stages, count, repeats, delay", ORDERS)
def test_each_microbatch_passes_all_pieces_in_order(stages, count, repeats, delay):
    """A simulation: the inputs of a stage were computed before, with `delay` at least two iterations before."""
    lag = 2 if delay else 1
    setup = ed.Pipeline(microbatches=count, repeats=repeats, delay=delay)
    total = repeats * count + lag * (stages - 1)
    made: dict[tuple[int, int], tuple[int, list[int]]] = {}  # (item, stage): iteration, pieces passed
    work, gaps = 0, set()
    for i, stage in itertools.product(range(total), range(stages)):
        item = i - lag * stage
        if not 0 <= item < repeats * count:
            continue
        before = (item, stage - 1) if stage > 0 else (item - count, stages - 1)
        when, passed = made.get(before, (None, []))
        if when is not None:
            assert i - when >= lag
            gaps.add(i - when)
        made[item, stage] = i, [*passed, item // count * stages + stage]
        work += 1
    for microbatch in range(count):
        _, passed = made[(repeats - 1) * count + microbatch, stages - 1]
        assert passed == list(range(repeats * stages))
    assert min(gaps) == lag
    assert setup.bubble_share(stages) == pytest.approx(1 - work / (total * stages))


def test_bubble_share():
    assert ed.Pipeline(microbatches=4).bubble_share(4) == 3 / 7
    assert ed.Pipeline(microbatches=8, repeats=2).bubble_share(4) == 3 / 19
    assert ed.Pipeline(microbatches=8, repeats=2, delay=True).bubble_share(4) == 6 / 22
    assert ed.Pipeline(microbatches=1).bubble_share(1) == 0


@pytest.mark.slow(fast=("2-4-2-False-False",))
@pytest.mark.parametrize(
    "stages, count, repeats, delay, contiguous", [*((*order, True) for order in ORDERS), (2, 4, 2, False, False)]
)
def test_the_pipeline_follows_the_schedule(stages, count, repeats, delay, contiguous):
    """Each layer appends a digit to the values of its input, so that the output shows the order of the layers."""
    layout = ed.Layout.create(stage=stages, data=8 // stages)
    layers, rows = stages * repeats, 8 * count
    setup = ed.Pipeline(microbatches=count, repeats=repeats, delay=delay)

    def stage(weights, numbers, ids, x, microbatch):
        assert weights.shape == numbers.shape == (1,)
        told = jnp.stack([microbatch, jnp.max(ids), jnp.min(ids), numbers[0]])[None]
        return (x * 3 + (weights[0] % 3).astype(x.dtype)) % 65521, told

    weights, ids = jnp.arange(layers), jnp.broadcast_to(jnp.arange(count)[:, None], (count, 8))
    x = jnp.arange(float(rows)).reshape(rows, 1, 1)
    run = jax.jit(lambda *arrays: run_pipeline(stage, *arrays, pipeline=setup, layout=layout, contiguous=contiguous))
    y, told = run(weights, weights, ids, x)
    want = x
    for layer in range(layers):
        want = (want * 3 + layer % 3) % 65521
    assert_array_equal(y, want)
    each = jnp.broadcast_to(jnp.arange(count)[None], (layers, count))
    own = jnp.broadcast_to(jnp.arange(layers)[:, None], (layers, count))
    assert_array_equal(told, jnp.stack([each, each, each, own], axis=-1))


@pytest.mark.slow(fast=("4-5-2-False-iteration",))
@pytest.mark.parametrize("gather", ["iteration", "repeat", "once"])
@pytest.mark.parametrize("stages, count, repeats, delay", SHAPES)
def test_gradients_equal_those_of_a_scan(stages, count, repeats, delay, gather):
    """The layers have no finite gradient at zero, so bubbles must not compute with zeros."""
    layout = ed.Layout.create(stage=stages, fsdp=8 // stages).with_batch_over_stage()
    setup = ed.Pipeline(microbatches=count, repeats=repeats, delay=delay, gather=gather)
    keys = jax.random.split(jax.random.key(0), 3)
    weights = jax.random.normal(keys[0], (2 * stages * repeats, 4, 4)) * 0.5
    x, scales = (jax.random.normal(key, (8 * count, 3, 4)) for key in keys[1:])

    def layer(x, weight, scale):
        x = x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True))
        y = jnp.tanh(x @ weight) * scale
        return y, jnp.sum(y**2)

    def stage(weights, by_layer, scale, x, microbatch):
        return jax.lax.scan(lambda x, weight: layer(x, weight, scale), x, weights)

    def piped(weights, x, scales):
        cut = jnp.swapaxes(scales.reshape(-1, count, *scales.shape[1:]), 0, 1)
        policy = jax.checkpoint_policies.nothing_saveable
        y, stats = run_pipeline(
            stage, weights, None, cut, x, pipeline=setup, layout=layout, contiguous=True, policy=policy
        )
        return loss(y, jnp.sum(stats, axis=1))

    def plain(weights, x, scales):
        return loss(*jax.lax.scan(lambda x, weight: layer(x, weight, scales), x, weights))

    def loss(y, stats):
        factors = jnp.sin(jnp.arange(stats.size, dtype=jnp.float32))
        return jnp.sum(jnp.cos(y + jnp.arange(4.0)[None, None])) + jnp.sum(factors * stats), stats

    def both(run):
        return jax.jit(jax.value_and_grad(run, (0, 1, 2), has_aux=True))(weights, x, scales)

    assert_close(both(piped), both(plain), units=512)


# --- models ---

MIXED = dict(stage=2, fsdp=2, tensor=2)


def check_equal(model: ed.Decoder, layout: ed.Layout, pipeline: ed.Pipeline, rows: int = 8, units: float = 256, **step):
    """Loss, gradients and statistics of packed documents are those of one device."""
    tokens, segments = packed(rows)
    batch = ed.Batch(tokens=tokens, segment_ids=segments)
    want = results(model.replace(remat=None), batch, **step)
    got = results(model.replace(pipeline=pipeline).place(layout), batch, **step)
    assert_close(got, want, units=units)


def test_a_small_model_equals_itself_without_a_pipeline():
    """Four layers run in two stages and two repeats; the fifth layer runs after them."""
    layout = ed.Layout.create(stage=2, fsdp=2, devices=jax.devices()[:4])
    block = dataclasses.replace(DENSE, mlp=None, pre_mlp_norm=None)
    check_equal(filled(decoder(*(block,) * 5)), layout, ed.Pipeline(microbatches=2, repeats=2))


def test_inputs_of_layers_are_optional():
    layout = ed.Layout.create(stage=2, devices=jax.devices()[:2])
    model = ed.abstract(decoder(*(DENSE,) * 2), layout=layout, pipeline=ed.Pipeline(microbatches=2))
    ctx = ed.ForwardContext(positions=jnp.zeros((4, 3), jnp.int32), execution=model.execution)
    x = jax.ShapeDtypeStruct((4, 3, model.config.embed_dim), jnp.float32)
    out = eqx.filter_eval_shape(run_in_pipeline, model.scanned_layers[0], x, ctx)
    assert out.x.shape == x.shape


@pytest.mark.slow
def test_a_model_equals_itself_without_a_pipeline():
    """Ten repeats of two layers, of which eight fill the pieces; a mesh that also splits batch and weights."""
    model = filled(rich_decoder(10), remat="full", layer_stats=True)
    check_equal(model, ed.Layout.create(**MIXED), ed.Pipeline(microbatches=2, repeats=2))


@pytest.mark.slow
@pytest.mark.parametrize("depths", [0, 1])
def test_statistics_of_experts_match_the_whole_batch(depths):
    """Behind a dense layer: a prefix of one that runs as ever; and before multi-token prediction."""
    mtp = ed.MTPConfig(num_depths=1, block=SPARSE, norm=NORM) if depths else None
    model = filled(decoder(DENSE, *(SPARSE,) * 4, mtp=mtp), remat="save_qkv_proj", experts="dropless")
    check_equal(model, ed.Layout.create(stage=2, expert=2, fsdp=2), ed.Pipeline(microbatches=2, repeats=2))


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["repeat", "once"])
@pytest.mark.parametrize(
    "sizes, microbatches, repeats, delay",
    [
        (dict(stage=2, data=4), 2, 1, False),
        (dict(stage=2, fsdp=4), 4, 2, False),
        (dict(stage=4, fsdp=2), 4, 1, False),
        (dict(stage=2, fsdp_transpose=2, tensor_sequence=2), 3, 2, False),
        (dict(stage=2, context=2, tensor=2), 4, 2, True),
    ],
)
def test_every_mesh_equals_one_device(sizes, microbatches, repeats, delay, gather):
    tokens, segments = packed(24, 16)
    batch, model = ed.Batch(tokens=tokens, segment_ids=segments), filled(rich_decoder(9), remat="full")
    setup = ed.Pipeline(microbatches=microbatches, repeats=repeats, delay=delay, gather=gather)
    piped = model.replace(pipeline=setup).place(ed.Layout.create(**sizes))
    assert_close(results(piped, batch), results(model, batch), units=256)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ring", "all_to_all", "ring_all_to_all"])
def test_rows_that_are_split_within_stages(form):
    """Keys go round, or heads are exchanged, among the devices of a stage."""
    tokens, segments = packed(24, 16)
    batch, model = ed.Batch(tokens=tokens, segment_ids=segments), filled(rich_decoder(9), remat="full")
    setup = ed.Pipeline(microbatches=2, repeats=2)
    layout = ed.Layout.create(stage=2, context=4 if form == "ring_all_to_all" else 2, fsdp=-1)
    piped = model.replace(pipeline=setup, context_form=form).place(layout)
    assert_close(results(piped, batch), results(model, batch), units=256)


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["dropless", "capacity", "dense"])
@pytest.mark.parametrize("exchange", ["gather", "all_to_all"])
def test_experts_on_several_devices(experts, exchange):
    block = dataclasses.replace(SPARSE, mlp=dataclasses.replace(ROUTED, capacity_factor=1.0))
    model = filled(decoder(*(block,) * 5), remat="full", experts=experts, expert_exchange=exchange)
    layout = ed.Layout.create(stage=2, expert=2, tensor=2)
    check_equal(model, layout, ed.Pipeline(microbatches=4, repeats=2))


@pytest.mark.slow
def test_with_gradient_accumulation():
    model = filled(decoder(*(SPARSE,) * 4), layer_stats=True)
    check_equal(model, ed.Layout.create(**MIXED), ed.Pipeline(microbatches=2), gradient_accumulation_steps=2, rows=16)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "minimal", "minimal_offloaded", "save_out_proj"])
def test_remat_policies(policy):
    model = filled(rich_decoder(4), remat=policy)
    check_equal(model, ed.Layout.create(stage=2, fsdp=4), ed.Pipeline(microbatches=4))


@pytest.mark.slow
def test_dropout_is_that_of_microbatches_run_one_by_one():
    """Keys of layers are folded by the number of the microbatch, which has every fourth row."""
    count, layers, layout = 4, 5, ed.Layout.create(stage=2, fsdp=2, tensor=2)
    block = dataclasses.replace(DENSE, dropout=0.25, mlp=MLPConfig(mlp_dim=24, dropout=0.25))
    model = filled(decoder(*(block,) * layers), remat="full")
    x = jax.random.normal(jax.random.key(1), (8, 13, EMBED))
    keys = jax.random.split(jax.random.key(2), layers)
    positions = jnp.broadcast_to(jnp.arange(13)[None], (8, 13))

    def plain(model, x):
        (segment,) = model.scanned_layers
        parts = []
        for number in range(count):
            folded = [jax.random.fold_in(keys[layer], number) for layer in range(4)]
            y = x[number::count]
            ctx = ed.ForwardContext(positions=positions[number::count], execution=model.execution)
            for block, key in zip(segment.unstacked()[:4], folded, strict=True):
                y, _, _ = block(y, ctx, key=key)
            parts.append(y)
        y = jnp.stack(parts, axis=1).reshape(x.shape)
        ctx = ed.ForwardContext(positions=positions, execution=model.execution)
        y, _, _ = segment.unstacked()[4](y, ctx, key=keys[4])
        return jnp.sum(jnp.sin(3 * y)), y

    def piped(model, x):
        ctx = ed.ForwardContext(positions=positions, execution=model.execution)
        y = run_in_pipeline(model.scanned_layers[0], x, ctx, keys=keys, inputs=({},)).x
        return jnp.sum(jnp.sin(3 * y)), y

    run = eqx.filter_jit(eqx.filter_value_and_grad(plain, has_aux=True))
    ours = eqx.filter_jit(eqx.filter_value_and_grad(piped, has_aux=True))
    want, got = run(model, x), ours(model.replace(pipeline=ed.Pipeline(microbatches=count)).place(layout), x)
    assert_close(
        (got[0], named_leaves(got[1].scanned_layers)), (want[0], named_leaves(want[1].scanned_layers)), units=256
    )


@pytest.mark.slow
def test_what_layers_read_beside_the_stream():
    """Embeddings of their own for each layer and token, and keys and values of a layer before the pipeline."""
    per_layer = PerLayerEmbeddingConfig(features=8, vocab_size=VOCAB)
    further = (ed.ExtraLayerConfig(layer=PerLayerInputConfig(features=8), pre_norm=NORM),)
    first = dataclasses.replace(DENSE, post_layers=further, shares_kv_as="first")
    borrowing = dataclasses.replace(ATTENTION, kv_shared_from="first")
    later = dataclasses.replace(DENSE, mixer=borrowing, post_layers=further)
    model = filled(decoder(first, *(later,) * 5, per_layer_embedding=per_layer), remat="full")
    check_equal(model, ed.Layout.create(**MIXED), ed.Pipeline(microbatches=4, repeats=2))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_a_fresh_case_equals_the_plain_one(number):
    """Of all decoders, two equal layers on two stages; rows of eight, two or four of them in a microbatch."""
    drop_compiled_programs()
    seed = int(os.environ["FRESH_SEED"])
    generator = np.random.default_rng([seed, number])
    fixed = dict(dropout=0.0, cache="none", mesh="one device", kv_shared_from=False)
    drawn = (draw(generator) | fixed for _ in itertools.count())
    case = next(case for case in drawn if legal(case) and case["heads"] != "multi-query") | dict(mesh="stage")
    print(f"repeat with FRESH_SEED={seed}: {case}")
    check(case, seed, pipeline=ed.Pipeline(microbatches=2, delay=False))


# --- what can't be ---


def test_wrong_settings_are_refused():
    layout = ed.Layout.create(stage=2, data=4)
    tokens = some_tokens(6, 4)

    def run(model, **options):
        return model.replace(pipeline=ed.Pipeline(**options)).place(layout)(tokens)

    model = filled(decoder(*(DENSE,) * 4))
    with refused(ed.ConfigError, "6 sequences", "Pipeline.microbatches=4"):
        run(model, microbatches=4)
    with refused(ed.ConfigError, "Pipeline.microbatches=1", "Layout.stage=2"):
        run(model, microbatches=1)
    with refused(ed.ConfigError, "Pipeline.microbatches=3", "delay=True"):
        run(model, microbatches=3, delay=True)
    with refused(ed.ConfigError, "Layout.stage=2", "Pipeline.repeats=3", "6", "4"):
        run(model, microbatches=3, repeats=3)


def test_settings_of_a_run_say_how_layers_are_piped():
    mesh, dataset = MeshConfig(stage=2, fsdp=2), DataConfig(batch_size=16)
    pipeline = PipelineConfig(microbatches=4, repeats=2, delay=True, gather="once")
    run = TrainConfig(mesh=mesh, data=dataset, pipeline=pipeline).execution()
    assert run.pipeline == ed.Pipeline(microbatches=4, repeats=2, delay=True, gather="once")
    assert run.layout.sizes["stage"] == 2
    assert run.layout.activation_spec("batch length") == PartitionSpec(("data", "fsdp", "stage"), None)
    assert describe_pipeline(run) == "pipeline: 2 stages x 2 repeats, 4 microbatches, 20.0 % bubbles"
    assert describe_pipeline(TrainConfig(mesh=mesh, data=dataset).execution()) is None
    with refused(ed.ConfigError, "batch_size=8", "pipeline.microbatches=4"):
        TrainConfig(mesh=mesh, data=DataConfig(batch_size=8), pipeline=pipeline).execution()
    with refused(ed.ConfigError, "mesh.stage", "pipeline.microbatches"):
        TrainConfig(pipeline=pipeline)


def test_layers_that_stages_do_not_divide_are_split_like_embeddings():
    layout = ed.Layout.create(stage=2, fsdp=2, tensor=2)
    spec = layout.weight_spec
    assert spec("layers embed mlp", (4, 16, 8)) == PartitionSpec("stage", "fsdp", "tensor")
    assert spec("layers embed mlp", (3, 16, 8)) == PartitionSpec(None, ("fsdp", "stage"), "tensor")
    assert spec("layers embed mlp", (3, 2, 8)) == PartitionSpec(None, "fsdp", "tensor")
    assert spec("layers norm", (3, 16)) == PartitionSpec(None, None)
