"""Sparse attention: selection by an indexer against a loop in NumPy, its training loss, and decoding."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.data.batch import Batch
from eqx_decoders.layers.attention import indexer as module, topk
from eqx_decoders.layers.attention.indexer import IndexerConfig, IndexerOutput
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.attention.topk import SelectedKeys
from eqx_decoders.layers.cache.kv_cache import KVCache, KVShape
from eqx_decoders.layers.mask import Causal, SlidingWindow
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.step_config import StepConfig
from tests.compare import assert_array_equal, assert_close
from tests.errors import refused
from tests.layers.attention.test_mla import (
    POSITIONS,
    SEGMENTS,
    SIZES,
    WIDTH,
    X,
    apply,
    drawn,
    key_and_value_by_hand,
    query_by_hand,
    rms_by_hand,
    weights_of,
)
from tests.layers.common import context
from tests.models import EMBED, VOCAB, extend, filled, packed, run, some_tokens
from tests.oracles import best, norm_by_hand, plain_frequencies, rotate_by_hand, sees, wide


INDEXER = IndexerConfig(num_heads=5, head_dim=6, top_k=2)


# --- the formula ---


def scores_by_hand(layer, x, positions, segments):
    """Return `batch length length`; -inf for invisible keys."""
    pairing = layer.config.indexer.pairing
    config, w = layer.config, weights_of(layer)
    heads, head_dim = config.indexer.num_heads, config.indexer.head_dim
    table = plain_frequencies(config.rope.theta, config.rope_dim)

    def rotated(vector, position):
        first = rotate_by_hand(vector[: config.rope_dim], max(position, 0), table, pairing)
        return np.concatenate([first, vector[config.rope_dim :]])

    scores = np.full((*x.shape[:2], x.shape[1]), -np.inf)
    for b, t in np.ndindex(x.shape[:2]):
        low = rms_by_hand(config, x[b, t] @ w["query_down"], w["query_norm.scale"])
        weights = x[b, t] @ w["indexer.head_weight"]
        for s in range(x.shape[1]):
            if sees(config.mask, positions[b, t], positions[b, s], segments[b, t] == segments[b, s]):
                key = rotated(norm_by_hand(layer.indexer.key_norm, x[b, s] @ w["indexer.key"]), positions[b, s])
                scores[b, t, s] = sum(
                    weights[h] * max(rotated(low @ w["indexer.query"][:, h], positions[b, t]) @ key, 0)
                    for h in range(heads)
                ) / np.sqrt(heads * head_dim)
    return scores


def chosen_by_hand(scores, top_k):
    chosen = np.zeros(scores.shape, bool)
    for b, t in np.ndindex(scores.shape[:2]):
        chosen[b, t, best(scores[b, t], top_k)] = True
    return chosen & (scores > -np.inf)


def shares_by_hand(layer, x, positions, chosen):
    """Return `batch length heads length`, attention weights over the selected keys, and the output of the layer."""
    config, w = layer.config, weights_of(layer)
    shares, out = np.zeros((*x.shape[:2], config.num_heads, x.shape[1])), np.zeros(x.shape)
    for b, t in np.ndindex(x.shape[:2]):
        query = config.scale * query_by_hand(config, w, x[b, t], positions[b, t])
        pairs = {s: key_and_value_by_hand(config, w, x[b, s], positions[b, s]) for s in np.flatnonzero(chosen[b, t])}
        for s, (key, _) in pairs.items():
            shares[b, t, :, s] = np.exp(np.sum(query * key, axis=1))
        shares[b, t] /= np.maximum(shares[b, t].sum(-1, keepdims=True), 1e-300)
        mixed = sum((shares[b, t, :, s, None] * value for s, (_, value) in pairs.items()), np.zeros((2, 3)))
        out[b, t] = np.einsum("hd,hde->e", mixed, w["out"])
    return shares, out


def divergence_by_hand(scores, shares, chosen):
    total = 0.0
    for b, t in np.ndindex(scores.shape[:2]):
        keys = np.flatnonzero(chosen[b, t])
        if len(keys):
            teacher, student = shares[b, t, :, keys].mean(1), np.exp(scores[b, t, keys])
            total += np.sum(teacher * np.log(teacher / (student / student.sum())))
    return total


@pytest.mark.slow(fast=("interleaved",))
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_layer_attends_to_the_keys_that_a_loop_selects(pairing):
    layer = drawn(indexer=INDEXER, rope=Rope(theta=10.0, pairing=pairing))
    out, entries = apply(layer, jnp.asarray(X), context(POSITIONS, SEGMENTS))
    scores = scores_by_hand(layer, wide(X), POSITIONS, SEGMENTS)
    chosen = chosen_by_hand(scores, 2)
    assert (chosen.sum(-1) < (scores > -np.inf).sum(-1)).sum() > 4  # some keys are not selected
    assert_close(out, shares_by_hand(layer, wide(X), POSITIONS, chosen)[1], units=128)
    assert entries["latents"].key.shape == (2, 7, 1, 10) and entries["index"].key.shape == (2, 7, 1, 6)
    other = eqx.tree_at(lambda each: each.indexer.key_norm.bias, layer, layer.indexer.key_norm.bias + 3)
    assert np.abs(apply(other, jnp.asarray(X), context(POSITIONS, SEGMENTS))[0] - out).max() > 1e-2


def test_indexer_has_a_separate_rope_pairing():
    layer = drawn(indexer=dataclasses.replace(INDEXER, pairing="interleaved"), rope=Rope(theta=10.0))
    out, _ = apply(layer, jnp.asarray(X), context(POSITIONS, SEGMENTS))
    chosen = chosen_by_hand(scores_by_hand(layer, wide(X), POSITIONS, SEGMENTS), 2)
    assert_close(out, shares_by_hand(layer, wide(X), POSITIONS, chosen)[1], units=128)


@pytest.mark.slow
def test_layer_reuses_the_selection_of_an_earlier_layer():
    """The later layer has no indexer and no indexer keys in its cache."""
    giver = drawn(indexer=dataclasses.replace(INDEXER, shares_as="it"))
    taker = drawn(indexer=dataclasses.replace(INDEXER, shared_from="it"), rope=Rope(theta=7.0))
    assert taker.indexer is None and isinstance(taker.config.cache_shape(8), KVShape)
    ctx, other = context(POSITIONS, SEGMENTS), jnp.flip(jnp.asarray(X), axis=-1)
    selected = giver.branch(other, ctx, None, None).shared
    out, _ = apply(taker, jnp.asarray(X), dataclasses.replace(ctx, shared={"it": selected}))
    chosen = chosen_by_hand(scores_by_hand(giver, wide(other), POSITIONS, SEGMENTS), 2)
    assert_close(out, shares_by_hand(taker, wide(X), POSITIONS, chosen)[1], units=128)
    with refused(ed.ConfigError, "IndexerConfig.shared_from='it'"):
        taker(jnp.asarray(X), ctx)


@pytest.mark.slow
def test_top_k_mask():
    """With ties, of which the first ones count, zeros of both signs, and rows without candidates."""
    draws = np.random.default_rng(0).normal(size=(4, 50, 37)).astype(np.float32)
    draws[1] = np.round(draws[1] * 2)
    draws[2] = np.where(np.abs(draws[2]) < 0.7, np.copysign(0.0, draws[2]), draws[2])
    draws[3][:, 5:] = -np.inf
    for count in (1, 7, 36, 37, 40):
        found = np.asarray(topk.top_k_mask(jnp.asarray(draws), count))
        for at in np.ndindex(draws.shape[:2]):
            assert set(np.flatnonzero(found[at])) == set(best(list(draws[at]), count)), (at, count)


# --- training loss ---


def learning(warmup: bool, top_k: int = 2, weight: float = 0.5) -> IndexerConfig:
    return dataclasses.replace(INDEXER, top_k=top_k, loss_weight=weight, warmup=warmup)


@pytest.mark.slow(fast=("sparse", "few keys"))
@pytest.mark.parametrize(
    "warmup, top_k, tile",
    [(False, 2, topk.TILE), (False, 2, 80), (True, 2, 40), (False, 20, topk.TILE)],
    ids=["sparse", "sparse in blocks", "warmup", "few keys"],
)
def test_loss_is_the_divergence_from_attention_over_selected_keys(warmup, top_k, tile, monkeypatch):
    """The divergence in a loop. Its gradient reaches only the indexer, and equals finite differences of the loop."""
    monkeypatch.setattr(topk, "TILE", tile)
    layer = drawn(indexer=learning(warmup, top_k))

    def loss(both):
        result = both[0].branch(both[1], context(POSITIONS, SEGMENTS), None, None)
        return result.stats["indexer"].loss, result

    (value, result), gradient = eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))((layer, jnp.asarray(X)))
    scores = scores_by_hand(layer, wide(X), POSITIONS, SEGMENTS)
    chosen = scores > -np.inf if warmup else chosen_by_hand(scores, top_k)
    shares, out = shares_by_hand(layer, wide(X), POSITIONS, chosen)
    assert_close(result.out, out, units=128)
    assert float(value) == pytest.approx(divergence_by_hand(scores, shares, chosen), rel=1e-4)
    assert float(result.stats["indexer"].tokens) == np.sum(POSITIONS >= 0)
    moved = {name for name, leaf in named_leaves(gradient[0]).items() if np.any(leaf)}
    assert moved == {name for name in named_leaves(layer) if name.startswith("indexer.")}
    assert not np.any(gradient[1])
    for name in ("query", "key", "head_weight"):
        bar = wide(getattr(gradient[0].indexer, name))
        way, ends = np.random.default_rng(1).normal(size=bar.shape).astype(np.float32), []
        for step in (1e-3, -1e-3):
            weight = getattr(layer.indexer, name) + step * way
            there = dataclasses.replace(layer, indexer=dataclasses.replace(layer.indexer, **{name: weight}))
            ends.append(divergence_by_hand(scores_by_hand(there, wide(X), POSITIONS, SEGMENTS), shares, chosen))
        assert np.sum(bar * way) == pytest.approx((ends[0] - ends[1]) / 2e-3, rel=2e-2, abs=1e-2), name


def decoder(layers: int = 2, top_k: int = 3, **options) -> ed.DecoderConfig:
    sizes = dict(num_heads=4, q_rank=8, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=5)
    indexer = IndexerConfig(num_heads=16, head_dim=6, top_k=top_k, **options)
    block = ed.BlockConfig(
        mixer=LatentAttentionConfig(indexer=indexer, **sizes), mlp=None, pre_mixer_norm=RMSNormConfig()
    )
    return ed.DecoderConfig(
        vocab_size=VOCAB, embed_dim=EMBED, blocks=(block,) * layers, final_norm=RMSNormConfig(), tied=True
    )


@pytest.mark.slow
def test_execution_options_do_not_change_the_result():
    """Scan, chunked kernel, remat and sharding with packed rows: equal values and gradients."""
    tokens, segments = packed(4)
    model = filled(decoder(), scan=False, attention="dot")
    want = run(model, tokens, segments)
    fast = model.replace(scan=True, attention="chunked", remat="minimal_with_context")
    assert_close(run(fast.place(ed.Layout.create(fsdp=4, tensor=2)), tokens, segments), want, units=256)


@pytest.mark.slow
def test_training_loss_is_the_mean_over_layers_and_tokens():
    """With a weight per layer. Microbatches of unequal length give the gradient of the complete batch."""
    tokens, segments = packed(4)
    batch = Batch(tokens=tokens, segment_ids=segments)
    config = decoder(loss_weight=0.5)
    model, plain = filled(config), filled(decoder())
    loss, metrics = ed.next_token_loss(model, batch)
    stats = metrics.stats.indexer
    assert stats.loss.shape == (2,) and stats.tokens.tolist() == [float(jnp.sum(segments > 0))] * 2
    expected = 0.5 * np.mean(np.asarray(stats.loss / stats.tokens))
    assert float(loss - ed.next_token_loss(plain, batch)[0]) == pytest.approx(expected, rel=1e-4)
    optimizer = OptimizerConfig(trainable=("*indexer*",))
    found = []
    for parts in (1, 2):
        trainer = Trainer.create(optimizer, model, steps=1, config=StepConfig(gradient_accumulation_steps=parts))
        assert {name.split(".")[5] for name in trainer.trainable} == {"indexer"}
        found.append(eqx.filter_jit(trainer._gradient)(model, batch, None))
    assert_close(found[1][0], found[0][0], units=256)
    assert float(found[1][1].loss) == pytest.approx(float(found[0][1].loss), rel=1e-5)
    assert all(np.any(leaf) for leaf in found[0][0].values())


@pytest.mark.slow
def test_warmup_leaves_attention_dense():
    tokens = some_tokens(2, 13)
    logits = {
        name: eqx.filter_jit(filled(decoder(**options)))(tokens).logits
        for name, options in {"dense": dict(top_k=13), "warmup": dict(warmup=True), "sparse": {}}.items()
    }
    assert_close(logits["warmup"], logits["dense"])
    model = filled(decoder(warmup=True))
    _, cache = extend(model, tokens[:, :12], ed.init_cache(model.config, 2, 13, dtype=jnp.float32))
    assert_close(extend(model, tokens[:, 12:], cache)[0], logits["dense"][:, 12:], units=256)
    assert np.abs(logits["sparse"] - logits["dense"]).max() > 1e-2


# --- decoding ---


@pytest.mark.slow(fast=("2-9-4-gathers", "2-3-5-takes all"))
@pytest.mark.parametrize(("length", "slots", "top_k", "form"), [
    (1, 8, 3, "gathers"), (2, 9, 4, "gathers"), (3, 9, 3, "masks"), (4, 3, 3, "masks"), (2, 3, 5, "takes all"),
])  # fmt: skip
def test_selection_among_cached_and_new_keys(length, slots, top_k, form):
    """Equal to one call, with slots in rotated order and empty slots. Only selected keys are gathered."""
    layer = dataclasses.replace(INDEXER, top_k=top_k).build(WIDTH, 7, key=jax.random.key(0))
    total, count = slots + length, slots - 1
    draws = np.random.default_rng(2)
    index = IndexerOutput(
        *(jnp.asarray(draws.normal(size=(2, total, *shape)), jnp.float32) for shape in ((5, 6), (5,), (1, 6)))
    )
    places = np.arange(count + length)[None].repeat(2, 0)
    order = np.append(np.arange(count), -1)  # the last slot is empty
    past = index.key[:, :slots].swapaxes(1, 2), None, jnp.asarray(order[None].repeat(2, 0), jnp.int32)
    now = IndexerOutput(*(x[:, slots:] for x in index))
    ctx = context(places[:, count:])
    selected = layer.select_cached(now, *past, Causal(), ctx)
    if form == "takes all":
        assert selected == SelectedKeys()
        return
    keys = jnp.concatenate([index.key[:, :count, 0], now.key[:, :, 0]], axis=1)
    scores = module.index_scores(now.query, now.weight, keys)
    seen = places[:, None] <= places[:, count:, None]
    want = chosen_by_hand(np.where(seen, wide(scores), -np.inf), top_k)
    assert (selected.cached_slots is not None) == (form == "gathers")
    if selected.cached_slots is None:
        got = np.asarray(selected.cached[:, 0, :, :count])
    else:
        assert selected.cached_slots.shape == (2, length, min(top_k, slots))
        got = np.any(np.asarray(selected.cached_slots)[..., None] == np.arange(count), axis=2)
    assert_array_equal(got, want[..., :count])
    assert_array_equal(np.asarray(selected.new[:, 0]) & seen[..., count:], want[..., count:])


@pytest.mark.slow
def test_generation_selects_like_a_single_call():
    model, prompt = filled(decoder(1)), some_tokens(2, 6)
    tokens = ed.generate(model, prompt, max_new_tokens=5)
    whole = jnp.concatenate([prompt, tokens], axis=1)
    assert_array_equal(tokens, jnp.argmax(eqx.filter_jit(model)(whole).logits, axis=-1)[:, 5:-1])


def test_single_slots_are_read_from_the_cache_of_all_layers():
    """A slot index beyond the last one gives an empty key, although the last slot has a token."""
    draws = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 1, 4, 5)), jnp.float32)
    positions = jnp.asarray([[0, 1, 2, 3], [0, 1, -1, 7]])
    cache = KVCache(key=draws, value=None, positions=positions, rolling=False, by_slot=True)
    past, slots = cache.past(jnp.asarray(1)), jnp.asarray([[3, 5, 0], [4, 3, 2]])
    key, positions = past.at(slots)
    assert positions.tolist() == [[3, -1, 0], [-1, 7, -1]]
    assert_array_equal(key[0, [0, 2], 0], draws[1, 0, 0, jnp.asarray([3, 0])])
    assert_array_equal(key[1, 1:, 0], draws[1, 1, 0, jnp.asarray([3, 2])])
    assert_array_equal(past.whole().key, draws[1])
    some = cache.past_of_rows(jnp.asarray(1), jnp.asarray([1, 0])).at(slots[::-1])
    assert_array_equal(some[0], key[::-1])
    assert_array_equal(some[1], positions[::-1])


def test_cache_has_latents_and_indexer_keys():
    shapes = decoder().blocks[0].mixer.cache_shape(32)
    assert shapes == {
        "latents": KVShape(slots=32, kv_heads=1, head_dim=12, rolling=False, values=False, by_slot=True),
        "index": KVShape(slots=32, kv_heads=1, head_dim=6, rolling=False, values=False),
    }


@pytest.mark.parametrize(
    "options, names",
    [
        (dict(q_rank=None), ["q_rank"]),
        (dict(mask=SlidingWindow(3)), ["mask=Causal()", "SlidingWindow(size=3)"]),
        (dict(indexer=dataclasses.replace(INDEXER, head_dim=3)), ["indexer.head_dim=3", "rope_dim=4"]),
    ],
    ids=["q_rank", "mask", "head_dim"],
)
def test_indexers_that_do_not_fit_are_refused(options, names):
    with refused(ed.ConfigError, "indexer", *names):
        LatentAttentionConfig(**SIZES | dict(indexer=INDEXER) | options)


def test_wrong_indexers_are_refused():
    with refused(ed.ConfigError, "IndexerConfig.top_k=0"):
        IndexerConfig(top_k=0)
    with refused(ed.ConfigError, "IndexerConfig.shares_as='it'", "shared_from=None"):
        IndexerConfig(shares_as="it", shared_from="it")


def test_indexers_that_no_layer_shares_are_refused():
    config = decoder(1)
    mixer = config.blocks[0].mixer

    def block(**changes):
        return dataclasses.replace(
            config.blocks[0], mixer=dataclasses.replace(mixer, indexer=dataclasses.replace(mixer.indexer, **changes))
        )

    taker = "blocks[1].mixer.indexer.shared_from='it'"
    with refused(ed.ConfigError, taker):
        dataclasses.replace(config, blocks=(block(), block(shared_from="it")))
    with refused(ed.ConfigError, taker):
        dataclasses.replace(config, blocks=(block(shares_as="it"), block(shared_from="it", top_k=4)))
    with refused(ed.ConfigError, "DecoderConfig.mtp.block"):
        dataclasses.replace(config, mtp=ed.MTPConfig(num_depths=1, block=block(shared_from="it"), norm=RMSNormConfig()))


def test_operations_are_counted():
    mixer = decoder().blocks[0].mixer
    assert mixer.token_products(2) == 4 * 2 * 15 + 16 * 6 * 2
    taker = dataclasses.replace(mixer, indexer=dataclasses.replace(mixer.indexer, shared_from="it"))
    assert taker.token_products(100) == 4 * 3 * 15
    assert mixer.token_products(100) == 4 * 3 * 15 + 16 * 6 * 100
