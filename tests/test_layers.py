"""Layers x invariants: a small decoder of each layer, called in pieces, with packed documents and rejected tokens.

A new layer is one value of a factor in `cases.py`. That its fast forms (kernels, scan, remat, meshes) equal the plain
one is tested by the covering array of `test_laws.py`.
"""

import functools
import types

import pytest

import eqx_decoders as ed
from tests.cases import FACTORS, decoder_config, legal
from tests.laws import check_documents, check_pieces, check_ragged_pieces, check_rejection
from tests.models import filled
from tests.programs import drop_compiled_programs


PLAIN = types.MappingProxyType(
    dict(
        mixer="split", heads="multi-head", mask="causal", rope="plain", qk_norm="none", kv_shared_from=False,
        channel="gated", residual="sequential", further="none", norm="RMSNorm", dropout=0.0, mtp=0, tied=True,
        loss="plain",
    )
)  # fmt: skip
LAYERS = {
    value: {factor: value}
    for factor in ("mixer", "channel", "residual", "further")
    for value in FACTORS[factor]
    if value not in ("none", "capacity")  # with a capacity, other tokens of a piece find no place than of the whole
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


@functools.lru_cache(1)
def decoder(layer: str) -> ed.Decoder:
    case = {**PLAIN, **LAYERS[layer]}
    assert legal(case), case
    return filled(decoder_config(case))


@pytest.mark.slow(fast=("pieces-latent, window", "documents-split"))
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("invariant", INVARIANTS)
def test_invariant_of_a_layer(layer, invariant):
    drop_compiled_programs()
    INVARIANTS[invariant](decoder(layer))
