"""Test the values of a critic and their loss, for any packing, microbatches and mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.host_rows import place
from eqx_decoders.data.signals import Signals
from eqx_decoders.errors import ConfigError
from eqx_decoders.model.decoder_config import with_scores
from eqx_decoders.training.objectives.policy_loss import value_loss
from eqx_decoders.training.objectives.scores import ValueObjective, token_values
from tests.compare import assert_close
from tests.errors import refused
from tests.models import filled, rich_decoder
from tests.training.objectives.test_objectives import FORMS, after_a_step, batch_of


CLIP = 0.3


def critic():
    return filled(dataclasses.replace(with_scores(rich_decoder(1), 1)))


def with_returns(batch: Batch) -> Batch:
    """Return the batch with old values and returns as its signals."""
    signals = batch.signals
    assert signals is not None
    kept = Signals(
        policy=signals.policy, values=signals.old, returns=signals.advantages, completion_ids=signals.completion_ids
    )
    return dataclasses.replace(batch, signals=dataclasses.replace(kept, max_completions=signals.max_completions))


def test_values_equal_the_head_output_after_each_token():
    model, batch = critic(), with_returns(batch_of(*FORMS[1]))
    found = token_values(model, batch)
    arrays = dict(segment_ids=batch.segment_ids, positions=batch.positions)
    assert_close(found, model(batch.tokens, **arrays).logits[..., 0])
    with refused(ConfigError, "DecoderConfig.scores=None"):
        token_values(filled(rich_decoder(1)), batch)


@pytest.mark.slow
def test_value_loss_step_equals_the_formula():
    model, objective = critic(), ValueObjective(clip=CLIP)
    rows, packed = (with_returns(batch_of(*each)) for each in FORMS)
    values = token_values(model, rows)
    signals = rows.signals
    assert signals is not None
    weights, old, returns = (jnp.asarray(x)[:, 1:] for x in (signals.policy, signals.values, signals.returns))
    want = value_loss(
        values[:, :-1], returns, weights=weights, old=old, clip=CLIP
    )  # the value after the previous token
    new, metrics = after_a_step(objective, model, rows)
    assert_close(metrics.loss, want, units=128)
    assert 0 < metrics.objective["value_clip"] < 1
    layout = ed.Layout.create(fsdp=2, context=2, tensor=2)
    placed = model.place(layout).replace(context_order="zigzag")
    for other, batch, step in ((model, rows, dict(gradient_accumulation_steps=2)), (placed, packed, {})):
        other_new, other_metrics = after_a_step(objective, other, batch, **step)
        assert_close(other_metrics, metrics, units=1024)
        for a, b in zip(jax.tree.leaves(other_new), jax.tree.leaves(new), strict=True):
            assert_close(a, b, units=1024)
    assert_close(token_values(placed, place(packed, layout, 2)), token_values(model, packed), units=256)
    wider, _ = after_a_step(ValueObjective(clip=10.0), model, rows)
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(wider), jax.tree.leaves(new), strict=True))
