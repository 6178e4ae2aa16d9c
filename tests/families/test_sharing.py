"""Weights of different sizes that share a tensor: layout, reading in pieces, and refusal of wrong shapes."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqx_decoders as ed
from eqx_decoders.families import llama
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.registry import FAMILIES
from eqx_decoders.families.weight_rows import Section, Weight, sharing
from eqx_decoders.io.huggingface import load, peft
from eqx_decoders.io.huggingface.directory import StoredTensor
from eqx_decoders.sharding.axes import named_leaves
from tests.errors import refused
from tests.models import filled


_ATTENTION = "model.layers.{layer}.self_attn."
_QUERY = ("mixer.query", "(heads head_dim) embed -> embed heads head_dim")
_KEY, _VALUE = ((f"mixer.{name}", "(kv_heads head_dim) embed -> embed kv_heads head_dim") for name in ("key", "value"))
_BIASES = (
    ("mixer.query_bias", "(heads head_dim) -> heads head_dim"),
    *((f"mixer.{name}_bias", "(kv_heads head_dim) -> kv_heads head_dim") for name in ("key", "value")),
)
TABLES = {
    # all queries, all keys, all values
    "one block": sharing(_ATTENTION + "qkv.weight", _QUERY, _KEY, _VALUE),
    # for each key head, the queries that use it
    "within": sharing(_ATTENTION + "qkv.weight", _KEY, _QUERY, _VALUE, within="kv_heads"),
    # concatenated along the second dimension; the third dimension has size 1
    "axis": sharing(
        _ATTENTION + "qkv.weight",
        *(
            (path, pattern.replace(") embed ->", ") 1 ->").replace("(", "embed ("))
            for path, pattern in (_QUERY, _KEY, _VALUE)
        ),
        axis=1,
        within="kv_heads",
    ),
}
SHAPE = DecoderSizes(
    vocab_size=32, embed_dim=8, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=4, mlp_dim=8, attention_bias=True
)  # fmt: skip


@pytest.fixture(params=TABLES)
def saved(request, monkeypatch, tmp_path):
    """Return the variant of a family in which queries, keys and values share tensors, a model, and its directory."""
    own = [row for row in llama.FAMILY.weights if not row.path.startswith(("mixer.query", "mixer.key", "mixer.value"))]
    biases = sharing(_ATTENTION + "qkv.bias", *_BIASES)
    family = dataclasses.replace(llama.FAMILY, weights=(*own, *TABLES[request.param], *biases))
    monkeypatch.setitem(FAMILIES._families, "llama", family)
    model = filled(llama.llama(SHAPE))  # biases of a new model are zeros, which would hide a wrong order
    ed.save_hf(model, tmp_path / "saved", family="llama")
    return request.param, model, tmp_path / "saved"


@pytest.mark.slow
def test_shared_tensor_is_the_concatenation(saved):
    name, model, directory = saved
    found = load_file(directory / "model.safetensors")
    for layer in range(2):
        mixer = jax.tree.map(lambda x, layer=layer: np.asarray(x[layer]), model.scanned_layers[0].unit[0].mixer)
        query, key, value = (np.moveaxis(x, 0, -1) for x in (mixer.query, mixer.key, mixer.value))
        if name == "one block":
            want = np.concatenate([x.reshape(-1, 8) for x in (query, key, value)])
        else:
            order = [(key, 1), (query, 4), (value, 1)] if name == "within" else [(query, 4), (key, 1), (value, 1)]
            heads = [x[head * each : (head + 1) * each].reshape(-1, 8) for head in range(2) for x, each in order]
            want = np.concatenate(heads)
        if name == "axis":
            want = want.T[:, :, None]
        assert np.array_equal(found[f"model.layers.{layer}.self_attn.qkv.weight"], want)
        bias = np.concatenate([x.reshape(-1) for x in (mixer.query_bias, mixer.key_bias, mixer.value_bias)])
        assert np.array_equal(found[f"model.layers.{layer}.self_attn.qkv.bias"], bias)


LAYOUTS = {
    "one device": None,
    "between heads": dict(tensor=2, fsdp=2),
    "inside of heads and blocks": dict(tensor=4, weights={"head_dim": "tensor"}),
    "inside of blocks": dict(tensor=4, weights={"heads": "tensor"}),
}


@pytest.mark.slow(fast=("one block-between heads-pieces",))
@pytest.mark.parametrize("piece", [load._MAX_READ, 4 * 24], ids=["whole", "pieces"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_tensor_round_trips(saved, layout, piece, monkeypatch, tmp_path):
    _, model, directory = saved
    monkeypatch.setattr(load, "_MAX_READ", piece)
    options = LAYOUTS[layout]
    devices = None if options is None else jax.devices()[:4]
    where = None if options is None else ed.Layout.create(**options, devices=devices)
    again = ed.load_hf(directory, layout=where)
    leaves = named_leaves(again)
    assert all(np.array_equal(leaves[path], leaf) for path, leaf in named_leaves(model).items())
    if where is not None and piece > 1000:
        assert any(not leaf.sharding.is_fully_replicated for path, leaf in leaves.items() if "mixer.query" in path)
        ed.save_hf(again, tmp_path / "again")
        one, other = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "again"))
        assert all(np.array_equal(one[tensor], other[tensor]) for tensor in one | other)


@pytest.mark.slow(fast=("one block",))
def test_error_contains_the_expected_shape(saved):
    name, _, directory = saved
    found = load_file(directory / "model.safetensors")
    tensor = "model.layers.1.self_attn.qkv.weight"
    found[tensor] = np.ascontiguousarray(found[tensor][:, :-1])
    save_file(found, directory / "model.safetensors")
    shape = {"one block": (48, 8), "within": (48, 8), "axis": (8, 48, 1)}[name]
    with refused(ed.ConversionError, tensor, shape):
        ed.load_hf(directory)


def test_all_weights_of_a_shared_tensor_must_exist(monkeypatch):
    rows = sharing("qkv.{layer}", _QUERY, _KEY, ("mixer.gate", _QUERY[1]))
    own = tuple(row for row in llama.FAMILY.weights if row.path not in ("mixer.query", "mixer.key"))
    family = dataclasses.replace(llama.FAMILY, weights=(*own, *rows))
    with refused(ed.ConversionError, "mixer.query", "qkv.{layer}", 3, 2):
        family.bind(ed.abstract(llama.llama(SHAPE)))


@pytest.mark.parametrize("within, names", [("mlp", ["axis", "mlp"]), ("embed", ["multiple", 12])], ids=["mlp", "embed"])
def test_interleaved_blocks_must_match_the_layer(within, names):
    rows = (Weight("x", "mixer.query", _QUERY[1]), *sharing("kv.{layer}", _KEY, _VALUE, within=within))
    shape = dataclasses.replace(SHAPE, embed_dim=12)
    own = tuple(row for row in llama.FAMILY.weights if row.path not in ("mixer.key", "mixer.value"))
    family = dataclasses.replace(llama.FAMILY, weights=(*own, *rows))
    with refused(ed.ConversionError, *names):
        family.bind(ed.abstract(llama.llama(shape)))


def test_slices_of_a_section_read_only_its_blocks():
    """For any range of rows, also if it starts or ends within a block.

    Rows outside of the touched blocks are not read.
    """
    x = np.arange(3 * 20 * 2).reshape(3, 20, 2)
    section = Section(index=1, axis=1, blocks=4, begin=1, size=3, block_size=5)
    own = section.of(x).reshape(3, 12, 2)
    assert np.array_equal(own[0, :, 0] // 2, [1, 2, 3, 6, 7, 8, 11, 12, 13, 16, 17, 18])
    taken = []

    class Tensor(StoredTensor):
        def read(self, part):
            taken.append(part)
            return x[part]

    tensor = Tensor(Path(), "x", x.shape, "F32", 0)

    for start in range(12):
        for stop in range(start + 1, 13):
            cuts = (slice(1, 3), slice(start, stop), slice(0, 1))
            assert np.array_equal(load._read_slices(tensor, section, cuts), own[cuts])
            rows = taken[-1][1]
            assert rows.start >= start // 3 * 5 and rows.stop <= -(-stop // 3) * 5
            if start // 3 == (stop - 1) // 3:
                assert rows.stop - rows.start == stop - start


def test_part_of_a_shared_tensor_cannot_have_a_peft_adapter(saved):
    assert not any(
        path.startswith("scanned_layers.0.unit.0.mixer.query") for path in peft._adaptable(saved[1], magnitudes=False)
    )
