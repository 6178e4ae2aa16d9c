"""Test routing replay: tokens are routed to the experts that were used when they were sampled."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.signals import Signals
from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.expert_choices import check_choices, choices_shape
from eqx_decoders.training.objectives.token_log_probs import target_log_probs
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused
from tests.models import filled


ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8)
NORM = RMSNormConfig()
PLAIN = BlockConfig(mixer=ATTENTION, mlp=MLPConfig(mlp_dim=8), pre_mlp_norm=NORM)
TWO, THREE = (
    dataclasses.replace(PLAIN, mlp=ExpertsConfig(num_experts=6, num_experts_per_token=count, mlp_dim=6))
    for count in (2, 3)
)
CONFIG = DecoderConfig(vocab_size=32, embed_dim=16, blocks=(TWO, TWO, THREE), final_norm=NORM)
ROWS, LENGTH = 2, 7
MASK = np.arange(LENGTH)[None] > np.asarray([[1], [3]])


def batch_of(experts):
    tokens = np.random.default_rng(3).integers(0, 32, (ROWS, LENGTH)).astype(np.int32)
    return Batch(tokens=tokens, loss_mask=MASK, signals=Signals(experts=experts))


@eqx.filter_jit
@eqx.filter_value_and_grad(has_aux=True)
def loss(model, batch):
    found = target_log_probs(model, batch)
    return -jnp.sum(jnp.where(found.real, found.found.log_probs, 0.0)), found.found.log_probs


@pytest.fixture(scope="module", params=["alone", pytest.param("between others", marks=pytest.mark.slow)])
def model(request):
    blocks = CONFIG.blocks if request.param == "alone" else (TWO, PLAIN, TWO, PLAIN, THREE)
    return filled(dataclasses.replace(CONFIG, blocks=blocks))


@pytest.fixture(scope="module")
def routed_experts(model):
    """Return the experts chosen by the router, `[batch, length, layers, experts_per_token]`."""
    choices = model.replace(expert_choices=True)(batch_of(None).tokens).stats.choices
    assert choices.shape == (3, ROWS, LENGTH, 3) and choices_shape(CONFIG) == (3, 3)
    return np.moveaxis(np.asarray(choices), 0, 2).astype(np.int16)


@pytest.mark.slow
def test_replaying_the_current_routing_changes_nothing(model, routed_experts):
    """Values and gradients are equal to the bit. The router chooses the experts of tokens without saved routing."""
    wanted = loss(model, batch_of(routed_experts))
    half = np.where(np.arange(LENGTH)[None, :, None, None] % 2, routed_experts, -1).astype(np.int16)
    for experts in (np.full_like(routed_experts, -1), half):
        found = loss(model, batch_of(experts))
        assert all(np.array_equal(*e) for e in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))


@pytest.mark.slow
def test_replaying_other_experts_changes_only_later_tokens(model, routed_experts):
    place, layer = 4, 1
    others = routed_experts.copy()
    others[0, place, layer, :2] = (routed_experts[0, place, layer, :2] + 2) % 6
    (_, changed), gradient = loss(model, batch_of(others))
    (_, wanted), before = loss(model, batch_of(np.full_like(routed_experts, -1)))
    differs = np.asarray(changed != wanted)
    assert not differs[0, :place].any() and differs[0, place:-1].all() and not differs[1].any()
    kernel = lambda model: model.scanned_layers[0].unit[0].mlp.router.kernel  # noqa: E731
    assert not np.array_equal(kernel(gradient)[1], kernel(before)[1])


@pytest.mark.slow
def test_replaying_the_current_routing_changes_no_gradient(model, routed_experts):
    plain, replayed = loss(model, batch_of(None)), loss(model, batch_of(routed_experts))
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(replayed), strict=True):
        assert_allclose(one, other, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "execution",
    [
        dict(batch_split=2),
        dict(layout=dict(stage=2, data=2), pipeline=ed.Pipeline(microbatches=2)),
        dict(layout=dict(context=2, data=2), context_order="zigzag"),
        dict(layout=dict(expert=2, fsdp=2), remat="full"),
    ],
)
def test_routing_is_reported_and_replayed_with_microbatches(execution):
    model = filled(dataclasses.replace(CONFIG, blocks=(TWO,) * 4))
    tokens = np.random.default_rng(1).integers(0, 32, (8, 8)).astype(np.int32)
    experts = np.random.default_rng(2).permuted(np.tile(np.arange(6), (8, 8, 4, 1)), axis=-1)[..., :2].astype(np.int16)
    batch = Batch(tokens=tokens, loss_mask=np.ones((8, 8), bool), signals=Signals(experts=experts))
    options = dict(execution)
    if "layout" in options:
        options["layout"] = ed.Layout.create(devices=jax.devices()[:4], **options["layout"])
        split = model.place(options["layout"])
    else:
        split = model
    split = split.replace(**options)
    (wanted, _), gradient = loss(model, batch)
    (found, _), split_gradient = loss(split, batch)
    assert float(found) == pytest.approx(float(wanted), rel=1e-5)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(split_gradient), strict=True):
        assert_allclose(one, other, atol=2e-4)
    if "context_order" not in options:
        one, other = (each.replace(expert_choices=True)(tokens).stats.choices for each in (model, split))
        assert_array_equal(one, other)


def test_replay_without_experts_or_saved_routing_is_refused(model):
    with refused(ConfigError, "replay", "experts"):
        check_choices(dataclasses.replace(CONFIG, blocks=(PLAIN,)), "replay")
    few = np.zeros((ROWS, LENGTH, 2, 3), np.int16)
    with refused(ConfigError, "Inputs.by_layer['experts']", "2, 7, 3"):
        loss(model, batch_of(few))
