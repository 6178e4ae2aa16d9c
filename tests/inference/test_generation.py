"""Generation: loop = stream = naive recomputation; stops and padding."""

import dataclasses
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.core.sampling import GenerationConfig
from eqx_decoders.inference import generation as generate_module
from eqx_decoders.inference.generation import bucket
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.model.provenance import Provenance
from tests.compare import assert_array_equal
from tests.errors import refused
from tests.models import filled, rich_decoder, some_tokens
from tests.programs import compilations


WINDOWED = rich_decoder(1)


@pytest.fixture(scope="module")
def model():
    """Two equal layers with a window of five tokens, which is shorter than most texts."""
    return filled(dataclasses.replace(WINDOWED, blocks=2 * WINDOWED.blocks))


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


@pytest.mark.slow(fast=("Greedy()",))
@pytest.mark.parametrize(
    "sampler",
    [
        ed.Greedy(),
        ed.Sample(temperature=0.8, top_k=12, top_p=0.9, min_p=0.01),
    ],
)
def test_stream_gives_the_tokens_of_generate(model, sampler):
    prompt, key = some_tokens(2, 5), jax.random.key(1)
    options = dict(max_new_tokens=7, sampler=sampler, key=key, stop_ids=(3, 9), pad_id=31)
    whole = np.asarray(ed.generate(model, prompt, **options))
    pieces = np.stack(list(ed.stream(model, prompt, **options)), axis=1)
    assert_array_equal(pieces, whole[:, : pieces.shape[1]])
    assert (whole[:, pieces.shape[1] :] == 31).all()


def test_stream_names_itself_in_errors(model):
    with refused(ed.ConfigError, "stream: max_new_tokens=0"):
        ed.stream(model, some_tokens(1, 2), max_new_tokens=0)


def test_stop_ids_end_a_row_and_padding_follows(model):
    prompt = some_tokens(3, 5)
    free = np.asarray(ed.generate(model, prompt, max_new_tokens=9))  # by a program of the test above
    stop = int(free[0, 2])
    got = np.asarray(ed.generate(model, prompt, max_new_tokens=9, stop_ids=(stop,), pad_id=31))
    for row in range(3):
        hits = np.flatnonzero(free[row] == stop)
        end = hits[0] + 1 if len(hits) else 9
        assert_array_equal(got[row, :end], free[row, :end])
        assert (got[row, end:] == 31).all()


@pytest.mark.slow
def test_one_token_of_prompt_and_one_new(model):
    got = ed.generate(model, jnp.asarray([[4]]), max_new_tokens=1)
    assert got.shape == (1, 1) and int(got[0, 0]) == naive(model, [4], 1)[0]


@pytest.mark.slow
def test_the_same_key_gives_the_same_tokens(model):
    run = lambda model, seed: np.asarray(  # noqa: E731
        ed.generate(model, some_tokens(2, 3), max_new_tokens=12, sampler=ed.Sample(), key=jax.random.key(seed))
    )
    assert_array_equal(run(model, 0), run(model, 0))
    assert not np.array_equal(run(model, 0), run(model, 1))
    even = eqx.tree_at(lambda m: m.head.kernel, model, jnp.zeros_like(model.head.kernel))
    for row in run(even, 0):  # all tokens are equally likely: each step and row draws for itself
        assert len(set(row.tolist())) > 4
    assert not np.array_equal(*run(even, 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [ed.generate, lambda *args, **options: list(ed.stream(*args, **options))],
)
def test_prompts_and_budgets_of_many_lengths_share_few_programs(model, call):
    """And so do stop ids, keys and the numbers of a sampler, as long as its filters are the same."""

    def once(length, new, number):
        draw = ed.Sample(temperature=0.5 + number, top_k=number, top_p=1 / number)
        options = dict(sampler=draw, key=jax.random.key(number), stop_ids=(number,))
        call(model, np.arange(2 * length).reshape(2, length) % 32, max_new_tokens=new, **options)

    with compilations() as warm:
        once(9, 3, 4)
    with compilations() as further:
        for numbers in ((10, 5, 3), (16, 16, 4), (13, 9, 3)):
            once(*numbers)
    assert warm and not further


@pytest.mark.parametrize(
    "lengths",
    [range(1, 9), range(9, 17), range(17, 33), range(33, 65), range(65, 129), range(513, 641), [64], [1025]],
)
def test_buckets_are_few_and_hold_what_they_must(lengths):
    sizes = {bucket(length) for length in lengths}
    assert len(sizes) == 1 and max(lengths) <= sizes.pop() <= max(8, 1.25 * max(lengths))


@pytest.mark.slow
def test_buckets_waste_at_most_half_of_the_short_and_a_quarter_of_the_long():
    sizes = [bucket(length) for length in range(1, 100_000)]
    assert sizes == sorted(sizes) and len(set(sizes)) < 60
    for length, size in enumerate(sizes, 1):
        assert length <= size <= max(8, length * (2 if length <= 256 else 1.25))


@pytest.mark.slow
def test_lists_of_different_lengths_are_continued_as_if_alone(model):
    rows = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16, 17]]  # in two buckets
    both = np.asarray(ed.generate(model, rows, max_new_tokens=6))
    for row, got in zip(rows, both, strict=True):
        assert_array_equal(ed.generate(model, [row], max_new_tokens=6)[0], got)
    prompt = np.full((3, 12), 31)
    for place, row in zip(prompt, rows, strict=True):
        place[: len(row)] = row
    padded = ed.generate(model, prompt, max_new_tokens=6, prompt_lengths=np.array([3, 1, 9]))
    assert_array_equal(padded, both)


@pytest.mark.slow
def test_within_a_program_prompts_are_taken_as_they_are(model):
    prompt = some_tokens(2, 5)
    inside = jax.jit(lambda tokens: ed.generate(model, tokens, max_new_tokens=3))(prompt)
    assert_array_equal(inside, ed.generate(model, prompt, max_new_tokens=3))


SHARDED = [
    (1, ed.Greedy(), dict(fsdp=4, tensor=2)),  # one row for all: no axis divides it
    (3, ed.Sample(temperature=0.8, top_k=12), dict(data=2, fsdp=2, tensor=2)),
    pytest.param(8, ed.Sample(temperature=0.8, top_p=0.9), dict(data=2, fsdp=2, context=2), marks=pytest.mark.slow),
    pytest.param(2, ed.Greedy(), dict(data=2, expert=2, tensor_sequence=2), marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("rows, sampler, sizes", SHARDED)
def test_a_sharded_model_writes_what_one_device_writes(model, rows, sampler, sizes):
    """Rows that the axes divide, and those that they don't: these are the same on several devices."""
    placed = model.place(ed.Layout.create(**sizes))
    prompt = [[5, 6, 7, 8, 9][: 2 + row % 3] for row in range(rows)]
    options = dict(max_new_tokens=9, sampler=sampler, key=jax.random.key(3), stop_ids=(3,))
    want = np.asarray(ed.generate(model, prompt, **options))
    got = ed.generate(placed, prompt, **options)
    assert_array_equal(got, want)
    pieces = np.stack(list(ed.stream(placed, prompt, **options)), axis=1)
    assert_array_equal(pieces, want[:, : pieces.shape[1]])


@pytest.mark.slow
def test_what_the_host_reads_is_on_every_device(model):
    """With several processes, each process must be able to read the tokens, `count` and `done`."""
    placed = model.place(ed.Layout.create(data=4, tensor=2))
    request = generate_module._Request.create("generate", placed, some_tokens(4, 5), max_new_tokens=6)
    assert generate_module._generate(placed, request).sharding.is_fully_replicated
    state, first = generate_module._first_step(placed, request)
    state, second = generate_module._next_step((placed, request.rules, np.asarray(1, np.int32)), state)
    results = (*first, *second, generate_module._all_tokens(placed, state))
    assert all(x.sharding.is_fully_replicated for x in results)


@pytest.mark.slow
def test_published_generation_config_is_the_default(model):
    prompt, key = some_tokens(2, 4), jax.random.key(3)
    sampled = GenerationConfig(do_sample=True, temperature=2.0, top_k=5, stop_ids=(3,))
    published = dataclasses.replace(model, origin=Provenance(family="llama", generation=sampled))
    assert published.generation_config == sampled and model.generation_config == GenerationConfig()
    draw = ed.Sample(temperature=2.0, top_k=5)
    want = ed.generate(model, prompt, max_new_tokens=9, sampler=draw, key=key, stop_ids=(3,))
    assert_array_equal(ed.generate(published, prompt, max_new_tokens=9, key=key), want)
    with refused(ed.ConfigError, "key=", "sampler=Greedy"):
        ed.generate(published, prompt, max_new_tokens=9)
    greedy = ed.generate(published, prompt, max_new_tokens=9, sampler=ed.Greedy(), stop_ids=())
    assert_array_equal(greedy, ed.generate(model, prompt, max_new_tokens=9))


def test_beyond_the_trained_positions_there_is_a_warning(model):
    published = dataclasses.replace(model, origin=Provenance(family="llama", settings='{"max_position_embeddings": 8}'))
    assert published.trained_positions == 8 and model.trained_positions is None
    with pytest.warns(UserWarning, match=r"6 .*max_new_tokens=3 .*8 positions"):
        ed.generate(published, some_tokens(1, 6), max_new_tokens=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ed.generate(published, some_tokens(1, 6), max_new_tokens=2)


@pytest.mark.parametrize(
    "prompt, options, names",
    [
        (some_tokens(1, 3), dict(max_new_tokens=0), ["max_new_tokens=0"]),
        (some_tokens(1, 0), {}, ["length 0", "bos_id"]),
        (np.asarray([[32]]), {}, ["32", "31"]),
        (np.asarray([[-1]]), {}, ["-1", "31"]),
        (some_tokens(1, 3), dict(sampler=ed.Sample()), ["key="]),
        (some_tokens(1, 3), dict(prompt_lengths=np.asarray([4])), ["prompt_lengths=[4]", "3"]),
    ],
    ids=["max_new_tokens", "empty", "large id", "negative id", "key", "prompt_lengths"],
)
def test_wrong_arguments_are_refused(model, prompt, options, names):
    with refused(ed.ConfigError, *names):
        ed.generate(model, prompt, **{"max_new_tokens": 2} | options)


def test_learned_positions_bound_the_length():
    config = dataclasses.replace(WINDOWED, positions=LearnedPositions(max_positions=8))
    with refused(ed.ConfigError, "8 learned positions", "Reduce max_new_tokens to 4."):
        ed.generate(filled(config), some_tokens(1, 4), max_new_tokens=5)
    with refused(ed.ConfigError, "8 learned positions", "Shorten the prompt."):
        ed.generate(filled(config), some_tokens(1, 8), max_new_tokens=1)


def test_the_sharding_of_tokens_does_not_depend_on_their_number():
    config = dataclasses.replace(WINDOWED, blocks=(ed.BlockConfig(mixer=None, mlp=None),))
    placed = filled(config).place(ed.Layout.create(data=2, devices=jax.devices()[:2]))
    tokens = [ed.generate(placed, some_tokens(2, 3), max_new_tokens=count) for count in (7, 8)]
    assert [array.shape for array in tokens] == [(2, 7), (2, 8)]
    assert tokens[0].sharding == tokens[1].sharding and tokens[0].sharding.is_fully_replicated


@pytest.mark.slow
def test_rows_draw_alone_whatever_kind_of_key_draws(model):
    """`vmap` gives generators other than Threefry one number for all rows: that of the first, which may have ended."""
    key = jax.random.key(1, impl="rbg")
    options = dict(max_new_tokens=12, sampler=ed.Sample(), key=key)
    free = np.asarray(ed.generate(model, some_tokens(2, 5), **options))
    stopped = np.asarray(ed.generate(model, some_tokens(2, 5), stop_ids=(int(free[0, 2]),), **options))
    ends = np.flatnonzero(free[1] == free[0, 2])
    count = int(ends[0]) + 1 if len(ends) else 12
    assert_array_equal(stopped[1, :count], free[1, :count])
    assert len(set(free[1].tolist())) > 3


def test_an_unknown_option_is_an_error(model):
    with refused(TypeError, "'stop_id'"):
        ed.generate(model, some_tokens(1, 2), max_new_tokens=2, stop_id=(3,))


@pytest.mark.slow
def test_a_stream_holds_no_more_than_its_tokens(model):
    pieces = list(ed.stream(model, some_tokens(2, 5), max_new_tokens=7))
    assert sum(piece.nbytes if piece.base is None else piece.base.nbytes for piece in pieces) == 2 * 7 * 4


@pytest.fixture(scope="module")
def smaller():
    return ed.serving.DraftModel(model=filled(WINDOWED, seed=3), num_tokens=2)


def test_drafts_of_a_smaller_model_change_no_token(model, smaller):
    prompt, options = some_tokens(3, 5), dict(max_new_tokens=9)
    want = ed.generate(model, prompt, **options)
    assert_array_equal(ed.generate(model, prompt, drafts=smaller, **options), want)


@pytest.mark.slow
def test_a_stream_with_drafts_of_the_model_itself_gives_the_tokens_of_generate(model):
    """Also of rows that are far ahead when the slowest of them ends."""
    prompt = some_tokens(3, 5)
    stop = int(ed.generate(model, prompt, max_new_tokens=9)[1, 2])
    drafts = ed.serving.DraftModel(model=model, num_tokens=3)
    options = dict(max_new_tokens=9, drafts=drafts, stop_ids=(stop,))
    streamed = np.stack(list(ed.stream(model, prompt, **options)), axis=1)
    whole = np.asarray(ed.generate(model, prompt, **options))
    assert_array_equal(streamed, whole[:, : streamed.shape[1]])


def test_two_kinds_of_drafts_are_refused(model, smaller):
    prompt, options = some_tokens(3, 5), dict(max_new_tokens=9)
    with refused(ed.ConfigError, "num_draft_tokens=1", "drafts"):
        ed.generate(model, prompt, drafts=smaller, num_draft_tokens=1, **options)
    with refused(ed.ConfigError, "drafts=PromptLookup", "DraftModel"):
        ed.generate(model, prompt, drafts=ed.serving.PromptLookup(), **options)


def test_blocks_of_scales_that_do_not_fit_are_refused_at_once(model):
    wrong = ed.CacheFormat(dtype="int8", scale_block=3)
    with refused(ed.ConfigError, "scale_block=3"):
        ed.stream(model, some_tokens(1, 2), max_new_tokens=2, cache_dtype=wrong)
