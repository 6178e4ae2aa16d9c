"""The structure of a list of blocks, and stacked weights."""

import dataclasses
import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import eqx_decoders as ed
from eqx_decoders.sharding.axes import axes, named_leaves
from tests.compare import assert_allclose
from tests.models import filled, packed, rich_decoder


LETTERS = {letter: ed.BlockConfig(mixer=None, mlp=None, dropout=index / 10) for index, letter in enumerate("abcde")}


def cut(text: str) -> list[tuple[str, int]]:
    names = {block: letter for letter, block in LETTERS.items()}
    runs = ed.find_repeats(tuple(LETTERS[letter] for letter in text))
    return [("".join(names[block] for block in unit), repeats) for unit, repeats in runs]


@pytest.mark.parametrize(
    "text, runs",
    [
        ("a", [("a", 1)]),
        ("aaaa", [("a", 4)]),
        ("aaabbbb", [("a", 3), ("b", 4)]),
        ("aaaaab" * 3 + "aa", [("aaaaab", 3), ("a", 2)]),
        ("abababa", [("ab", 3), ("a", 1)]),
        ("a" * 3 + "b" * 58, [("a", 3), ("b", 58)]),
        ("abac" * 4, [("abac", 4)]),
        ("aabaaab", None),
    ],
)
def test_known_patterns(text, runs):
    found = cut(text)
    assert "".join(unit * repeats for unit, repeats in found) == text
    if runs is not None and text != "aaaaab" * 3 + "aa":
        assert found == runs
    if runs is not None:
        assert sum(len(unit) for unit, _ in found) <= sum(len(unit) for unit, _ in runs)


def fewest(text: str) -> int:
    """The least number of traced blocks over all cuts, by brute force."""
    best = {0: 0}
    for end in range(1, len(text) + 1):
        options = []
        for begin, unit in itertools.product(range(end), range(1, end + 1)):
            piece = text[begin:end]
            if len(piece) % unit == 0 and piece == piece[:unit] * (len(piece) // unit):
                options.append(best[begin] + unit)
        best[end] = min(options)
    return best[len(text)]


@given(st.text("abc", min_size=1, max_size=14))
def test_nothing_is_dropped_and_no_cut_traces_less(text):
    found = cut(text)
    assert "".join(unit * repeats for unit, repeats in found) == text
    assert sum(len(unit) for unit, _ in found) == fewest(text)


@pytest.mark.slow
def test_stacked_weights_match_single_layers():
    """Layer i of a stack is what its configuration builds from key i."""
    config = rich_decoder(4)
    model = ed.init(config, key=jax.random.key(0))
    blocks = model.unstacked()
    assert len(blocks) == 4
    keys = jax.random.split(jax.random.split(jax.random.key(0), 4)[3], 4)
    builds = [functools.partial(single.build, config.embed_dim) for single in config.blocks]
    singles = eqx.filter_jit(lambda keys: [build(key=key) for build, key in zip(builds, keys, strict=True)])(keys)
    for block, single in zip(blocks, singles, strict=True):
        for got, want in zip(jax.tree.leaves(block), jax.tree.leaves(single), strict=True):
            assert_allclose(got, want, atol=1e-6)
    assert not np.array_equal(blocks[0].mlp.up, blocks[2].mlp.up)


@eqx.filter_jit
def block_by_block(model, tokens, segments, positions):
    """What comes out of each block."""
    ctx, outs = ed.ForwardContext(positions=positions, segment_ids=segments), []
    x = model.embedding(tokens, ctx)
    for block in model.unstacked():
        x, _, _ = block(x, ctx)
        outs.append(x)
    return outs


@pytest.mark.slow
def test_unstacked_blocks_run_by_hand_equal_the_model():
    model = filled(rich_decoder(3))
    tokens, segments = packed(2)
    out = model(tokens, segment_ids=segments)
    x = block_by_block(model, tokens, segments, positions_of(segments))[-1]
    assert_allclose(x, out.hidden, atol=1e-5)


def positions_of(segments):
    result = np.zeros(segments.shape, np.int32)
    for row, ids in enumerate(np.asarray(segments)):
        for index, segment in enumerate(ids):
            begins = index == 0 or ids[index - 1] != segment
            result[row, index] = -1 if segment == 0 else 0 if begins else result[row, index - 1] + 1
    return jnp.asarray(result)


@pytest.mark.slow
def test_layer_stats_describe_each_layer_in_order():
    model = filled(rich_decoder(5), layer_stats=True)
    tokens, segments = packed(2)
    stats = eqx.filter_jit(model)(tokens, segment_ids=segments).stats.activations
    loop = eqx.filter_jit(model.replace(scan=False))(tokens, segment_ids=segments).stats.activations
    outs = [np.asarray(x) for x in block_by_block(model, tokens, segments, positions_of(segments))]
    means, stds = [x.mean() for x in outs], [x.std() for x in outs]
    for found in (stats, loop):
        assert_allclose(found.mean, means, atol=1e-5)
        assert_allclose(found.std, stds, rtol=1e-4)
        assert_allclose(found.zero_fraction, np.zeros(5), atol=1e-6)
    assert eqx.filter_eval_shape(model.replace(layer_stats=False), tokens).stats.activations is None


def test_zeros_are_counted():
    block = ed.BlockConfig(mixer=None, mlp=None)
    config = dataclasses.replace(rich_decoder(1), blocks=(block, block))
    model = filled(config, layer_stats=True)
    table = model.embedding.table.at[1].set(0.0)
    model = eqx.tree_at(lambda m: m.embedding.table, model, table)
    stats = model(jnp.asarray([[1, 2, 1, 1]])).stats.activations
    assert_allclose(stats.zero_fraction, [0.75, 0.75])


def test_axes_name_every_weight():
    model = ed.abstract(rich_decoder(4))
    words = axes(model)
    leaves = named_leaves(model)
    assert list(words) == list(leaves)
    for name, leaf in leaves.items():
        assert len(words[name]) == leaf.ndim, name
        assert (words[name][0] == "layers") == name.startswith("scanned_layers"), name
    assert words["scanned_layers.0.unit.0.mixer.query"] == ("layers", "embed", "heads", "head_dim")


@pytest.mark.slow
def test_weights_of_a_cycle_wait_for_their_layer():
    """On a mesh, where they are gathered; without remat a copy of them would be kept for the gradient."""
    config, tokens = ed.get_config("tiny"), jnp.zeros((8, 8), jnp.int32)
    pair = dataclasses.replace(config.blocks[0], dropout=0.1), config.blocks[0]
    config, mesh = dataclasses.replace(config, blocks=pair * 2), ed.Layout.create(fsdp=8)

    def barriers(layout, remat):
        model = ed.abstract(config, layout=layout, remat=remat)
        text = str(eqx.filter_make_jaxpr(lambda model, x: model(x).logits)(model, tokens)[0])
        return text.count("optimization_barrier")

    others = barriers(mesh, "none")
    assert barriers(ed.Layout(), "full") == others and barriers(mesh, "full") == others + len(pair)
