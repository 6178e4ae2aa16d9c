"""Test the zigzag token order: loss, gradients and evaluation equal those of the plain order."""

import dataclasses
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.errors import ConfigError
from eqx_decoders.families.doge import DynamicMaskConfig
from eqx_decoders.families.jetmoe import HeadMixtureConfig
from eqx_decoders.layers.attention import context_parallel
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.attention.context_parallel import zigzag
from eqx_decoders.layers.attention.kernels.registry import run_max_scores
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.attention.moba import BlockSelection
from eqx_decoders.layers.embedding.engram import EngramConfig
from eqx_decoders.layers.mask import Causal, SlidingWindow
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.parallel_mixers import NamedMixer, ParallelMixersConfig
from eqx_decoders.layers.recurrent.gated_delta_net import GatedDeltaNetConfig
from eqx_decoders.model.init import with_mtp
from eqx_decoders.model.mtp import shift_left
from eqx_decoders.model.mtp_config import MTPConfig
from eqx_decoders.training.step.loss import evaluation_sums, next_tokens
from eqx_decoders.training.step.zigzag import in_context_order
from tests.compare import assert_array_equal, assert_close
from tests.errors import refused
from tests.layers.common import run_attention
from tests.models import EMBED, VOCAB, filled, packed, rich_decoder


@eqx.filter_jit
def results(model, batch):
    """Return the loss, metrics, gradient, and evaluation sums."""
    loss = eqx.filter_value_and_grad(ed.next_token_loss, has_aux=True)
    return loss(model, batch), evaluation_sums(model, batch)


def rows(length=32):
    tokens, segments = packed(4, length)
    mask = np.random.default_rng(0).random((4, length)) < 0.7
    return ed.Batch(tokens=tokens, segment_ids=segments, loss_mask=jnp.asarray(mask))


def rich(latent: bool) -> ed.Decoder:
    config = rich_decoder(2)
    if latent:
        mixer = LatentAttentionConfig(num_heads=4, q_rank=None, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=4)
        config = dataclasses.replace(config, blocks=(dataclasses.replace(config.blocks[0], mixer=mixer),))
    return filled(config, attention="chunked", attention_maxima=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("latent", "sizes"),
    [
        (False, dict(context=4, tensor=2)),
        (True, dict(context=2, data=4)),
        (False, dict(context=2, tensor_sequence=2, data=2)),
    ],
)
def test_zigzag_order_equals_plain_order(latent, sizes):
    batch, model = rows(), rich(latent)
    many = model.place(ed.Layout.create(**sizes)).replace(context_order="zigzag")
    (got, got_bar), got_sums = results(many, batch)
    (want, want_bar), want_sums = results(model, batch)
    same = [eqx.filter(x, eqx.is_array) for x in (got_bar, want_bar)]
    assert_close([x.astype(jnp.float32) for x in jax.tree.leaves(same[0])], jax.tree.leaves(same[1]), units=256)
    assert_close((got, got_sums), (want, want_sums))


def with_depths() -> ed.Decoder:
    config = with_mtp(dataclasses.replace(rich_decoder(1), embed_dim=EMBED), 2)
    return filled(dataclasses.replace(config, mtp=dataclasses.replace(config.mtp, loss_weight=0.5)), attention="dot")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(context_order="zigzag"), marks=pytest.mark.slow),
        pytest.param(dict(context_order="plain"), marks=pytest.mark.slow),
        pytest.param(dict(context_order="zigzag", context_form="ring"), marks=pytest.mark.slow),
    ],
)
def test_multi_token_prediction_in_zigzag_order(options):
    batch, model = rows(), with_depths()
    many = model.place(ed.Layout.create(context=4, data=2)).replace(**options)
    (got, got_bar), got_sums = results(many, batch)
    (want, want_bar), want_sums = results(model, batch)
    same = [jax.tree.leaves(eqx.filter(x, eqx.is_array)) for x in (got_bar, want_bar)]
    assert_close([x.astype(jnp.float32) for x in same[0]], same[1], units=256)
    assert_close((got, got_sums), (want, want_sums))


@pytest.mark.slow
@pytest.mark.parametrize("order", ["plain", "zigzag"])
def test_residual_streams_are_not_gathered(order):
    """In a step with two MTP depths, only token ids are gathered along the sequence."""
    model = with_depths().place(ed.Layout.create(context=4, data=2)).replace(context_order=order, context_form="ring")
    arrays, static = eqx.partition((model, rows(64)), eqx.is_array)
    text = jax.jit(lambda arrays: results(*eqx.combine(arrays, static))).lower(arrays).compile().as_text()
    moved = re.findall(r" = \(?f32\[([\d,]+)\]\S* (?:all-gather|all-to-all|all-reduce)", text)
    assert moved and not [shape for shape in moved if {"64", str(EMBED)} <= set(shape.split(","))], moved


@pytest.mark.slow
def test_next_tokens_in_zigzag_order():
    order, x = zigzag(24, 3), jnp.arange(1, 25)[None, :, None]
    for count in (0, 1, 5, 30):
        wanted = shift_left(x, count)[:, order]
        assert_array_equal(shift_left(x[:, order], count, order), wanted)


@pytest.mark.slow
def test_tokens_are_reordered_and_keys_are_not(monkeypatch):
    """Each device has tokens from the start and from the end of a row, with their targets."""
    layout = ed.Layout.create(context=4, data=2)
    model = rich(False).place(layout).replace(context_order="zigzag")
    batch = ed.Batch(tokens=jnp.arange(32, dtype=jnp.int32)[None].repeat(2, 0))
    turned, targets, weights = in_context_order(model.config, model.execution, batch, *next_tokens(batch))
    pieces = [*range(4), *range(28, 32), *range(4, 8), *range(24, 28)]
    assert_array_equal(turned.tokens[0, :16], pieces)
    assert_array_equal(turned.positions[1, :16], pieces)
    assert_array_equal(targets[0, :16], [(token + 1) % 32 for token in pieces])
    assert_array_equal(weights[0, :16], [token != 31 for token in pieces])

    def in_order(inputs, options, kernel):
        query, key, positions = inputs.query, inputs.key, inputs.positions.key_positions
        rising = jnp.all(positions == jnp.arange(32)[None]) & jnp.all(jnp.diff(key[0, :, 0, 0]) == 1)
        rising &= jnp.all(inputs.selected[0, 0] == (jnp.arange(32) < 5)[None])
        return query + rising.astype(query.dtype), jnp.zeros(query.shape[:3])

    monkeypatch.setattr(context_parallel, "run_kernel", in_order)
    key = turned.tokens.astype(jnp.float32)[:, :, None, None]
    places = dict(query_positions=turned.positions, key_positions=turned.positions, mask=Causal())
    chosen = jnp.broadcast_to(turned.tokens[:, None, None] < 5, (2, 1, 32, 32))
    out = run_attention(jnp.zeros((2, 32, 1, 1)), key, key, selected=chosen, execution=model.execution, **places)
    assert_array_equal(out[0], 1.0)


@pytest.mark.slow(fast=("zigzag",))
@pytest.mark.parametrize("order", ["plain", "zigzag"])
def test_max_scores_use_the_configured_order(monkeypatch, order):
    aligned = []

    def recording(inputs, options):
        aligned.append(options.aligned)
        return run_max_scores(inputs, options)

    monkeypatch.setattr("eqx_decoders.layers.attention.mla.run_max_scores", recording)
    model = rich(True).replace(layout=ed.Layout.create(context=2, data=4), context_order=order)
    eqx.filter_eval_shape(evaluation_sums, model, rows())
    assert aligned == [order == "plain"]


def changed(**layers) -> ed.DecoderConfig:
    config = rich_decoder(1)
    return dataclasses.replace(config, blocks=(dataclasses.replace(config.blocks[0], **layers),))


ATTENTION = dict(num_heads=2, num_kv_heads=1, head_dim=4)
DELTA = GatedDeltaNetConfig(num_key_heads=2, num_heads=2, key_dim=4, value_dim=4)
ENGRAM = EngramConfig(
    embed_dim=EMBED, vocab_size=VOCAB, layers=(0,), layer=0, num_heads=2, head_dim=8, vocab_bases=(20, 30), taps=2
)


@pytest.mark.slow(fast=("recurrence", "further tokens"))
@pytest.mark.parametrize(
    ("config", "named"),
    [
        (lambda: changed(mixer=DELTA), "blocks[0].mixer (GatedDeltaNetConfig)"),
        (
            lambda: changed(mixer=AttentionConfig(**ATTENTION, selection=BlockSelection(size=4, top_k=2))),
            "blocks[0].mixer",
        ),
        (lambda: changed(pre_layers=(ed.ExtraLayerConfig(layer=ENGRAM),)), "blocks[0].pre_layers.0 (EngramConfig)"),
        (
            lambda: dataclasses.replace(
                rich_decoder(1), mtp=MTPConfig(num_depths=1, block=changed(mixer=DELTA).blocks[0], norm=RMSNormConfig())
            ),
            "mtp.block.mixer (GatedDeltaNetConfig)",
        ),
    ],
    ids=["recurrence", "blocks", "n-grams", "further tokens"],
)
def test_order_dependent_layers_are_refused(config, named):
    model = ed.abstract(config(), context_order="zigzag")
    with refused(ConfigError, "Execution.context_order='zigzag'", f"DecoderConfig.{named}"):
        in_context_order(model.config, model.execution, rows(), *next_tokens(rows()))


@pytest.mark.parametrize(
    ("mixer", "depends"),
    [
        pytest.param(AttentionConfig(**ATTENTION), False, id="attention"),
        pytest.param(
            HeadMixtureConfig(attention=AttentionConfig(**ATTENTION), num_experts=4), False, id="head mixture"
        ),
        pytest.param(DynamicMaskConfig(attention=AttentionConfig(**ATTENTION), top_k=2), True, id="dynamic mask"),
        pytest.param(DELTA, True, id="recurrence"),
        pytest.param(
            ParallelMixersConfig(
                mixers=(
                    NamedMixer(name="attention", mixer=AttentionConfig(**ATTENTION)),
                    NamedMixer(name="delta", mixer=DELTA),
                )
            ),
            True,
            id="parallel",
        ),
    ],
)
def test_mixers_declare_their_order_dependence(mixer, depends):
    assert mixer.depends_on_token_order is depends


def test_expert_capacities_and_spans_are_refused():
    sparse = changed(mlp=ExpertsConfig(num_experts=4, num_experts_per_token=2, mlp_dim=8, capacity_factor=1.0))
    model = ed.abstract(sparse, context_order="zigzag")
    with refused(ConfigError, "ExpertsConfig"):
        in_context_order(model.config, model.execution, rows(), *next_tokens(rows()))
    model = model.replace(experts="dropless")
    in_context_order(model.config, model.execution, rows(), *next_tokens(rows()))
    spans = dataclasses.replace(rows(), spans=rows().tokens)
    with refused(ConfigError, "Execution.context_order='zigzag'", "spans"):
        in_context_order(model.config, model.execution, spans, *next_tokens(spans))
    split = model.replace(layout=ed.Layout.create(context=4, data=2))
    with refused(ConfigError, "12", "8"):
        in_context_order(split.config, split.execution, rows(12), *next_tokens(rows(12)))
    window = ed.abstract(changed(mixer=AttentionConfig(**ATTENTION, mask=SlidingWindow(3))), context_order="zigzag")
    in_context_order(window.config, window.execution, rows(), *next_tokens(rows()))
