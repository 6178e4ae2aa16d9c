"""Invariants of every layer, in a small decoder: calls in pieces, packed documents and rejected tokens.

A new layer is one value of a factor in `cases.py`. That its fast forms (kernels, scan, remat, meshes) equal the plain
one is tested by the covering array of `test_laws.py`.
"""

import pytest

import eqx_decoders as ed
from tests.cases import FACTORS, Case, decoder_config, legal
from tests.laws import check_documents, check_pieces, check_ragged_pieces, check_rejection
from tests.models import filled
from tests.programs import drop_compiled_programs


PLAIN: Case = dict(
    mixer="split", heads="multi-head", mask="causal", rope="plain", qk_norm="none", kv_shared_from=False,
    channel="gated", residual="sequential", further="none", norm="RMSNorm", dropout=0.0, mtp=0, tied=True,
    loss="plain",
)  # fmt: skip
LAYERS = {
    value: {factor: value}
    for factor in ("mixer", "channel", "residual", "further")
    for value in FACTORS[factor]
    if value not in ("none", "capacity")  # a capacity drops other tokens of a piece than of the whole sequence
}
LAYERS |= {
    "dynamic mask": dict(mixer="dynamic mask", rope="none"),
    "latent, window": dict(mixer="latent", mask="window"),
    "latent, chunked": dict(mixer="latent", mask="chunked"),
    "grouped, window": dict(heads="grouped", mask="window", qk_norm="each head"),
    "shared keys": dict(mixer="split", kv_shared_from=True),
    "shared choices": dict(mixer="indexed", kv_shared_from=True),
}
INVARIANTS = {
    "pieces": lambda model: check_pieces(model, (6, 1, 3)),
    "ragged pieces on a mesh": lambda model: check_ragged_pieces(model, ed.Layout.create(data=2, fsdp=2, tensor=2)),
    "documents": check_documents,
    "rejected tokens": check_rejection,
}


@pytest.mark.slow(fast=("pieces-delta net", "pieces-dynamic mask", "documents-split"))
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("invariant", INVARIANTS)
def test_invariant_of_a_layer(layer, invariant):
    drop_compiled_programs()
    case = {**PLAIN, **LAYERS[layer]}
    assert legal(case), case
    INVARIANTS[invariant](filled(decoder_config(case)))
