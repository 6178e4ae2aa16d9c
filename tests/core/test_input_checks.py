"""Ids, positions, segment ids and keys of other types give the same results as int32 and typed keys, or an error."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import eqx_decoders as ed
from eqx_decoders.core.input_checks import as_int32, as_key
from eqx_decoders.encoders.rope_positions import TEXT, GridPositions, grid_positions
from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.attention.moba import BlockSelection
from eqx_decoders.layers.mask import SlidingWindow
from eqx_decoders.layers.mlp import LinearConfig
from eqx_decoders.layers.recurrent.scans.recurrence import delta_rule
from tests.cases import RECURRENT
from tests.compare import assert_array_equal, assert_close
from tests.errors import refused
from tests.layers.cached_mixers import FULL
from tests.models import EMBED, VOCAB, extend, filled, rich_decoder, some_tokens


ROWS, LENGTH = 2, 16
SIGNED, UNSIGNED = ("int8", "int16", "int32", "int64"), ("uint8", "uint16", "uint32", "uint64")
BLOCK = dataclasses.replace(rich_decoder(1).blocks[0], mlp=None, pre_mlp_norm=None, post_mlp_norm=None)
MIXERS = (
    dataclasses.replace(FULL, mask=SlidingWindow(4)),
    dataclasses.replace(FULL, selection=BlockSelection(size=3, top_k=2)),
    RECURRENT["delta net"],
)


@pytest.fixture(scope="module")
def model():
    """Attention behind a window and to selected blocks, and a recurrence behind a convolution."""
    blocks = tuple(dataclasses.replace(BLOCK, mixer=mixer) for mixer in MIXERS)
    return filled(dataclasses.replace(rich_decoder(1), blocks=blocks))


def bare(vocab=VOCAB, dropout=0.0):
    """Embedding and head of a model, and little in between."""
    block = ed.BlockConfig(mixer=None, mlp=LinearConfig(), dropout=dropout)
    return filled(ed.DecoderConfig(vocab_size=vocab, embed_dim=EMBED, blocks=(block,), final_norm=None))


@st.composite
def inputs(draw):
    """Packed documents with padding anywhere, in different forms of padding and of dtypes."""
    told = draw(st.sampled_from(["segments", "positions", "both", "cache"]))
    segments = np.zeros((ROWS, LENGTH), np.int64)
    for row in range(ROWS):
        ids = draw(st.lists(st.sampled_from([1, 2, 3, 100]), min_size=1, max_size=4))
        ids = ids if told in ("segments", "both") else ids[:1]
        lengths = [draw(st.integers(1, 5)) if len(ids) > 1 else draw(st.integers(5, LENGTH - 4)) for _ in ids]
        real = np.repeat(np.arange(len(ids)), lengths)[: LENGTH - 3]
        where = sorted(draw(st.permutations(range(LENGTH)))[: len(real)])
        names = np.asarray(ids) if told == "segments" else np.asarray([5, 9, 3, 100])  # ids may be used again
        segments[row, where] = names[: len(ids)][real]
    return (
        told,
        segments,
        {name: draw(st.sampled_from(SIGNED + UNSIGNED)) for name in ("tokens", "segments")}
        | {"positions": draw(st.sampled_from(SIGNED if told in ("positions", "cache") else SIGNED + UNSIGNED))},
    )


def compacted(tokens, segments):
    """The same documents side by side, 1, 2, ..., in int32; where their tokens stand in both."""
    plain, numbers, places = np.zeros_like(tokens), np.zeros(tokens.shape, np.int32), []
    for row in range(ROWS):
        where = np.flatnonzero(segments[row])
        own = segments[row, where]
        numbers[row, : len(where)] = 1 + np.cumsum(np.append(False, own[1:] != own[:-1]))
        plain[row, : len(where)] = tokens[row, where]
        places += [(row, here, there) for here, there in enumerate(where)]
    return plain, numbers, np.asarray(places).T


def counted(numbers, places):
    """Positions in the documents, with gaps where nothing stands."""
    positions, (row, here, there) = np.full(numbers.shape, -1), places
    begins = np.asarray([np.flatnonzero(numbers[r] == numbers[r, h])[0] for r, h in zip(row, here, strict=True)])
    positions[row, there] = here - begins
    return positions


def check_dtypes_and_holes(model, case):
    told, segments, dtypes = case
    tokens = np.asarray(some_tokens(ROWS, LENGTH))
    plain, numbers, places = compacted(tokens, segments)
    positions, (row, here, there) = counted(numbers, places), places
    want = model(plain, segment_ids=numbers).logits[row, here]
    tokens, of = tokens.astype(dtypes["tokens"]), segments.astype(dtypes["segments"])
    if told == "positions":
        got = model(tokens, positions.astype(dtypes["positions"])).logits
    elif told == "segments":
        got = model(tokens, segment_ids=of).logits
    elif told == "both":
        got = model(tokens, np.where(segments > 0, positions, 0).astype(dtypes["positions"]), of).logits
    else:
        cache = ed.init_cache(model.config, ROWS, LENGTH, dtype=jnp.float32)
        got = model(tokens, segment_ids=of, cache=cache).logits
    assert_close(got[row, there], want, units=256)


@pytest.mark.slow
@settings(max_examples=10)
@given(case=inputs())
def test_dtypes_and_padding_change_nothing(model, case):
    check_dtypes_and_holes(model, case)


@pytest.mark.slow
@settings(max_examples=40)
@given(case=inputs())
def test_dtypes_and_padding_change_nothing_often(model, case):
    check_dtypes_and_holes(model, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab", "dtype", "top"), [(256, "uint8", 256), (70_000, "uint16", 4000), (33_000, "int16", 99)]
)
def test_small_dtypes_have_the_loss_and_the_gradients_of_int32(vocab, dtype, top):
    """Where ids are traced, too; in these vocabularies narrow comparisons would wrap."""
    model, tokens = bare(vocab), np.random.default_rng(0).integers(0, top, (2, 9))

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def run(model, tokens):
        return ed.next_token_loss(model, ed.Batch(tokens=tokens))[0]

    assert_close(run(model, tokens.astype(dtype)), run(model, tokens.astype(np.int32)))


@pytest.mark.slow
def test_raw_keys_and_typed_keys_give_the_same_samples():
    model, tokens = bare(dropout=0.5), some_tokens(2, 5)
    old, new = jax.random.PRNGKey(3), jax.random.key(3)
    assert_array_equal(model(tokens, key=old).logits, model(tokens, key=new).logits)
    losses = [float(ed.next_token_loss(model, ed.Batch(tokens=tokens), key=key)[0]) for key in (old, new, None)]
    assert losses[0] == losses[1] != losses[2]
    for wrong in (3, jnp.float32(3), jnp.int32(3)):
        with refused(ConfigError, "key", "jax.random.key"):
            as_key(wrong)
    assert as_key(None) is None


def test_messages_for_wrong_ids_and_keys():
    with pytest.raises(ConfigError, match=r"^ids of dtype float64 must be integers: use \.astype\(int\)\.$"):
        as_int32("ids", [[0.5]])
    with pytest.raises(ConfigError, match=r"^key=3\.0 must be an integer or a random key"):
        as_key(3.0)
    assert as_key(3) == jax.random.key(3)


def test_ids_that_are_no_integers_are_refused(monkeypatch):
    for wrong in (np.ones((1, 2)), jnp.ones((1, 2)), np.ones((1, 2), bool), np.asarray([[0.5]])):
        with refused(ConfigError, "ids", wrong.dtype):
            as_int32("ids", wrong)
    with refused(ConfigError, "ids", "3000000000", "int32"):
        as_int32("ids", np.asarray([0, 3_000_000_000]))
    kept = np.arange(3, dtype=np.int32)
    assert as_int32("ids", kept) is kept and as_int32("ids", None) is None
    model, tokens = bare(), some_tokens(1, 4)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users call it
    for name in ("positions", "segment_ids"):
        with refused(ConfigError, name, "float32"):
            model(tokens, **{name: np.ones((1, 4), np.float32)})
        with refused(ConfigError, f"Batch.{name}", "float32"):
            ed.Batch(tokens=tokens, **{name: np.ones((1, 4), np.float32)})
    for name, value in (("prompt_lengths", [2.5]), ("stop_ids", (1.5,))):
        with refused(ConfigError, f"generate: {name}", "float64"):
            ed.generate(model, tokens, max_new_tokens=1, **{name: value})


@pytest.mark.parametrize(
    ("positions", "segments", "named"),
    [
        ([[0, 1, 0, 1]], None, "1, then 0"),
        ([[0, 1, 1, -1]], None, "1, then 1"),
        ([[0, -1, 1, 0]], [[2, 0, 2, 2]], "1, then 0"),
        ([[0, 1, 0, 1]], [[1, 1, 2, 1]], "1, then 1"),
    ],
    ids=["falling", "equal", "padded", "two documents"],
)
def test_positions_of_a_document_increase(positions, segments, named):
    model, tokens = bare(), some_tokens(1, 4)
    given = np.asarray(positions), None if segments is None else np.asarray(segments)
    for call in (
        lambda: model(tokens, *given),
        lambda: ed.next_token_loss(model, ed.Batch(tokens=tokens, positions=given[0], segment_ids=given[1])),
    ):
        with refused(ConfigError, "positions", "row 0", named):
            call()
    model(tokens, np.asarray([[0, 1, 0, 3]]), np.asarray([[4, 4, 3, 4]]))
    cache = ed.init_cache(model.config, 1, 8)
    extend(model, tokens, cache, jnp.asarray([[0, 1, -1, 2]]))


def test_padding_has_no_targets():
    model, tokens = bare(), some_tokens(1, 8)
    real = np.asarray([[0, 0, 0, 1, 1, 0, 1, 1]])
    told = [dict(segment_ids=real), dict(positions=np.where(real, np.cumsum(real, axis=1) - 1, -1))]
    one, two = (ed.next_token_loss(model, ed.Batch(tokens=tokens, **each)) for each in told)
    assert float(one[1].tokens) == float(two[1].tokens) == 2 and float(one[0]) == float(two[0])


def test_grid_positions_continue_after_padding():
    """Positions continue in the same document, and start from 0 in a new document."""
    segments = np.asarray([[4, 4, 0, 0, 4, 2, 0, 4]])
    found = grid_positions(GridPositions(), np.full((1, 8), TEXT), segments, {}, 2)
    assert found[0, :, 0].tolist() == [0, 1, 0, 0, 2, 0, 0, 0]


@pytest.mark.slow
def test_masks_of_targets_may_be_of_any_kind():
    model, tokens, mask = bare(), some_tokens(2, 6), np.random.default_rng(0).integers(0, 2, (2, 6))
    losses = {
        float(ed.next_token_loss(model, ed.Batch(tokens=tokens, loss_mask=mask.astype(kind)))[0])
        for kind in (bool, "uint8", "int64", "float32", "float64")
    }
    assert len(losses) == 1


@pytest.mark.parametrize("shape", [(2, 0), (0, 3)])
def test_batches_without_tokens_are_refused(shape):
    with refused(ConfigError, "Batch.tokens", shape):
        ed.next_token_loss(bare(), ed.Batch(tokens=np.zeros(shape, np.int32)))


@pytest.mark.slow
def test_with_jax_enable_x64():
    """Gradients of the loss, and of a recurrence that decays by channel, are those of 32 bits."""
    model, draws = bare(), np.random.default_rng(0)
    query, key, value = (jnp.asarray(draws.normal(size=(1, 20, 1, 4)), jnp.float32) for _ in range(3))
    tokens, decay = np.asarray(some_tokens(2, LENGTH), np.int64), -jnp.abs(query)

    def run():
        loss = eqx.filter_value_and_grad(lambda model: ed.next_token_loss(model, ed.Batch(tokens=tokens))[0])
        rule = jax.jit(jax.grad(lambda *args: delta_rule(*args, key[..., 0], chunk=16)[0].sum(), argnums=(0, 1, 2, 3)))
        return loss(model), rule(query, key, value, decay)

    want = run()
    with jax.enable_x64(True):
        got = run()
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype("float32")}
    assert_close(got, want, units=256)
