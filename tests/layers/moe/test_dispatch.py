"""Experts on a mesh equal experts on one device, in values, statistics and gradients, whatever the routing."""

import dataclasses
import functools
import re
from unittest.mock import Mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from jax import lax

import eqx_decoders as ed
from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe import experts as module
from eqx_decoders.layers.moe.chunked_sum import sum_chunks
from eqx_decoders.layers.moe.experts import Experts, ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.moe.sorted_rows import sort_by_expert
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.numerics import einsum
from eqx_decoders.numerics.grouped_matmul import block_rows
from eqx_decoders.numerics.low_rank import LowRank
from eqx_decoders.numerics.rings import grouped_product, levels
from tests.compare import assert_close
from tests.models import VOCAB, filled, packed
from tests.numerics.test_grouped_matmul import TRITON
from tests.programs import drop_compiled_programs


EMBED, MLP = 16, 12
# with all biases, clamps and an offset, so that a term that is added too often changes the result
RICH = ExpertsConfig(
    num_experts=8, num_experts_per_token=3, mlp_dim=MLP, router=RouterConfig(bias=True),
    activation="quick_gelu", up_offset=1.0, limit=0.7, bias=True,
)  # fmt: skip
SHARED = dataclasses.replace(RICH, shared=MLPConfig(mlp_dim=8), shared_gate=True)
ALL = dataclasses.replace(RICH, num_experts=4, num_experts_per_token=4)
SCALED = dataclasses.replace(
    RICH, num_experts_per_token=1, bias=False, router=RouterConfig(bias=True, score="sigmoid", input_scaling=True)
)
NARROW = dataclasses.replace(RICH, gated=False, latent_dim=8, up_offset=0.0, limit=None)
MESHES = [
    dict(expert=8),
    dict(expert=4, fsdp=2),
    dict(expert=2, fsdp=2, tensor=2),
    dict(data=2, expert=4),
    dict(expert=4, tensor=2),
    dict(fsdp=8),
    dict(expert=2, fsdp_transpose=2, tensor_sequence=2),
    dict(expert=2, context=2, tensor=2),
]
EXCHANGES = ["gather", "all_to_all"]
# layer, whether it has low-rank pairs, mesh, how its experts exchange tokens, number of rounds
CASES = {
    "ring": (RICH, True, dict(expert=2, fsdp=2, tensor=2), "gather", 1),
    "travel": (SCALED, False, dict(expert=8), "all_to_all", 3),
    "fsdp": (RICH, False, dict(fsdp=8), "auto", 1),
    "pieces": (NARROW, False, dict(expert=4, tensor=2), "gather", 2),
}


@functools.cache
def layer(config: ExpertsConfig, pairs: bool = False) -> Experts:
    """Return a layer with random weights from NumPy; with pairs, two projections have low-rank pairs and magnitudes."""
    draws = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(draws.normal(0.1, 0.5, shape), jnp.float32)

    shapes = eqx.filter_eval_shape(lambda key: config.build(EMBED, key=key), jax.random.key(0))
    arrays, static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    built = eqx.combine(jax.tree.map(lambda leaf: draw(*leaf.shape), arrays), static)

    def pair(weight):
        experts, inner, outer = weight.shape
        return LowRank(weight, draw(experts, inner, 2), draw(experts, 2, outer), 0.5, draw(experts, outer))

    return eqx.tree_at(lambda m: (m.up, m.down), built, (pair(built.up), pair(built.down))) if pairs else built


def with_equal_routing(module: Experts) -> Experts:
    """Make all tokens select the same neighboring experts."""
    router, number = module.router, module.config.num_experts
    bias = jnp.where(jnp.arange(number) < module.config.num_experts_per_token, 50.0, 0.0)
    return eqx.tree_at(lambda m: (m.kernel, m.bias), router, (jnp.zeros_like(router.kernel), bias))


def tokens(rows: int, length: int, seed: int = 1):
    """Return tokens and their positions; with more than two tokens, every third one is padding."""
    x = np.random.default_rng(seed).normal(size=(rows, length, EMBED)).astype(np.float32)
    places = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    return jnp.asarray(x), jnp.asarray(np.where((places % 3 == 2) & (length > 2), -1, places))


def call(diff, positions, execution):
    """Return a weighted sum of the output, the output and the statistics."""
    module, x = diff
    out, stats = module(x, ed.ForwardContext(positions=positions, execution=execution))
    weights = jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    return jnp.sum(weights * out.astype(jnp.float32)), (out, stats)


def program(execution):
    """Return values and gradients."""
    gradient = jax.value_and_grad(call, has_aux=True)
    return eqx.filter_jit(lambda diff, positions: gradient(diff, positions, execution))


# the reference: all experts on all tokens, on one device
alone = program(ed.Execution(experts="dense"))


def shard(module, x, layout):
    """Shard weights and tokens as in the layout, if their sizes can be divided."""
    x = jax.device_put(x, layout.activation_sharding("batch length embed", x.shape))
    return jax.device_put(module, layout.shardings(module)), x


def check_equal(run, module, x, positions, layout):
    """Check normal routing, all tokens with the same experts, and padding only."""
    routed = eqx.tree_at(lambda m: m.router, module, with_equal_routing(module))
    for each, places in ((module, positions), (routed, positions), (module, jnp.full_like(positions, -1))):
        want = alone((each, x), places)
        assert_close(run(shard(each, x, layout), places), want, units=256)
        assert np.any(want[1][0].down if places is positions else 0) == (places is positions)


def execution(name: str) -> ed.Execution:
    """Return the execution options of a case: a byte limit that gives the number of rounds."""
    config, _, mesh, exchange, rounds = CASES[name]
    some = dict(exchange_bytes=48 * (config.latent_dim or EMBED) * 4 // rounds) if rounds > 1 else {}
    return ed.Execution(layout=ed.Layout.create(**mesh), expert_exchange=exchange, **some)


@functools.cache
def compiled(name: str):
    config, pairs, mesh, *_ = CASES[name]
    layout, (x, positions) = ed.Layout.create(**mesh), tokens(8, 6)
    run = program(execution(name))
    return layout, run.lower(shard(layer(config, pairs), x, layout), positions).compile()


@pytest.mark.slow(fast=("pieces",))
@pytest.mark.parametrize("name", CASES)
def test_mesh_equals_one_device(name):
    config, pairs, *_ = CASES[name]
    layout, run = compiled(name)
    check_equal(run, layer(config, pairs), *tokens(8, 6), layout)


def test_rounds_pad_tokens_that_they_do_not_divide(monkeypatch):
    """A prime number of tokens uses the minimum number of rounds, and all tokens are computed."""
    maps = Mock(wraps=lax.map)
    monkeypatch.setattr(lax, "map", maps)
    module, (x, positions) = layer(NARROW), tokens(8, 7)
    layout = ed.Layout.create(fsdp=8)
    run = jax.jit(lambda module, x, where: module(x, ed.ForwardContext(positions=positions, execution=where))[0],
                  static_argnums=2)  # fmt: skip
    found = run(*shard(module, x, layout), ed.Execution(layout=layout, exchange_bytes=3 * 8 * 4))
    assert_close(found, run(module, x, ed.Execution(experts="dense")), units=256)
    (_, (rows, indices, _)), _ = maps.call_args
    assert rows.shape == (3, 3, 8) and indices.shape[:2] == (3, 3)


def test_the_buffer_of_an_all_to_all_fits_exchange_bytes_after_a_gather(monkeypatch):
    """Each device first gathers the tokens of two devices. Nothing is compiled."""
    exchanges = Mock(wraps=lax.all_to_all)
    monkeypatch.setattr(lax, "all_to_all", exchanges)
    layout, (x, positions) = ed.Layout.create(expert=4, tensor_sequence=2), tokens(8, 6)
    where = ed.Execution(layout=layout, expert_exchange="all_to_all", exchange_bytes=2048)
    eqx.filter_eval_shape(call, (layer(RICH), x), positions, where)
    sizes = [buffer.size * buffer.dtype.itemsize for (buffer, *_), _ in exchanges.call_args_list]
    assert max(sizes) == 2048


@pytest.fixture
def count_ring_products(monkeypatch):
    """Enable two-level rings for small weights on CPU, and count the products that use them."""
    backend = dataclasses.replace(ed.Layout.create(fsdp=8).backend, gradient_rings=True)
    monkeypatch.setattr(ed.Layout, "backend", property(lambda self: backend))
    monkeypatch.setattr(grouped_product, "LANES", 1)
    monkeypatch.setattr(grouped_product, "ROWS", 1)
    monkeypatch.setattr(levels, "LANES", 1)
    monkeypatch.setattr(levels, "TERM_WIDTH", 8)
    products = Mock(wraps=grouped_product.ring_groups)
    monkeypatch.setattr(einsum, "ring_groups", products)
    return products


@pytest.mark.slow
def test_ring_reduce_scatter_gradients_equal_one_device(count_ring_products):
    layout, (x, positions) = ed.Layout.create(fsdp=4, tensor=2), tokens(8, 6)
    check_equal(program(ed.Execution(layout=layout)), layer(RICH), x, positions, layout)
    chosen = [ring for (of_each, *_), _ in count_ring_products.call_args_list for ring in of_each]
    assert chosen[:3] == [
        grouped_product.GroupRing(("fsdp",), (2, 2), dimension, 2) for dimension in (1, 1, 2)
    ]  # gate, up, down


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, some",
    [(dict(fsdp=4, expert=2), {}), (dict(fsdp=8), dict(exchange_bytes=192))],
)
def test_no_ring_if_devices_run_different_numbers_of_products(count_ring_products, mesh, some):
    """Sharded experts use as many chunks as they need. Each round would send a gradient. Nothing is compiled."""
    layout, diff = ed.Layout.create(**mesh), (layer(RICH), tokens(8, 6)[0])
    eqx.filter_eval_shape(program(ed.Execution(layout=layout, **some)), diff, tokens(8, 6)[1])
    assert count_ring_products.call_count == 0
    eqx.filter_eval_shape(program(ed.Execution(layout=ed.Layout.create(fsdp=8))), diff, tokens(8, 6)[1])
    assert count_ring_products.call_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("config", [SHARED, ALL, SCALED], ids=["shared", "all", "scaled"])
def test_every_mesh_equals_one_device(config, mesh, exchange):
    if config.num_experts % mesh.get("expert", 1) or (exchange == "all_to_all" and "expert" not in mesh):
        return
    layout = ed.Layout.create(**mesh)
    run = program(ed.Execution(layout=layout, expert_exchange=exchange))
    check_equal(run, layer(config), *tokens(8, 6), layout)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_half_precision_on_a_mesh_equals_one_device(exchange):
    layout, (x, positions) = ed.Layout.create(expert=2, fsdp=2, tensor=2), tokens(8, 6)
    x = x.astype(jnp.bfloat16)
    want = program(ed.Execution())((layer(SCALED), x), positions)[1]
    run = program(ed.Execution(layout=layout, expert_exchange=exchange))
    assert_close(run(shard(layer(SCALED), x, layout), positions)[1], want, units=4, dtype="bfloat16")


@pytest.mark.slow(fast=("gather-rich",))
@pytest.mark.parametrize("config", [RICH, SCALED], ids=["rich", "scaled"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_outputs_and_gradients_keep_the_dtypes_of_inputs_and_weights(config, exchange):
    """Tokens in bf16 and weights in f32 give an output in bf16 and gradients in f32. Nothing is compiled."""
    layout, (x, positions) = ed.Layout.create(expert=4, tensor=2), tokens(8, 6)
    run = program(ed.Execution(layout=layout, expert_exchange=exchange))
    diff = layer(config), x.astype(jnp.bfloat16)
    (_, (out, _)), gradient = eqx.filter_eval_shape(run, diff, positions)
    assert out.dtype == jnp.bfloat16
    assert [leaf.dtype for leaf in jax.tree.leaves(gradient)] == [leaf.dtype for leaf in jax.tree.leaves(diff)]


# --- shapes ---


@pytest.mark.slow
@pytest.mark.parametrize("rows, length", [(1, 1), (3, 4)])
def test_batch_that_the_mesh_does_not_divide(rows, length):
    """As in decoding: tokens are not exchanged; devices that cannot divide them compute the same tokens."""
    layout = ed.Layout.create(fsdp=2, expert=4)
    x, positions = tokens(rows, length)
    run = program(ed.Execution(layout=layout, expert_exchange="all_to_all"))
    assert_close(run(shard(layer(RICH), x, layout), positions), alone((layer(RICH), x), positions), units=256)


@pytest.mark.slow
@given(
    mesh=st.sampled_from([*MESHES, dict(data=2, expert=2, tensor=2), dict(tensor_sequence=2, context=2, expert=2)]),
    exchange=st.sampled_from([*EXCHANGES, "auto"]),
    rows=st.sampled_from([1, 2, 3, 4, 8, 16]),
    length=st.sampled_from([1, 4, 6]),
    experts=st.sampled_from([8, 16]),
    chosen=st.sampled_from([1, 2, 5, 8]),
    changes=st.fixed_dictionaries(
        dict(bias=st.booleans(), limit=st.sampled_from([None, 0.7]), up_offset=st.sampled_from([0.0, 1.0]))
    ),
    router=st.sampled_from([RICH.router, SCALED.router, RouterConfig(bias=True, order="score_first")]),
    pairs=st.booleans(),
)
@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_experts_on_any_mesh_equal_one_device(
    mesh, exchange, rows, length, experts, chosen, changes, router, pairs
):
    drop_compiled_programs()
    config = dataclasses.replace(RICH, num_experts=experts, num_experts_per_token=chosen, router=router, **changes)
    layout = ed.Layout.create(**mesh)
    run = program(ed.Execution(layout=layout, expert_exchange=exchange))
    check_equal(run, layer(config, pairs), *tokens(rows, length), layout)


def test_sorted_buffer_fits_the_worst_case_exactly():
    """At most three of five choices can belong to three experts."""
    chosen = jnp.asarray([[4, 0, 2, 1, 3], [1, 0, 2, 4, 3], [7, 7, 7, 7, 7]])
    places, sources = sort_by_expert(chosen.astype(jnp.int32), 3, 2)
    assert sources.tolist() == [1, 6, 3, 5, 2, 7, 15, 15, 15, 15, 15]  # by expert; then entries without an expert
    assert places.tolist() == [[11, 0, 4, 2, 11], [3, 1, 5, 11, 11], [11] * 5]


# --- on TPU ---


def ragged_by_gathering(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """Do what `lax.ragged_all_to_all` does, which XLA does not support on CPU."""
    everyone = [lax.all_gather(each, axis_name) for each in (operand, input_offsets, send_sizes, output_offsets)]
    me, place = lax.axis_index(axis_name), jnp.arange(output.shape[0])
    for rows, begins, sizes, lands in zip(*everyone, strict=True):
        index = place - lands[me]
        taken = ((index >= 0) & (index < sizes[me])).reshape(-1, *(1,) * (output.ndim - 1))
        output = jnp.where(taken, rows.at[begins[me] + index].get(mode="clip"), output)
    told = lax.all_to_all(recv_sizes, axis_name, 0, 0, tiled=True)
    return jnp.where(jnp.all(told == send_sizes), output, jnp.full_like(output, 7))


@pytest.mark.slow
def test_uses_ragged_all_to_all_on_tpu(monkeypatch):
    """The program for TPU, with its products and its exchange, run on CPU."""
    monkeypatch.setattr(ed.Layout, "platform", "tpu")
    exchange = Mock(side_effect=ragged_by_gathering)
    monkeypatch.setattr(lax, "ragged_all_to_all", exchange)
    config, layout = dataclasses.replace(RICH, num_experts_per_token=2), ed.Layout.create(expert=4, fsdp=2)
    x, positions = tokens(8, 6)
    check_equal(program(ed.Execution(layout=layout, experts="dropless")), layer(config), x, positions, layout)
    assert exchange.called


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pieces", "travel"])
def test_uses_triton_kernels_on_gpus(name, monkeypatch):
    """In interpret mode on a mesh. Rows without an expert do not change results, gradients or biases."""
    chosen = Mock(return_value=TRITON)
    monkeypatch.setattr(module, "choose_form", chosen)
    config, pairs, mesh, *_ = CASES[name]
    x, positions = tokens(8, 6)
    check_equal(program(execution(name)), layer(config, pairs), x, positions, ed.Layout.create(**mesh))
    assert chosen.called


# --- chunks ---


@pytest.mark.parametrize("number", [0, 1, 3])
def test_sums_chunks_and_differentiates_the_sum(number):
    def piece(index, inputs, indices):
        scale, x = inputs
        return jnp.sin(scale * x + jnp.asarray(index, jnp.float32)) + indices

    inputs, indices = (jnp.float32(0.7), jnp.arange(4.0)), jnp.arange(4.0)

    def fast(inputs):
        return jnp.sum(jnp.cos(indices) * sum_chunks(piece, jnp.int32(number), inputs, indices))

    def plain(inputs):
        return jnp.sum(jnp.cos(indices) * sum((piece(i, inputs, indices) for i in range(number)), jnp.zeros(4)))

    assert_close(jax.jit(jax.value_and_grad(fast))(inputs), jax.jit(jax.value_and_grad(plain))(inputs))


@pytest.mark.slow
def test_buffers_are_limited_to_one_round_and_one_chunk():
    """Of 24 tokens with three choices each, 48 choices may belong to a device's two experts; it takes 24 at a time."""
    (config, *_), (x, positions) = CASES["pieces"], tokens(8, 6)
    gradient = jax.grad(lambda x: call((layer(config), x), positions, execution("pieces"))[0])
    text, block = str(jax.make_jaxpr(gradient)(x)), block_rows(24 * 3, config.num_experts)
    assert f"f32[{24 + block},{MLP // 2}]" in text and f"f32[{48 + block},{MLP // 2}]" not in text
    assert f"f32[24,{config.latent_dim}]" in text and f"f32[48,{config.latent_dim}]" not in text


# --- communication ---


def shapes(name: str, kind: str) -> list[tuple[int, ...]]:
    """Return the result shapes of all operations of a type."""
    found = []
    for line in compiled(name)[1].compiled.as_text().splitlines():
        match = re.match(rf"\s*(?:ROOT )?%?[\w.\-]+ = (.*?) {kind}(?:-start)?\(", line)
        if match:
            found += [tuple(int(n) for n in dims.split(",") if n) for dims in re.findall(r"\w+\[([\d,]*)\]", match[1])]
    return found


@pytest.mark.slow
def test_gather_exchange_gathers_tokens_and_scatters_sums():
    """Experts are sharded over two devices; each device has twelve tokens."""
    gathered, scattered = shapes("ring", "all-gather"), shapes("ring", "reduce-scatter")
    assert (24, EMBED) in gathered and (12, EMBED) in scattered and not shapes("ring", "all-to-all")
    # weights of four experts are gathered over fsdp, and their gradients scattered; over tensor, half of them
    assert {shape for shape in gathered if MLP // 2 in shape[1:] and shape[0] != 8} == {
        (4, EMBED, MLP // 2), (4, MLP // 2, EMBED)
    }  # fmt: skip
    assert {(4, EMBED // 2, MLP // 2)} <= set(scattered)
    assert not any({EMBED, MLP} <= set(shape) for shape in gathered)


def test_all_to_all_sends_tokens_and_does_not_gather_weights():
    swapped = shapes("travel", "all-to-all")
    assert (2, EMBED) in swapped  # the buffer has room for all tokens of a device in a round
    assert not any({EMBED, MLP} <= set(shape) for shape in shapes("travel", "all-gather"))
    assert not any(shape[-1:] == (EMBED,) and len(shape) == 2 for shape in shapes("travel", "all-gather"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_routing_does_not_gather_the_logits_of_all_tokens(name):
    """XLA gathers the input of a sharded `lax.top_k`: logits of all tokens and experts, here 8 x 6 x 8."""
    assert (8, 6, 8) not in shapes(name, "all-gather")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_devices_sort_only_tokens_that_they_share_experts_with(name):
    """A device does not sort tokens of devices that do not share experts with it."""
    most = dict(ring=24 * 3, travel=8 * 6, fsdp=6 * 3, pieces=48 * 3)[name]
    sizes = [shape[0] for shape in shapes(name, "sort")]
    assert sizes and max(sizes) <= most


# --- complete models ---


def block(config: ExpertsConfig) -> BlockConfig:
    norm = RMSNormConfig()
    mixer = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8)
    return BlockConfig(mixer=mixer, mlp=config, pre_mixer_norm=norm, pre_mlp_norm=norm)


def check_model(mesh, exchange):
    routed = dataclasses.replace(SHARED, router=RouterConfig(balance_loss=0.1, z_loss=0.01))
    config = DecoderConfig(vocab_size=VOCAB, embed_dim=EMBED, blocks=(block(routed),) * 2, final_norm=RMSNormConfig())
    model, (tokens, segments) = filled(config, experts="dense"), packed(8)
    loss = eqx.filter_jit(eqx.filter_value_and_grad(ed.next_token_loss, has_aux=True))
    want = loss(model, ed.Batch(tokens=tokens, segment_ids=segments))
    many = model.replace(experts="dropless", expert_exchange=exchange, remat="full").place(ed.Layout.create(**mesh))
    assert_close(loss(many, ed.Batch(tokens=tokens, segment_ids=segments)), want, units=512)


@pytest.mark.slow
def test_a_model_on_a_mesh_equals_one_device():
    """With scan and remat, including statistics and the losses that use them."""
    check_model(dict(expert=2, fsdp=2, tensor=2), "gather")


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_model_on_every_mesh_equals_one_device(mesh, exchange):
    check_model(mesh, exchange)
