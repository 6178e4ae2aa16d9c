"""Test QK-clip: query and key weights are scaled if the maximum attention score exceeds a threshold."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.batch import Batch
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.model.init import with_mtp
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.qk_clip import clipped_weights, qk_clip
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.step_config import StepConfig
from tests.compare import assert_array_equal, assert_close
from tests.errors import refused
from tests.models import EMBED, VOCAB, filled, packed, rich_decoder


SIZES = dict(kv_rank=8, nope_dim=6, rope_dim=4, value_dim=5, query_scale=3.0)


def decoder() -> ed.DecoderConfig:
    """Return a decoder with two cycles of MLA layers with and without a query latent; one layer has fewer heads."""
    mixers = (
        LatentAttentionConfig(num_heads=4, q_rank=8, **SIZES),
        None,
        LatentAttentionConfig(num_heads=2, q_rank=None, **SIZES),
    )
    blocks = tuple(ed.BlockConfig(mixer=mixer, mlp=None) for mixer in mixers)
    return ed.DecoderConfig(vocab_size=VOCAB, embed_dim=EMBED, blocks=blocks * 2, final_norm=RMSNormConfig(), tied=True)


@eqx.filter_jit
def maxima(model, tokens, segments):
    return model.replace(attention_maxima=True)(tokens, segment_ids=segments).stats.max_scores


def test_scores_are_clipped_to_the_threshold():
    """The first layer is tested, because its input does not change. Smaller scores do not change."""
    tokens, segments = packed(4)
    model = filled(decoder())
    before = maxima(model, tokens, segments)
    assert before.shape == (4, 4) and not np.any(before[1::2, 2:])
    assert maxima(model, tokens[:, :5], segments[:, :5]).shape == (4, 4)
    threshold = float(np.median(before[0]))
    clipped = qk_clip(model, before, threshold)
    after = maxima(clipped, tokens, segments)
    assert_close(after[0], np.minimum(before[0], threshold), units=64)
    assert np.sum(np.asarray(after[0]) < np.asarray(before[0]) - 0.1) == 2
    changed = {name for name, leaf in named_leaves(clipped).items() if np.any(leaf != named_leaves(model)[name])}
    places = ("0.unit.0.mixer.query_up", "0.unit.0.mixer.kv_up", "0.unit.2.mixer.query", "0.unit.2.mixer.kv_up")
    assert changed <= {f"scanned_layers.{place}" for place in places} and f"scanned_layers.{places[0]}" in changed
    old, new = (each.scanned_layers[0].unit[0].mixer.kv_up for each in (model, clipped))
    assert_array_equal(old[..., 6:], new[..., 6:])  # weights of values


def test_clip_factors_of_layers_and_heads():
    """Weights without RoPE get the square root of the factor, rotated queries the factor; shared keys do not change."""
    model = filled(decoder())
    scores = jnp.asarray([[50.0, 200, 100, 400], [100, 800, 0, 0], [-5, 1, 1000, 2], [400, 0, 0, 0]])
    gamma = np.minimum(1, 100 / (np.maximum(scores, 0) + 1e-6))
    clipped = qk_clip(model, scores)
    for place, name, rows, heads in ((0, "query_up", slice(0, None, 2), 4), (2, "query", slice(1, None, 2), 2)):
        old, new = (each.scanned_layers[0].unit[place].mixer for each in (model, clipped))
        here = gamma[rows, None, :heads, None]
        for weight, second in ((name, here), ("kv_up", np.ones_like(here))):
            ratio = np.asarray(getattr(new, weight)) / np.asarray(getattr(old, weight))
            assert_close(ratio[..., :6], np.broadcast_to(np.sqrt(here), ratio[..., :6].shape), units=8)
            assert_close(ratio[..., 6:], np.broadcast_to(second, ratio[..., 6:].shape), units=8)


@pytest.mark.slow
def test_step_clips_after_the_optimizer_update():
    """The factor depends on the maximum score of all microbatches. A threshold above all scores changes nothing."""
    tokens, segments = packed(4)
    batch, model = Batch(tokens=tokens, segment_ids=segments), filled(decoder())
    largest = maxima(model, tokens, segments)

    def stepped(threshold, parts):
        config = StepConfig(qk_clip_threshold=threshold, gradient_accumulation_steps=parts)
        trainer = Trainer.create(OptimizerConfig(eps=1.0, warmup_steps=0), model, steps=4, config=config)
        return eqx.filter_jit(trainer.advance)(trainer.init(model, key=jax.random.key(0)), batch)

    for parts in (1, 2):
        plain, nothing = stepped(None, parts)
        assert nothing.stats is None
        state, metrics = stepped(1.0, parts)
        assert_close(metrics.stats.max_scores, largest, units=64)
        assert_close(named_leaves(state.model), named_leaves(qk_clip(plain.model, largest, 1.0)), units=256)
    assert_close(named_leaves(stepped(1e4, parts)[0].model), named_leaves(plain.model), units=256)


@pytest.mark.slow
def test_weight_averages_use_clipped_weights():
    tokens, segments = packed(2)
    model = filled(decoder())
    optimizer = OptimizerConfig(warmup_steps=0, ema_decay=0.75)
    trainer = Trainer.create(optimizer, model, steps=4, config=StepConfig(qk_clip_threshold=1.0))
    state = trainer.init(model, key=jax.random.key(0))
    new, _ = eqx.filter_jit(trainer.advance)(state, Batch(tokens=tokens, segment_ids=segments))
    before, after = named_leaves(model), named_leaves(new.model)
    clipped = clipped_weights(model)
    assert all(
        np.abs(after[name] - before[name]).max() > 1e-3 for name in clipped
    )  # more than the optimizer changes in a step with a rate of 3e-4
    want = {name: 0.75 * before[name] + 0.25 * after[name] for name in clipped}
    assert_close({name: new.ema[name] for name in clipped}, want, units=64)


@pytest.mark.slow
def test_largest_scores_may_be_negative():
    """Documents have one token, also with microbatches."""
    tokens = jnp.asarray([[3], [5]])
    model = filled(decoder())
    largest = maxima(model, tokens, jnp.ones_like(tokens))
    assert np.any(largest < 0)
    config = StepConfig(qk_clip_threshold=1e4, gradient_accumulation_steps=2)
    trainer = Trainer.create(OptimizerConfig(), model, steps=4, config=config)
    assert_close(eqx.filter_jit(trainer._gradient)(model, Batch(tokens=tokens), None)[1].stats.max_scores, largest)


@pytest.mark.slow
def test_layers_of_multi_token_prediction_are_clipped():
    config = with_mtp(dataclasses.replace(decoder(), blocks=decoder().blocks[:1]), 2)
    model = filled(config)
    clipped = qk_clip(model, jnp.full((3, 4), 400.0))
    assert_close(
        clipped.mtp.depth.block.mixer.query_up[..., 6:], model.mtp.depth.block.mixer.query_up[..., 6:] / 4, units=8
    )
    without = qk_clip(model, jnp.full((1, 4), 400.0))  # scores of a call without MTP layers
    assert_array_equal(without.mtp.depth.block.mixer.kv_up, model.mtp.depth.block.mixer.kv_up)


@pytest.mark.slow
def test_unsupported_qk_clip_is_refused():
    model = filled(decoder())
    with refused(ed.ConfigError, "qk_clip", "attention_maxima=True"):
        qk_clip(model, model(jnp.ones((1, 2), jnp.int32)).stats)
    only = OptimizerConfig(trainable=("embedding.*",))
    with refused(ed.ConfigError, "qk_clip_threshold=5.0", "kv_up", "trainable"):
        Trainer.create(only, model, steps=1, config=StepConfig(qk_clip_threshold=5.0))
    with refused(ed.ConfigError, "qk_clip_threshold=5.0", "latent"):
        Trainer.create(OptimizerConfig(), filled(rich_decoder(1)), steps=1, config=StepConfig(qk_clip_threshold=5.0))
    with refused(ed.ConfigError, "qk_clip_threshold=0.0"):
        StepConfig(qk_clip_threshold=0.0)
