"""LongCat-Flash: what experts return reaches the stream a block later, once."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import eqx_decoders as ed
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.longcat_flash import longcat_flash
from eqx_decoders.model.mtp_config import MTPConfig
from tests.compare import assert_array_equal, assert_close
from tests.families.samples import FIXTURES, decode, sample
from tests.laws import forward
from tests.models import EMBED, VOCAB, filled, some_tokens


WEIGHTS = "model.safetensors"
_SIZES = DecoderSizes(
    vocab_size=VOCAB, embed_dim=EMBED, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8, mlp_dim=24
)
SMALL = longcat_flash(
    _SIZES, q_rank=8, kv_rank=8, nope_dim=4, value_dim=4, expert_dim=8, num_experts=4, num_zero_experts=4,
    num_experts_per_token=3,
)  # fmt: skip
FIRST, SECOND, *_ = SMALL.blocks


def test_a_shortcut_is_a_sum_after_two_blocks():
    """Computed layer by layer, from experts that keep nothing aside."""
    model, tokens = filled(dataclasses.replace(SMALL, blocks=(FIRST, SECOND), final_norm=None)), some_tokens(2, 5)

    @eqx.filter_jit
    def by_hand(model):
        ctx = ed.Context(jnp.broadcast_to(jnp.arange(5), (2, 5)), execution=model.execution)
        first, second = (block for segment in model.segments for block in segment.unstacked())
        x = model.embedding(tokens, ctx)
        h = x + first.mixer(first.pre_mixer_norm(x), ctx)[0]
        normed = first.pre_mlp_norm(h)
        both = dataclasses.replace(first.mlp, config=dataclasses.replace(first.mlp.config, shortcut=None))
        aside = both(normed, ctx)[0] - first.mlp.shared(normed, ctx)
        h = h + first.mlp.shared(normed, ctx)
        h = h + second.mixer(second.pre_mixer_norm(h), ctx)[0]
        return h + second.mlp(second.pre_mlp_norm(h), ctx) + aside

    assert_close(model(tokens).hidden, by_hand(model), units=256)


def test_what_experts_send_is_used_once():
    def blocks(*blocks):
        return dataclasses.replace(SMALL, blocks=blocks)

    assert blocks(FIRST, SECOND, FIRST, SECOND) == SMALL
    with pytest.raises(ed.ConfigError, match=r"blocks\[0\]\.mlp\.shortcut='experts'"):
        blocks(FIRST)
    with pytest.raises(ed.ConfigError, match=r"blocks\[1\]\.mlp\.shortcut='experts'"):
        blocks(FIRST, FIRST, SECOND)
    with pytest.raises(ed.ConfigError, match=r"blocks\[2\]\.shortcut_from"):
        blocks(FIRST, SECOND, SECOND)
    with pytest.raises(ed.ConfigError, match=r"MTPConfig\.block must have no shortcut"):
        MTPConfig(num_depths=1, block=FIRST, norm=SMALL.final_norm)
    with pytest.raises(ed.ConfigError, match=r"ExpertsConfig\.shortcut=experts"):
        dataclasses.replace(FIRST.mlp, shared=None)


@pytest.mark.slow
def test_any_order_of_blocks_runs_as_a_scan():
    """Where a segment begins with a block that adds, and where others stand between."""
    plain = dataclasses.replace(SECOND, shortcut_from=None)
    for blocks in (
        (FIRST, plain, SECOND),
        (FIRST, SECOND, plain, FIRST, SECOND),
        (plain, FIRST, *(SECOND, FIRST) * 2, SECOND),
    ):
        model, tokens = filled(dataclasses.replace(SMALL, blocks=blocks)), some_tokens(2, 5)
        assert_close(forward(model, tokens), forward(model.replace(scan=False), tokens))


def test_rotated_features_have_two_names():
    with pytest.raises(ed.ConversionError, match=r"head_dim=7.*qk_rope_head_dim="):
        decode(sample("longcat_flash", head_dim=7))


@pytest.mark.slow
def test_a_rows_padding_goes_to_no_expert():
    """To a zero expert neither: the sum is the shared MLP's."""
    model = filled(SMALL)
    layer = model.segments[0].unstacked()[0].mlp
    x, ctx = jnp.ones((1, 3, EMBED)), ed.Context(jnp.asarray([[0, -1, 1]]))
    result = eqx.filter_jit(layer.branch)(x, ctx, None, None)
    assert_array_equal(result.lent[0, 1], 0.0)
    assert np.abs(result.lent[0, 0]).max() > 0.01


def test_an_export_has_what_transformers_needs_of_zero_experts(tmp_path):
    """As the source has it; zeros without one."""
    source = FIXTURES / "longcat_flash"
    model = ed.load_hf(source)
    ed.save_hf(dataclasses.replace(model, origin=None), tmp_path / "new", family="longcat_flash")
    ed.save_hf(model, tmp_path / "again")
    original, new, again = (load_file(folder / WEIGHTS) for folder in (source, tmp_path / "new", tmp_path / "again"))
    layers = [f"model.layers.{layer}.mlp.experts." for layer in (0, 1)]
    unused = [f"{layer}{name}_proj.weight" for layer in layers for name in ("4.gate", "4.up", "5.gate", "5.up")]
    assert {name: x.shape for name, x in new.items()} == {name: x.shape for name, x in original.items()}
    for name, tensor in original.items():
        assert_array_equal(new[name], 0.0 if name in unused else tensor)
        assert_array_equal(again[name], tensor)


def new(config):
    """Weights of equal keys are equal, whichever layers are stacked."""
    return ed.init(config, key=jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("names, make", [("ab", filled), ("abc", new)])
def test_a_block_may_take_and_send_under_one_name(names, make):
    """It takes what was sent before, whatever it sends itself."""

    def logits(*names):
        sent = [None if name is None else dataclasses.replace(FIRST.mlp, shortcut=name) for name in names]
        blocks = [
            dataclasses.replace(FIRST, mlp=mlp or SECOND.mlp, shortcut_from=before)
            for mlp, before in zip(sent, (None, *names), strict=False)
        ]
        config = dataclasses.replace(SMALL, blocks=tuple(blocks))
        return forward(make(config), some_tokens(1, 4))

    assert_close(logits(*"a" * len(names), None), logits(*names, None))
