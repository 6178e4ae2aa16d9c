"""NF4: the levels are QLoRA's, and all is as with the arrays that the weights stand for."""

import statistics

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.errors import ConversionError
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.model.quantize import group_sizes, quantized
from eqx_decoders.numerics.einsum import einsum, grouped_products
from eqx_decoders.numerics.grouped_matmul import GroupedForm
from eqx_decoders.numerics.low_rank import LowRank
from eqx_decoders.numerics.nf4_weight import LEVELS, NF4, NF4Weight
from eqx_decoders.numerics.quantized_weight import quantized_weights
from eqx_decoders.sharding.axes import axes, frozen, named_leaves, replaced
from eqx_decoders.training.lora import add_lora, merge_lora
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.settings.lora import LORA_WEIGHTS, LoRAConfig
from eqx_decoders.training.step.step import Trainer
from tests.compare import assert_allclose, assert_array_equal, assert_close
from tests.errors import refused
from tests.models import draw, filled, layout_of, rich_decoder, some_tokens
from tests.numerics.test_grouped_matmul import RAGGED_DOT


LORA = LoRAConfig(rank=2, targets=("*.out", "*.down"))


@pytest.fixture(scope="module")
def model() -> ed.Decoder:
    """Quantized; the plain model is `ed.dequantize(model)`."""
    return ed.quantize(filled(rich_decoder(2)), "nf4", group_size=8)


@eqx.filter_jit
def logits(model, ids):
    return model(ids).logits


@eqx.filter_jit
def gradients(model, batch):
    """Loss and gradients of all low-rank pairs."""
    pairs = {name: leaf for name, leaf in named_leaves(model).items() if ".lora_" in name}
    return jax.value_and_grad(lambda pairs: ed.next_token_loss(replaced(model, pairs), batch)[0])(pairs)


def test_levels_are_quantiles_of_the_normal_distribution():
    """Section 3 of the paper: eight quantiles on one side and nine on the other, zero among both."""
    quantile, edge = statistics.NormalDist().inv_cdf, 0.9677083
    above, below = (list(map(quantile, np.linspace(edge, 0.5, count)[:-1])) for count in (9, 8))
    want = np.sort([*above, 0.0, *np.negative(below)])
    assert_allclose(LEVELS, want / want[-1], atol=1e-5)


@pytest.mark.slow
def test_each_number_is_the_nearest_level():
    weight = draw(0, (16, 6))
    node = jax.jit(lambda weight: quantized(weight, NF4, (8, 1), 1, 1))(weight)
    assert isinstance(node, NF4Weight) and node.values.dtype == jnp.int4
    blocks = np.asarray(weight).reshape(2, 8, 6)
    scales = np.abs(blocks).max(axis=1, keepdims=True)
    index = np.abs(blocks[..., None] / scales[..., None] - np.asarray(LEVELS)).argmin(axis=-1)
    assert_array_equal(np.asarray(node.values, np.int32) + 8, index.reshape(16, 6))
    assert_array_equal(node.scales, scales[:, 0])
    assert_close(node.dequantized(), (np.asarray(LEVELS, np.float32)[index] * scales).reshape(16, 6), units=1)
    every = NF4Weight(jnp.arange(-8, 8).astype(jnp.int4)[:, None], jnp.ones((1, 1)), None, (16, 1), 1, 1)
    assert_array_equal(every.dequantized()[:, 0], np.asarray(LEVELS, np.float32))
    assert not np.any(quantized(jnp.zeros((8, 6)), NF4, (8, 1), 1, 1).dequantized())


PATTERNS = {
    "query": ("... embed, embed heads head_dim -> ... heads head_dim", (2, 5, 16), (16, 3, 4), 1, 2),
    "out": ("b l heads head_dim, heads head_dim embed -> b l embed", (2, 5, 4, 8), (4, 8, 6), 2, 1),
    "experts": ("experts b embed, experts embed mlp -> experts b mlp", (3, 5, 16), (3, 16, 6), 1, 1),
    "transposed": ("b l heads nope, rank heads nope -> b l heads rank", (2, 5, 3, 4), (16, 3, 4), 1, 2),
}


@pytest.mark.slow(fast=("False-query", "True-out"))
@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("flatten", [False, True])
def test_products_match_the_array(kind, flatten):
    """Values and gradients of x; with one group for each column, too."""
    pattern, rows, shape, inner, outer = PATTERNS[kind]
    x = draw(1, rows)

    @jax.jit
    def run(weight):
        results = []
        for block in (8, 99):
            node = quantized(weight, NF4, (block, 1), inner, outer)
            for one in (node, node.array()):
                y, back = jax.vjp(lambda x, one=one: einsum(pattern, x, one, layout=layout_of(flatten=flatten)), x)
                results.append((y, back(jnp.cos(y))))
        return results

    for got, want in zip(*[iter(run(draw(2, shape)))] * 2, strict=True):
        assert_close(got, want, units=64)


@pytest.mark.slow
@pytest.mark.parametrize("form", [RAGGED_DOT, GroupedForm("blocks", 8)])
def test_rows_of_experts_are_multiplied_as_by_the_array(form):
    """Below a low-rank pair, too; one expert's weight is a row of the array."""
    counts, x = jnp.asarray((9, 0, 4, 3)), draw(1, (24, 16))
    node = quantized(draw(2, (4, 16, 6)), NF4, (8, 1), 1, 1)
    pair = LowRank(base=node, lora_a=draw(3, (4, 16, 2)), lora_b=draw(4, (4, 2, 6)), scale=0.5)
    assert_close(node.dequantized_at(2, jnp.float32), node.array()[2], units=1)

    @jax.jit
    def run(*weights):
        rows = lambda x, weight: grouped_products(x, (weight,), counts, form=form)[0][:16]  # noqa: E731
        results = [jax.vjp(lambda x, w=w: rows(x, w), x) for w in weights]
        return [(y, back(jnp.cos(y))[0][:16]) for y, back in results]

    one, array, pair, added = run(node, node.array(), pair, pair.array())
    assert_close(one, array, units=32)
    assert_close(pair, added, units=64)


@pytest.mark.slow
def test_a_model_is_that_of_its_arrays(model):
    plain, ids = ed.dequantize(model), some_tokens(2, 9)
    assert all(isinstance(node, NF4Weight) for node in quantized_weights(model).values())
    assert group_sizes(model) == {8: len(quantized_weights(model))}
    assert_close(logits(model, ids), logits(plain, ids), units=512)
    assert not np.allclose(logits(model, ids), logits(filled(rich_decoder(2)), ids), atol=1e-3)
    assert {f"{path}.{part}" for path in quantized_weights(model) for part in ("values", "scales")} <= frozen(model)


@pytest.mark.slow
def test_a_mesh_changes_nothing(model):
    layout, ids = ed.Layout.create(fsdp=2, tensor=2, data=2), some_tokens(8, 8)
    assert_close(logits(model.place(layout), ids), logits(model, ids), units=1024)
    made = ed.quantize(filled(rich_decoder(2)).place(layout), "nf4", group_size=8)
    for (path, one), other in zip(named_leaves(made).items(), named_leaves(model).values(), strict=True):
        assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32), err_msg=path)
    out = made.scanned_layers[0].unit[0].mixer.out
    assert out.values.sharding.spec == made.place(layout).scanned_layers[0].unit[0].mixer.out.values.sharding.spec
    assert axes(made)["scanned_layers.0.unit.0.mixer.out.scales"] == ("layers", "groups", "embed")


@pytest.mark.slow
def test_low_rank_pairs_are_trained_over_it(model):
    """QLoRA: gradients are those over the arrays, on a mesh too; a step moves pairs alone; merging gives arrays."""
    tuned = add_lora(model, LORA, key=jax.random.key(0))
    pairs = {name: leaf + 0.1 for name, leaf in named_leaves(tuned).items() if ".lora_" in name}
    tuned, batch = replaced(tuned, pairs), ed.Batch(tokens=some_tokens(8, 8))
    want = gradients(ed.dequantize(tuned), batch)
    for one in (tuned, tuned.place(ed.Layout.create(fsdp=4, tensor=2))):
        assert_close(gradients(one, batch), want, units=2048)
    trainer = Trainer.create(OptimizerConfig(trainable=LORA_WEIGHTS, learning_rate=0.1), tuned, steps=2)
    state, _ = trainer.step(trainer.init(jax.tree.map(jnp.copy, tuned), key=jax.random.key(1)), batch)
    after = named_leaves(state.model)
    for path, leaf in named_leaves(tuned).items():
        same = np.asarray(leaf).tobytes() == np.asarray(after[path]).tobytes()
        assert same == (".lora_" not in path), path
    merged = merge_lora(tuned).scanned_layers[0].unit[0].mixer.out
    assert_close(merged, merge_lora(ed.dequantize(tuned)).scanned_layers[0].unit[0].mixer.out, units=4)


@pytest.mark.slow
def test_checkpoints_have_the_bits(model, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model, data_state={}, config={}, wait=True)
        restored, _, _ = checkpoints.restore(model)
    for path, leaf in named_leaves(model).items():
        assert named_leaves(restored)[path].dtype == leaf.dtype
        assert_array_equal(np.asarray(named_leaves(restored)[path]), np.asarray(leaf), err_msg=path)
    assert isinstance(restored.scanned_layers[0].unit[0].mixer.out, NF4Weight)


def test_nf4_cannot_be_exported_to_hugging_face(tmp_path):
    model = ed.quantize(ed.abstract(ed.get_config("tiny")), "nf4", group_size=16)
    with refused(ConversionError, "nf4", "16 x 1", "dequantize"):
        ed.save_hf(model, tmp_path / "model")
