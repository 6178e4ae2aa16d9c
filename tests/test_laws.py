"""Every fast path equals the plain path, in values and gradients, for decoders over all options."""

import functools
import itertools
import os

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.remat import POLICIES
from tests.cases import (
    FACTORS,
    FORMS,
    MESHES,
    array_of_forms,
    check,
    covering_array,
    legal,
    legal_pairs,
    pairs,
    random_cases,
    representative,
)
from tests.compare import assert_array_equal, assert_close
from tests.models import VOCAB, extend, filled, packed, rich_decoder, run, some_tokens
from tests.programs import drop_compiled_programs


CASES = covering_array()
CASES_OF_FORMS = array_of_forms(CASES)
FRESH = 24


@functools.cache
def quick_cases():
    """Cheap cases, and one with a state, which is in no cheap one."""
    few = representative(CASES)
    state = few[0] | dict(mixer="delta net", mesh="fsdp x tensor", length=13, packing="packed", cache="pieces")
    return {"plain": few[0], "mesh": few[3] | dict(length=13, dtype="float32", mtp=0), "state": state}


def test_every_legal_pair_of_options_is_in_a_case():
    want, have = legal_pairs(), set().union(*map(pairs, CASES))
    assert have == want and len(want) > 3_500


def test_every_form_meets_every_option():
    have = {(case["mesh"], name, value) for case in CASES_OF_FORMS for name, value in case.items()}
    single = [(name, value) for name, values in FACTORS.items() if name != "mesh" for value in values]
    want = {(form, name, value) for form in FORMS for name, value in single if legal({"mesh": form, name: value})}
    assert want <= have


def test_the_quick_cases_have_many_options():
    quick = quick_cases()
    everything, few, found = (
        {item for c in cases for item in c.items()}
        for cases in (CASES, representative(CASES), (quick["plain"], quick["mesh"]))
    )
    assert few == everything and len(found) > 0.3 * len(everything)


@pytest.mark.parametrize(
    "name", ["plain", pytest.param("mesh", marks=pytest.mark.slow), pytest.param("state", marks=pytest.mark.slow)]
)
def test_the_fast_form_of_a_quick_case_equals_the_plain_one(name):
    drop_compiled_programs()
    check(quick_cases()[name])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=itertools.count())
def test_the_fast_form_of_a_case_equals_the_plain_one(case, record_property):
    drop_compiled_programs()
    check(case)
    record_property("compared cases of the covering array", 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES_OF_FORMS, ids=itertools.count())
def test_every_form_on_a_mesh_equals_the_plain_one(case, record_property):
    drop_compiled_programs()
    check(case)
    record_property("compared cases of forms on meshes", 1)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(FRESH))
def test_the_fast_form_of_a_fresh_case_equals_the_plain_one(number, record_property):
    drop_compiled_programs()
    seed = int(os.environ["FRESH_SEED"])
    case = next(itertools.islice(random_cases(seed), number, None))
    print(f"repeat with FRESH_SEED={seed}: {case}")
    check(case, seed)
    record_property("compared random cases", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "tied"), [(name, number % 2 == 0) for number, name in enumerate(MESHES) if MESHES[name]]
)
def test_every_mesh_equals_one_device(mesh, tied):
    """Rows of sixteen tokens, so that meshes that split sequences do so."""
    tokens, segments = packed(8, 16)
    model = filled(rich_decoder(tied=tied))
    many = model.place(ed.Layout.create(**MESHES[mesh]))
    assert_close(run(many, tokens, segments), run(model, tokens, segments))


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_remat_policy_equals_none(policy):
    tokens, segments = packed(2)
    model = filled(rich_decoder(3), attention="chunked")
    assert_close(run(model.replace(remat=policy), tokens, segments), run(model, tokens, segments))


@pytest.mark.slow
def test_ragged_rows_decode_as_if_alone():
    """Rows of different lengths, padded on the right in the prefill, then each at its own position."""
    tokens = some_tokens(3, 12)
    lengths = jnp.asarray([7, 1, 4])
    model = filled(rich_decoder())
    want = eqx.filter_jit(model)(tokens).logits
    index = jnp.arange(7)[None]
    prompt = jnp.where(index < lengths[:, None], tokens[:, :7], 0)
    cache = ed.init_cache(model.config, 3, 12, dtype=jnp.float32)
    logits, cache = extend(model, prompt, cache, jnp.where(index < lengths[:, None], index, -1))
    for row, length in enumerate([7, 1, 4]):
        assert_close(logits[row, :length], want[row, :length])
    for step in range(5):
        here = lengths + step
        logits, cache = extend(model, jnp.take_along_axis(tokens, here[:, None], axis=1), cache)
        assert_close(logits[:, 0], jnp.take_along_axis(want, here[:, None, None], axis=1)[:, 0])
    assert cache.length.tolist() == [12, 6, 9]


def test_left_padding_changes_nothing():
    tokens = some_tokens(1, 9)
    model = filled(rich_decoder())
    want = eqx.filter_jit(model)(tokens).logits
    padded = jnp.pad(tokens, ((0, 0), (4, 0)))
    positions = jnp.maximum(jnp.arange(13)[None] - 4, -1)
    assert_close(model(padded, positions=positions).logits[:, 4:], want)


@pytest.mark.parametrize(("kernel", "scan"), [pytest.param("dot", False, marks=pytest.mark.slow), ("chunked", True)])
def test_packing_isolates_documents_bit_by_bit(kernel, scan):
    model = filled(rich_decoder(), attention=kernel, scan=scan)
    tokens = some_tokens(2, 11)
    segments = jnp.asarray([[1] * 5 + [2] * 6, [1] * 2 + [2] * 8 + [0]])
    other = tokens.at[:, :2].set((tokens[:, :2] + 3) % VOCAB)
    one, two = run(model, tokens, segments)[0], run(model, other, segments)[0]
    second = np.asarray(segments) == 2
    assert_array_equal(np.asarray(one)[second], np.asarray(two)[second])
    assert not np.array_equal(one, two)


@pytest.mark.slow
def test_packed_documents_equal_documents_alone():
    model = filled(rich_decoder())
    tokens, segments = packed(4)
    logits = eqx.filter_jit(model)(tokens, segment_ids=segments).logits
    for begin, end in ((0, 5), (5, 6), (6, 10)):
        assert_close(logits[:1, begin:end], model(tokens[:1, begin:end]).logits)
