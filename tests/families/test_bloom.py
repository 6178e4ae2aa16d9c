"""BLOOM: which stream a block adds to."""

from tests.families.samples import decode, sample


def test_norms_may_normalize_the_stream_itself():
    key = "apply_residual_connection_post_layernorm"
    found = [decode(sample("bloom", **{key: flag})).blocks[0].residual.keeps_normed for flag in (False, True)]
    assert found == [False, True] and not decode(sample("bloom", key)).blocks[0].residual.keeps_normed
