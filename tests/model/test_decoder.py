"""The decoder as users meet it: what it returns, how it is born and edited, and what its cache holds."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.embedding.embedding import LearnedPositions, SinusoidalPositions, document_positions
from eqx_decoders.layers.mask import Bidirectional
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import LayerNormConfig, RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.numerics.initializers import fan_in, normal, shapes_only
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.settings.lora import LoRAConfig
from tests.compare import assert_allclose, assert_array_equal, assert_close
from tests.errors import refused
from tests.models import EMBED, VOCAB, filled, packed, rich_decoder, some_tokens


@eqx.filter_jit
def run(model, tokens, positions=None, segment_ids=None, cache=None):
    return model(tokens, positions, segment_ids, cache)


@pytest.fixture(scope="module")
def model():
    return filled(rich_decoder())


@pytest.fixture(scope="module")
def out(model):
    return run(model, *packed_arguments())


def packed_arguments():
    tokens, segments = packed(4, 13)
    return tokens, None, segments


# --- what comes back ---


@pytest.mark.slow
@pytest.mark.parametrize("compute", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("scan", [True, False])
def test_shapes_and_dtypes(compute, scan):
    model = ed.abstract(rich_decoder(), precision=ed.Precision(compute=compute), scan=scan, layer_stats=True)
    cache = ed.abstract_cache(model.config, 2, 9)
    tokens = jnp.zeros((2, 5), jnp.int32)
    out = eqx.filter_eval_shape(model, tokens, cache=cache)
    assert (out.logits.shape, out.logits.dtype) == ((2, 5, VOCAB), jnp.float32)
    assert (out.hidden.shape, out.hidden.dtype) == ((2, 5, EMBED), compute)
    stats = out.stats.activations
    assert {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(stats)} == {((4,), np.dtype(np.float32))}
    assert jax.tree.structure(out.cache) == jax.tree.structure(cache)
    same = jax.tree.map(lambda one, other: (one.shape, one.dtype) == (other.shape, other.dtype), out.cache, cache)
    assert all(jax.tree.leaves(same))
    plain = eqx.filter_eval_shape(model.replace(layer_stats=False), tokens)
    assert plain.cache is None
    assert plain.stats.activations is None


def test_hidden_is_before_the_final_norm(model, out):
    x = np.asarray(out.hidden, np.float64)
    normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + model.final_norm.config.eps)
    normed = normed * np.asarray(model.final_norm.scale)
    assert_close(out.logits, normed @ np.asarray(model.head.kernel), units=512)
    assert_close(model.logits(out.hidden), out.logits)


@pytest.mark.slow
def test_soft_cap_bounds_the_logits(model, out):
    capped = run(filled(rich_decoder(logit_soft_cap=1.5)), *packed_arguments()).logits
    assert_close(capped, 1.5 * np.tanh(np.asarray(out.logits, np.float64) / 1.5))
    assert np.abs(capped).max() <= 1.5 < np.abs(out.logits).max()


@pytest.mark.slow  # a quick test of tests/blocks/test_stack.py says it, too
def test_stats_describe_each_layer_in_order():
    model, tokens = filled(rich_decoder(2), layer_stats=True), some_tokens(2, 5)

    @eqx.filter_jit
    def streams(model):
        ctx = ed.ForwardContext(jnp.broadcast_to(jnp.arange(5), (2, 5)))
        xs = [model.embedding(tokens, ctx)]
        for block in model.unstacked():
            xs.append(block(xs[-1], ctx)[0])
        return xs[1:]

    stats = run(model, tokens).stats.activations
    for layer, x in enumerate(streams(model)):
        assert_close(stats.mean[layer], np.mean(x))
        assert_close(stats.std[layer], np.std(x))
        assert stats.zero_fraction[layer] == 0


# --- positions ---


def positions_by_hand(segments):
    out = np.zeros_like(segments)
    for row, column in np.ndindex(segments.shape):
        same = column > 0 and segments[row, column] == segments[row, column - 1]
        out[row, column] = out[row, column - 1] + 1 if same else 0
    return np.where(segments == 0, -1, out)


def test_positions_restart_with_each_document():
    segments = np.array([[1, 1, 1, 2, 2, 3, 0], [0, 0, 1, 1, 0, 4, 4], [7, 2, 2, 2, 2, 2, 2], [0] * 7])
    got, _ = document_positions(None, jnp.asarray(segments), segments.shape)
    assert_array_equal(got, positions_by_hand(segments))
    assert_array_equal(document_positions(None, None, (2, 3))[0], [[0, 1, 2]] * 2)
    given = jnp.asarray([[5, 6, 7]])
    assert_array_equal(document_positions(given, jnp.asarray([[1, 1, 0]]), (1, 3))[0], [[5, 6, -1]])


@pytest.mark.slow
def test_explicit_positions_equal_derived_ones_bit_by_bit(model, out):
    tokens, _, segments = packed_arguments()
    positions = jnp.asarray(positions_by_hand(np.asarray(segments)))
    assert_array_equal(run(model, tokens, positions, segments).logits, out.logits)
    # from 1 upwards rotation sees the same differences, and masks too
    shift_left = run(model, tokens, jnp.where(positions < 0, -1, positions + 1), segments).logits
    assert_allclose(shift_left, out.logits, atol=1e-4)
    assert not np.array_equal(shift_left, out.logits)


# --- the head ---


@pytest.mark.slow
def test_tied_head_equals_an_untied_one_with_the_transposed_table():
    tied, untied = filled(rich_decoder(2, tied=True)), filled(rich_decoder(2), seed=1)
    assert tied.head is None
    assert tied.head_kernel is tied.embedding.table
    copied = eqx.tree_at(
        lambda m: (m.embedding, m.scanned_layers, m.final_norm, m.head.kernel),
        untied,
        (tied.embedding, tied.scanned_layers, tied.final_norm, tied.embedding.table.T),
    )
    tokens = some_tokens(2, 5)
    assert_close(run(copied, tokens).logits, run(tied, tokens).logits)
    counts = [ed.count_parameters(m.config) for m in (untied, tied)]
    assert counts[0] - counts[1] == VOCAB * EMBED


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_bias_of_the_head_comes_after_the_divisor_and_before_the_cap(tied):
    """`cap(x / divisor)` of the products with the bias, in every product of the head."""
    biased = filled(rich_decoder(2, tied=tied, head_bias=True, logit_divisor=2.0, logit_soft_cap=1.5))
    bare = dataclasses.replace(biased, head_bias=None)
    config = dataclasses.replace(bare.config, head_bias=False, logit_divisor=1.0, logit_soft_cap=None)
    raw = run(dataclasses.replace(bare, config=config), *packed_arguments())
    want = 1.5 * np.tanh((np.asarray(raw.logits, np.float64) + np.asarray(biased.head_bias)) / 2.0 / 1.5)
    assert_close(run(biased, *packed_arguments()).logits, want, units=256)
    assert ed.count_parameters(biased.config) - ed.count_parameters(config) == VOCAB
    assert not np.any(ed.init(biased.config, key=jax.random.key(0)).head_bias)


# --- an immutable pytree ---


def test_models_are_immutable_pytrees(model, out):
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.head = None
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.config.vocab_size = 3
    louder = eqx.tree_at(lambda m: m.head.kernel, model, replace_fn=lambda kernel: 2 * kernel)
    assert_close(run(louder, *packed_arguments()).logits, 2 * out.logits)
    zeros = jax.tree.map(jnp.zeros_like, model)
    assert not np.any(run(zeros, *packed_arguments()).logits)
    assert np.any(model.head.kernel)


def test_configs_are_values(model):
    again = rich_decoder()
    assert again == model.config
    assert hash(again) == hash(model.config)
    assert rich_decoder(3) != again
    assert ed.find_repeats(again.blocks) == ((again.blocks[:2], 2),)


def test_replace_keeps_the_weights(model):
    other = model.replace(remat="full", scan=False)
    assert other.execution.remat == ed.Remat()
    assert not other.execution.scan
    assert all(one is two for one, two in zip(jax.tree.leaves(model), jax.tree.leaves(other), strict=True))
    assert model.execution == ed.Execution()
    with refused(ed.ConfigError, "scanned", "'scan'"):
        model.replace(scanned=True)
    with refused(ed.ConfigError, "dropout", "configuration", "dataclasses.replace"):
        model.replace(dropout=0.1)


def test_arguments_of_transformers_are_refused_with_what_replaces_them(model):
    for name, wanted in (("attention_mask", "segment_ids"), ("output_hidden_states", "layer_streams"), ("foo", "foo")):
        with refused(ed.ConfigError, name, wanted):
            model(some_tokens(1, 4), **{name: True})


def test_seeds_dtypes_and_no_layout():
    config = ed.get_config("gpt3-52k")
    plain = ed.init(config, key=jax.random.key(3))
    assert_close(ed.init(config, key=3, layout=None, precision=None), plain, units=1)
    for options in (dict(dtype="bfloat16"), dict(precision="bfloat16"), dict(precision=jnp.bfloat16)):
        half = ed.abstract(config, **options)
        assert half.embedding.table.dtype == half.execution.precision.compute == jnp.bfloat16
    assert_close(ed.add_mtp(plain, 1, key=3), ed.add_mtp(plain, 1, key=jax.random.key(3)), units=1)
    assert_close(ed.add_score_head(plain, key=3), ed.add_score_head(plain, key=jax.random.key(3)), units=1)
    lora = LoRAConfig(rank=2, targets=("*.mlp.*",))
    assert_close(ed.add_lora(plain, lora, key=3), ed.add_lora(plain, lora, key=jax.random.key(3)), units=1)
    with refused(ed.ConfigError, "dtype='bfloat16'", "precision='float32'"):
        ed.init(config, key=3, dtype="bfloat16", precision="float32")


# --- birth ---


def newborn():
    """A decoder with every kind of weight, wide enough for statistics."""
    attention = AttentionConfig(
        num_heads=8,
        num_kv_heads=4,
        head_dim=16,
        qkv_bias=True,
        out_bias=True,
        sinks=True,
        output_gate=True,
        qk_norm=QKNorm(norm=RMSNormConfig(offset=1.0)),
    )
    block = ed.BlockConfig(
        mixer=attention,
        mlp=MLPConfig(mlp_dim=96, bias=True, fused=True),
        pre_mixer_norm=RMSNormConfig(),
        pre_mlp_norm=LayerNormConfig(),
    )
    return ed.DecoderConfig(
        vocab_size=128,
        embed_dim=64,
        blocks=(block, block),
        final_norm=RMSNormConfig(),
        init_std=0.05,
        positions=LearnedPositions(max_positions=256),
    )


def expected_std(name, leaf):
    """Of a kernel: the size of what it contracts, to the power -1/2; None for what is not random."""
    last = name.split(".")[-1]
    if name == "embedding.table":
        return 0.05
    if name == "positions.table":
        return 0.02
    if last in ("query", "key", "value", "gate", "gate_up", "kernel"):
        return 64**-0.5
    if last in ("out", "down"):
        return (8 * 16 if last == "out" else 96) ** -0.5
    return None


@pytest.fixture(scope="module")
def born():
    """Two decoders of the keys 0 and 1."""
    make = eqx.filter_jit(lambda key: ed.Decoder.build(newborn(), key=key))
    return make(jax.random.key(0)), make(jax.random.key(1))


@pytest.mark.slow
def test_new_weights_have_the_variance_of_their_fan_in(born):
    for name, leaf in named_leaves(born[0]).items():
        x, std = np.asarray(leaf, np.float64), expected_std(name, leaf)
        if std is not None:
            for layer in x if name.startswith("scanned_layers") else x[None]:
                assert np.std(layer) == pytest.approx(std, rel=5 * (2 * layer.size) ** -0.5), name
                assert np.mean(layer) == pytest.approx(0, abs=5 * std * layer.size**-0.5), name
        elif name.endswith(("query_norm.scale", "key_norm.scale", "bias", "sink")):
            assert not np.any(x), name  # a scale with offset 1 starts at 0
        else:
            assert name.endswith("norm.scale"), name
            assert np.all(x == 1), name


@pytest.mark.slow
def test_no_two_weights_are_born_equal(born):
    seen = {}
    for name, leaf in named_leaves(born[0]).items():
        if expected_std(name, leaf) is None:
            continue
        for layer in np.asarray(leaf) if name.startswith("scanned_layers") else np.asarray(leaf)[None]:
            heads = np.moveaxis(layer, 1, 0) if name.endswith("gate_up") else layer[None]
            for part in heads:
                first = np.float32(part.reshape(-1)[0] / expected_std(name, leaf)).tobytes()
                assert first not in seen, f"{name} begins as {seen.get(first)}"
                seen[first] = name


@pytest.mark.slow
def test_the_key_decides(born):
    for name, leaf in named_leaves(born[0]).items():
        differs = not np.array_equal(leaf, named_leaves(born[1])[name])
        assert differs == (expected_std(name, leaf) is not None), name


@pytest.mark.slow
def test_init_is_build_placed_and_cast():
    config = rich_decoder(2, blocks=(ed.BlockConfig(mixer=None, mlp=None),) * 2, tied=True)
    one, two = (
        ed.init(config, key=jax.random.key(4), precision=ed.Precision(params=p)) for p in ("float32", "bfloat16")
    )
    table = ed.Decoder.build(config, key=jax.random.key(4)).embedding.table
    assert_allclose(one.embedding.table, table, rtol=1e-6)  # fused, the last bit may differ
    assert_allclose(two.embedding.table.astype(jnp.float32), table, rtol=1e-2)
    assert one.execution == ed.Execution()


@pytest.mark.slow
def test_weights_are_zeros_only_where_shapes_are_read():
    key = jax.random.key(0)
    with pytest.raises(ed.ConfigError), shapes_only():
        assert not np.any(normal(key, (3, 2), jnp.bfloat16, 1.0)) and not np.any(fan_in(key, (3,), jnp.float32, 4))
        fan_in(key, (3,), jnp.float32, 0)
    for drawn in (normal(key, (3, 2), jnp.bfloat16, 1.0), fan_in(key, (3,), jnp.float32, 4)):
        assert np.all(drawn)
    with shapes_only():
        like = normal(key, (3, 2), jnp.bfloat16, 1.0), fan_in(key, (3,), jnp.float32, 4, "normal")
    assert [(each.shape, each.dtype) for each in like] == [((3, 2), jnp.bfloat16), ((3,), jnp.float32)]


@pytest.mark.slow
def test_every_weight_is_read():
    config = dataclasses.replace(newborn(), vocab_size=16, embed_dim=8, positions=LearnedPositions(max_positions=5))
    model, tokens = filled(config), jnp.arange(16, dtype=jnp.int32).reshape(2, 8) % 16
    weights = jnp.sin(jnp.arange(2 * 8 * 16, dtype=jnp.float32)).reshape(2, 8, 16)
    gradient = eqx.filter_jit(eqx.filter_grad(lambda model: jnp.sum(weights * model(tokens).logits)))(model)
    idle = [name for name, leaf in named_leaves(gradient).items() if np.abs(leaf).max() < 1e-5]
    assert idle == []


# --- caches ---


@pytest.fixture(scope="module")
def overflowed(model):
    """Tokens, and what six of them give with a cache of four places."""
    tokens = some_tokens(2, 7)
    return tokens, run(model, tokens[:, :6], cache=ed.init_cache(model.config, 2, 4, dtype=jnp.float32))


def at(model, tokens, *positions):
    return run(model, tokens, jnp.broadcast_to(jnp.asarray(positions), tokens.shape)).logits


@pytest.mark.slow
def test_tokens_beyond_a_cache_are_not_stored(model, overflowed):
    """Tokens 4 and 5 are answered rightly in their own call, and are unknown to all later ones."""
    tokens, first = overflowed
    assert_close(first.logits, at(model, tokens, 0, 1, 2, 3, 4, 5, 6)[:, :6], units=512)
    assert first.cache.length.tolist() == [6, 6]
    last = run(model, tokens[:, 6:], cache=first.cache)
    assert_close(last.logits, at(model, tokens, 0, 1, 2, 3, -1, -1, 6)[:, 6:], units=512)
    assert last.cache.length.tolist() == [7, 7]
    for one, two in zip(
        jax.tree.leaves(first.cache.layer_caches), jax.tree.leaves(last.cache.layer_caches), strict=True
    ):
        assert_array_equal(one, two)


@pytest.mark.slow
def test_bfloat16_cache_with_float32_activations(model, overflowed):
    tokens, first = overflowed
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim == 5 else x, first.cache)
    empty = ed.abstract_cache(model.config, 2, 4)  # bfloat16 is the default
    assert [leaf.dtype for leaf in jax.tree.leaves(half)] == [leaf.dtype for leaf in jax.tree.leaves(empty)]
    last = run(model, tokens[:, 6:], cache=half)
    want = at(model, tokens, 0, 1, 2, 3, -1, -1, 6)[:, 6:]
    assert_close(last.logits, want, units=4, dtype="bfloat16")
    assert not np.allclose(last.logits, want, atol=1e-5)
    assert last.hidden.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(last.cache) if leaf.ndim == 5} == {np.dtype(jnp.bfloat16)}


def test_bidirectional_layers_have_no_cache():
    block = ed.BlockConfig(
        mixer=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8, mask=Bidirectional()), mlp=None
    )
    config = rich_decoder(2, blocks=(rich_decoder(1).blocks[0], block))
    with refused(ed.ConfigError, "bidirectional", "cache"):
        ed.init_cache(config, 1, 8)


# --- edges ---


@pytest.mark.slow
def test_rows_of_padding_are_finite(model):
    tokens = some_tokens(2, 6)
    segments = jnp.asarray([[0] * 6, [1, 1, 1, 0, 0, 0]])

    def loss(model):
        logits = model(tokens, segment_ids=segments).logits
        return jnp.mean(logits**2), logits

    (_, logits), gradient = eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))(model)
    assert np.all(np.isfinite(logits))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_one_token(model):
    """With no other key nothing depends on the position."""
    token = some_tokens(1, 1)
    one = at(model, token, 0)
    assert one.shape == (1, 1, VOCAB)
    assert_close(at(model, token, 11), one, units=512)
    padded = some_tokens(1, 1).repeat(7, axis=1).repeat(2, axis=0)
    assert_close(one, at(model, padded, 0, -1, -1, -1, -1, -1, -1)[:1, :1], units=512)


def test_odd_sizes():
    block = ed.BlockConfig(
        mixer=AttentionConfig(num_heads=3, num_kv_heads=1, head_dim=5, rope=Rope(fraction=0.4)),
        mlp=MLPConfig(mlp_dim=1),
        pre_mixer_norm=LayerNormConfig(),
    )
    config = ed.DecoderConfig(
        vocab_size=7, embed_dim=5, blocks=(block,) * 3, final_norm=None, positions=SinusoidalPositions(), tied=True
    )
    model = filled(config)
    out = run(model, jnp.asarray([[0, 6, 3]]))
    assert out.logits.shape == (1, 3, 7)
    assert np.all(np.isfinite(out.logits))
    assert_close(run(model.replace(scan=False), jnp.asarray([[0, 6, 3]])).logits, out.logits)


@pytest.mark.slow
def test_layers_are_of_use_alone(getkey):
    """A researcher's way: a layer, some features and a context."""
    x = jax.random.normal(getkey(), (2, 3, 16))
    ctx = ed.ForwardContext(positions=jnp.broadcast_to(jnp.arange(3), (2, 3)))
    fed = MLPConfig(mlp_dim=16).build(16, key=getkey())(x, ctx)
    mixed, entries = AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=4).build(16, key=getkey())(x, ctx)
    assert fed.shape == mixed.shape == x.shape
    assert entries.key.shape == (2, 3, 4, 4)
    block = ed.BlockConfig(mixer=None, mlp=MLPConfig(mlp_dim=16)).build(16, key=getkey())
    y, nothing, stats = block(x, ctx)
    assert_close(y, x + block.mlp(x, ctx))
    assert nothing == {}
    assert stats == ed.BlockStats()


@pytest.mark.slow
def test_a_rejected_token_leaves_nothing_in_the_cache():
    model, tokens = filled(rich_decoder(2)), some_tokens(1, 9)
    run = eqx.filter_jit(model)
    cache = run(tokens[:, :5], cache=ed.init_cache(model.config, 1, 16, dtype=jnp.float32)).cache
    _, proposal, _ = eqx.filter_jit(model.forward_uncommitted)(tokens[:, 5:8], cache=cache)
    kept = cache.commit(proposal.entries, jnp.where(jnp.arange(3)[None] < 1, proposal.positions, -1))
    assert kept.length.tolist() == [6]
    want = run(jnp.concatenate([tokens[:, :6], tokens[:, 8:]], axis=1)).logits[:, -1:]
    assert_allclose(run(tokens[:, 8:], cache=kept).logits, want, atol=2e-5)


# --- inputs beside the tokens ---


@pytest.mark.slow
def test_spans_and_positions_of_several_dimensions_reach_every_layer():
    """Scanned, one by one and rematerialised, whole and over a cache."""
    mixer = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, spans=True, rope=Rope(sections=(2, 1, 1)))
    block = ed.BlockConfig(mixer=mixer, mlp=None, pre_mixer_norm=RMSNormConfig())
    config = ed.DecoderConfig(vocab_size=VOCAB, embed_dim=EMBED, blocks=(block,) * 3, final_norm=RMSNormConfig())
    model, tokens = filled(config), some_tokens(2, 9)
    places = jnp.stack([jnp.arange(9), jnp.arange(9) // 2, 8 - jnp.arange(9)], axis=-1)[None].repeat(2, axis=0)
    inputs = ed.Inputs(spans=jnp.asarray([[0, 0, 1, 1, 1, 0, 2, 2, 0]] * 2), rotary_positions=places)
    run = eqx.filter_jit(lambda model, tokens, inputs, cache=None: model(tokens, cache=cache, inputs=inputs))
    want = run(model, tokens, inputs).logits
    for other in (model.replace(scan=False, remat="full"), model.replace(attention="chunked")):
        assert_close(run(other, tokens, inputs).logits, want)
    cache, pieces = ed.init_cache(config, 2, 9, dtype=jnp.float32), []
    for begin, end in ((0, 1), (1, 5), (5, 9)):  # a span is in one call
        here = ed.Inputs(spans=inputs.spans[:, begin:end], rotary_positions=places[:, begin:end])
        out = run(model, tokens[:, begin:end], here, cache)
        pieces, cache = [*pieces, out.logits], out.cache
    assert_close(jnp.concatenate(pieces, axis=1), want)
    later = jnp.where(jnp.arange(9) == 4, (tokens + 1) % VOCAB, tokens)
    moved = np.abs(run(model, later, inputs).logits - want).max(axis=(0, 2)) > 1e-6
    assert moved.tolist() == [False, False, True, True, True, True, True, True, True]
    plain = run(model, tokens, ed.Inputs()).logits
    same = dataclasses.replace(
        inputs, spans=None, rotary_positions=jnp.arange(9)[None, :, None].repeat(2, 0).repeat(3, 2)
    )
    assert_close(run(model, tokens, same).logits, plain)
    assert np.abs(plain - want).max() > 1e-2


def test_inputs_by_layer_must_be_as_many_as_take_them():
    model = filled(rich_decoder(2))
    with refused(ed.ConfigError, "by_layer['nobody']", "(2, 1, 3, 4)"):
        model(some_tokens(1, 3), inputs=ed.Inputs(by_layer={"nobody": jnp.zeros((2, 1, 3, 4))}))
