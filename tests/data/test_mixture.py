"""Test mixtures: weights and names of paths, and an order in which sources follow their weights at any point."""

import collections
from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st

from eqx_decoders.data.mixture import Mixture, find_mixture, find_sets, shares_of
from eqx_decoders.errors import ConfigError
from tests.errors import refused


@pytest.mark.slow
@given(weights=st.lists(st.integers(1, 30), min_size=1, max_size=7))
@settings(max_examples=60)
def test_source_counts_differ_from_their_share_by_at_most_one_row(weights):
    mixture, taken = Mixture.of_weights([Fraction(weight) for weight in weights]), [0] * len(weights)
    for row in range(2 * sum(weights) + 3):
        source, number = mixture.find(row)
        assert number == taken[source]  # rows of a source are in order
        taken[source] += 1
        assert mixture.count(row + 1) == taken
        for count, weight in zip(taken, weights, strict=True):
            assert abs(count - Fraction((row + 1) * weight, sum(weights))) < 1
    far = 10**12 * sum(mixture.per_period)
    assert [mixture.find(far + row)[0] for row in range(9)] == [mixture.find(row)[0] for row in range(9)]


def test_mixture_order_is_stable():
    assert [Mixture.of_weights([Fraction("0.7"), Fraction("0.3")]).find(row)[0] for row in range(10)] == TWO
    assert [Mixture.of_weights([Fraction(1), Fraction(1), Fraction(4)]).find(row)[0] for row in range(6)] == THREE


TWO = [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
THREE = [2, 2, 0, 2, 1, 2]


@pytest.mark.slow
def test_arbitrary_weights_have_an_order():
    """Weights are rounded to five digits."""
    mixture = Mixture.of_weights([Fraction("0.123456789"), Fraction("0.876543211"), Fraction("1e-12")])
    assert sum(mixture.per_period) == 100_001 and mixture.per_period[2] == 1
    counts = collections.Counter(mixture.find(row)[0] for row in range(100_001))
    assert [counts[source] for source in range(3)] == mixture.per_period
    assert counts[0] / 100_001 == pytest.approx(0.12345, abs=1e-5)


@pytest.mark.slow
def test_integer_parts_are_preserved():
    """This also holds if rounding makes the sum of the parts larger than the sum for any weights."""
    mixture = Mixture.of_weights([Fraction("0.123456789"), Fraction("0.876543211"), Fraction("1e-12")])
    again = Mixture(mixture.per_period)
    assert again.per_period == mixture.per_period and again.find(99_999) == mixture.find(99_999)


def test_urls_that_end_with_a_number():
    for plain in ("https://h/a.jsonl?v=2", ("https://h/a?x=y&part=03", "s3://b/c")):
        assert find_mixture(plain) == ()
    found = find_mixture(("https://h/a.jsonl?v=2=3", "s3://b/year=2024=1", "gs://b/web/=2", "gs://b/x=0.5", "gs://c=7"))
    paths = ["https://h/a.jsonl?v=2", "s3://b/year=2024", "gs://b/web/", "gs://b/x", "gs://c"]
    assert [one.path for one in found] == paths and [float(one.weight) for one in found] == [3, 1, 2, 0.5, 7]
    names = ("'s3://b/year=2024'", "'s3://b/year'", "2024", "'s3://b/year=2024=1'")
    for doubtful in ("s3://b/year=2024", ("s3://b/year=2023=1", "s3://b/year=2024"), ("s3://b/year=2024", "s3://b/x")):
        with refused(ConfigError, *names):
            find_mixture(doubtful)


def test_weights_follow_paths_and_names_come_from_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = ("web/*.jsonl.gz=0.7", "code/**/*.parquet=.3", "a/train.jsonl=1", "b/train.txt=2e1", "x/v=2/=3", "*.py=4")
    found = find_mixture(paths)
    assert [one.name for one in found] == ["web", "code", "train", "train-2", "v-2", "data"]
    assert [one.path for one in found] == [path.rpartition("=")[0] for path in paths]
    assert [float(one.weight) for one in found] == [0.7, 0.3, 1, 20, 3, 4]
    assert shares_of(("a=1", "b=3")) == shares_of(("c/*=0.25", "d=.75")) == [Fraction(1, 4), Fraction(3, 4)]
    for plain in (None, "a", ("a", "b.jsonl"), "a=b", "a=0.5x", "=3", "a=1_0", "a=1/2"):
        assert find_mixture(plain) == ()
    assert [one.path for one in find_mixture("a=b=2")] == ["a=b"]


def test_existing_paths_are_not_parsed_as_weights_or_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "year=2024").mkdir()
    (tmp_path / "year=2024" / "a.txt").write_text("x")
    assert find_mixture(("year=2024", "year=2024/*.txt")) == () == find_mixture("year=2024/a.txt")
    assert find_sets("year=2024") == {} == find_sets(("year=2024/*.txt", "year=2024/a.txt"))
    (only,) = find_mixture("year=2024=0.5")
    assert only.path == "year=2024" and only.name == "year-2024"
    assert find_sets("val=year=2024") == {"val": ("year=2024",)}


def test_names_of_held_out_sets():
    assert find_sets(("web=w.jsonl", "code-1.2=c/", "web=v.jsonl")) == {
        "web": ("w.jsonl", "v.jsonl"),
        "code-1.2": ("c/",),
    }
    for plain in (None, "a.jsonl", ("a", "b"), "a/b=c", "=a", "a="):
        assert find_sets(plain) == {}


@pytest.mark.parametrize(
    "find, paths, names",
    [
        pytest.param(find_mixture, ("a=1", "b"), ["--data (DataConfig.path)", "'b'"], id="no-weight"),
        pytest.param(find_mixture, ("a=1", "b=0"), ["--data", "'b=0'"], id="zero"),
        pytest.param(find_mixture, ("a=-1", "b=1"), ["--data", "'a=-1'"], id="negative"),
        pytest.param(find_mixture, ("a=1", "a=2"), ["--data", "'a'"], id="twice"),
        pytest.param(find_sets, ("x=a", "b"), ["--held-out (DataConfig.held_out_path)", "'b'"], id="no-name"),
    ],
)
def test_invalid_mixtures_and_sets_are_refused(find, paths, names):
    with refused(ConfigError, *names):
        find(paths)
