"""Generation: loop = stream = naive recomputation; stops and padding."""

import collections
import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.embedding import LearnedPositions
from tests.models import filled, rich_decoder, some_tokens


@pytest.fixture(scope="module")
def model():
    return filled(rich_decoder())


def naive(model, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding without a cache: the whole text again for every token, in one padded shape."""
    ids, width = list(prompt), len(prompt) + count
    run = eqx.filter_jit(lambda model, tokens: model(tokens).logits)
    for _ in range(count):
        tokens = jnp.asarray([ids + [0] * (width - len(ids))])
        ids.append(int(run(model, tokens)[0, len(ids) - 1].argmax()))
    return ids[len(prompt) :]


def test_greedy_equals_recomputation_for_ragged_prompts(model):
    prompt = np.asarray(some_tokens(3, 6))
    lengths = np.asarray([6, 2, 3])
    got = np.asarray(ed.generate(model, prompt, max_new_tokens=9, prompt_lengths=lengths))
    assert got.shape == (3, 9)
    for row in range(3):
        assert got[row].tolist() == naive(model, prompt[row, : lengths[row]].tolist(), 9)


@pytest.mark.parametrize("sampler", [ed.Greedy(), ed.Sample(temperature=0.8, top_k=12, top_p=0.9, min_p=0.01)])
def test_stream_gives_the_tokens_of_generate(model, sampler):
    prompt, key = some_tokens(2, 5), jax.random.key(1)
    options = dict(max_new_tokens=7, sampler=sampler, key=key, stop_ids=(3, 9), pad_id=31)
    whole = np.asarray(ed.generate(model, prompt, **options))
    pieces = np.stack(list(ed.stream(model, prompt, **options)), axis=1)
    np.testing.assert_array_equal(pieces, whole[:, : pieces.shape[1]])
    assert (whole[:, pieces.shape[1] :] == 31).all()


def test_stop_ids_end_a_row_and_padding_follows(model):
    prompt = some_tokens(3, 5)
    free = np.asarray(ed.generate(model, prompt, max_new_tokens=8))
    stop = int(free[0, 2])
    got = np.asarray(ed.generate(model, prompt, max_new_tokens=8, stop_ids=(stop,), pad_id=31))
    for row in range(3):
        hits = np.flatnonzero(free[row] == stop)
        end = hits[0] + 1 if len(hits) else 8
        np.testing.assert_array_equal(got[row, :end], free[row, :end])
        assert (got[row, end:] == 31).all()


def test_one_token_of_prompt_and_one_new(model):
    got = ed.generate(model, jnp.asarray([[4]]), max_new_tokens=1)
    assert got.shape == (1, 1) and int(got[0, 0]) == naive(model, [4], 1)[0]


def test_the_same_key_gives_the_same_tokens(model):
    run = lambda model, seed: np.asarray(  # noqa: E731
        ed.generate(model, some_tokens(2, 3), max_new_tokens=12, sampler=ed.Sample(), key=jax.random.key(seed))
    )
    np.testing.assert_array_equal(run(model, 0), run(model, 0))
    assert not np.array_equal(run(model, 0), run(model, 1))
    even = eqx.tree_at(lambda m: m.head.kernel, model, jnp.zeros_like(model.head.kernel))
    for row in run(even, 0):  # all tokens are equally likely: each step and row draws for itself
        assert len(set(row.tolist())) > 4
    assert not np.array_equal(*run(even, 0))


def test_one_program_serves_all_prompts_of_a_shape(model):
    run = lambda seed: ed.generate(model, some_tokens(2, 4, seed), max_new_tokens=3)  # noqa: E731
    run(0)
    with jax.log_compiles(False):
        count = collections.Counter()
        jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: count.update([name]))
        run(1)
    assert not [name for name in count if "compile" in name]


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda m: ed.generate(m, some_tokens(1, 3), max_new_tokens=0), ["max_new_tokens=0", "at least 1"]),
        (lambda m: ed.generate(m, some_tokens(1, 0), max_new_tokens=2), ["length 0", "bos_id"]),
        (lambda m: ed.generate(m, jnp.asarray([[32]]), max_new_tokens=2), ["32", "0 to 31"]),
        (lambda m: ed.generate(m, jnp.asarray([[-1]]), max_new_tokens=2), ["-1", "0 to 31"]),
        (lambda m: ed.generate(m, some_tokens(1, 3), max_new_tokens=2, sampler=ed.Sample()), ["key="]),
        (
            lambda m: ed.generate(m, some_tokens(1, 3), max_new_tokens=2, prompt_lengths=np.asarray([4])),
            ["prompt_lengths=[4]", "1 to 3"],
        ),
    ],
)
def test_refusals(model, call, words):
    with pytest.raises(ed.ConfigError) as caught:
        call(model)
    for word in words:
        assert word in str(caught.value)


def test_learned_positions_bound_the_length():
    config = dataclasses.replace(rich_decoder(1), positions=LearnedPositions(max_positions=8))
    with pytest.raises(ed.ConfigError, match="8 learned positions"):
        ed.generate(filled(config), some_tokens(1, 4), max_new_tokens=5)
