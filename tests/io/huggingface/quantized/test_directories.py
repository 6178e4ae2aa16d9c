"""Quantized checkpoints equal the dequantized weights of transformers, and inconsistent checkpoints are refused."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.io.huggingface import load
from eqx_decoders.io.huggingface.directory import Directory, StoredTensor, stored_tensors
from eqx_decoders.io.huggingface.quantized import checkpoint_tensors, read_scheme
from eqx_decoders.io.huggingface.verify import compare_directories, compare_tensors
from eqx_decoders.sharding.axes import named_leaves
from tests.errors import refused


FIXTURES = Path(__file__).parents[3] / "fixtures"
NAMES = ("gpt_oss_mxfp4", "deepseek3_fp8")
WORDS = {"uint8": "U8", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "float32": "F32", "bfloat16": "BF16"}
FP8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[16, 12])
MXFP4 = dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"])
PROJECTIONS = ("query", "key", "value", "out", "gate", "up", "down")
E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


def write(path, tensors):
    """Write a safetensors file; the package cannot write NumPy's eight-bit dtypes."""
    header, offset = {}, 0
    for name, x in tensors.items():
        end = offset + x.nbytes
        header[name] = {"dtype": WORDS[x.dtype.name], "shape": list(x.shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(x.tobytes() for x in tensors.values()))


def whole(tensor) -> np.ndarray:
    return tensor.read(tuple(slice(0, size) for size in tensor.shape))


def raw_tensors(directory) -> dict[str, np.ndarray]:
    return {name: whole(tensor) for name, tensor in stored_tensors(Directory(directory)).items()}


def dequantized_tensors(folder, tensors, scheme) -> dict[str, np.ndarray]:
    """Return the dequantized tensors of a file with these tensors."""
    write(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({"quantization_config": scheme}))
    return {name: whole(tensor) for name, tensor in checkpoint_tensors(Directory(folder)).items()}


def edited_copy(name, folder, change=lambda tensors: tensors, **quantization) -> Path:
    """Copy a fixture with changed tensors and changed settings of its quantization (Ellipsis removes one)."""
    directory = Path(shutil.copytree(FIXTURES / name, folder / name))
    content = json.loads((directory / "config.json").read_text())
    settings = content.get("quantization_config", {}) | quantization
    settings = {key: value for key, value in settings.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(content | dict(quantization_config=settings)))
    write(directory / "model.safetensors", change(raw_tensors(directory)))
    return directory


def same(one, other) -> bool:
    return one.shape == other.shape and np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_tensors_and_slices_equal_those_of_transformers(name):
    wanted = {key[8:]: x for key, x in np.load(FIXTURES / name / "expected.npz").items() if key.startswith("weights/")}
    tensors = checkpoint_tensors(Directory(FIXTURES / name))
    rng = np.random.default_rng(0)
    assert len(wanted) > 3
    for key, x in wanted.items():
        assert tensors[key].shape == x.shape
        assert same(whole(tensors[key]), x), key
        for _ in range(5):
            ends = [sorted(rng.choice(size + 1, 2, replace=False)) for size in x.shape]
            part = tuple(slice(int(begin), int(end)) for begin, end in ends)
            assert same(tensors[key].read(part), x[part]), (key, part)


def test_fp4_equals_its_definition(tmp_path):
    """All bytes with all scales: (-1)^s 2^(e - 1) (1 + m / 2), or m / 2 where e is 0, the low four bits first."""

    def number(bits):
        sign, exponent, half = bits >> 3, (bits >> 1) & 3, bits & 1
        size = half / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + half / 2)
        return -size if sign else size

    blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16).repeat(255, axis=1)
    scales = np.arange(255, dtype=np.uint8).reshape(1, 255, 1).repeat(16, axis=2)
    found = dequantized_tensors(tmp_path, {"w_blocks": blocks, "w_scales": scales}, MXFP4)["w"]
    inner = np.array([number(bits) for byte in range(256) for bits in (byte & 15, byte >> 4)])
    with np.errstate(over="ignore"):
        wanted = (inner[:, None] * 2.0 ** (np.arange(255) - 127)).astype(np.float32)
    assert same(found, wanted[None])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "e8m0", "uint8"])
def test_fp8_equals_its_definition(kind, tmp_path):
    """All bytes, with partial blocks, of matrices and of stacks of them; NaN stays NaN."""
    rng = np.random.default_rng(0)
    bits = np.concatenate([np.arange(256, dtype=np.uint8), rng.integers(0, 256, 2 * 17 * 11 - 256, np.uint8)])
    values = bits.reshape(2, 17, 11).view(E4M3)
    scales = rng.uniform(1e-4, 2, (2, 3, 3)).astype(np.float32)
    power = rng.integers(100, 140, scales.shape, np.uint8)
    scales = {
        "float32": scales,
        "bfloat16": scales.astype(ml_dtypes.bfloat16),
        "e8m0": power.view(E8M0),
        "uint8": power,
    }[kind]
    scheme = FP8 | dict(weight_block_size=[8, 5]) | (dict(scale_fmt="ue8m0") if kind == "uint8" else {})
    stack = {"w": values, "w_scale_inv": scales}
    found = dequantized_tensors(tmp_path, stack | {"one": values[1], "one_scale_inv": scales[1]}, scheme)
    assert set(found) == {"w", "one"}
    factors = 2.0 ** (power.astype(np.float32) - 127) if kind in ("e8m0", "uint8") else scales.astype(np.float32)
    for where in np.ndindex(values.shape):
        wanted = np.float32(values[where]) * factors[where[0], where[1] // 8, where[2] // 5]
        assert found["w"][where] == wanted or (np.isnan(wanted) and bits.reshape(values.shape)[where] & 0x7F == 0x7F)
    assert same(found["w"][1], found["one"])
    assert np.isnan(found["w"]).sum() >= 2


SCALES_OF_STACKS = [(2,), (2, 1), (2, 1, 1), (2, 6), (2, 6, 1)]
SCALES_OF_MATRICES = [(), (1,), (1, 1), (6,), (6, 1)]


@pytest.mark.parametrize("end", ["_scale_inv", "_scale"])
@pytest.mark.parametrize("block", [None, [4, 4]], ids=["no block", "block"])
@pytest.mark.parametrize("number", range(5))
def test_fp8_with_one_scale_per_matrix_or_row(number, block, end, tmp_path):
    """The shape of the scales shows their granularity. Static scales of activations are ignored."""
    rng = np.random.default_rng(number)
    stack = rng.normal(size=(2, 6, 5)).astype(E4M3)
    scales, scale = (
        rng.uniform(0.1, 2, shapes[number]).astype(np.float32) for shapes in (SCALES_OF_STACKS, SCALES_OF_MATRICES)
    )
    tensors = {"experts.w": stack, f"experts.w{end}": scales, "one.weight": stack[1], f"one.weight{end}": scale}
    tensors |= {"one.activation_scale": np.float32(3)[None], "one.input_scale": np.float32(3)[None]}
    caches = [f"attn.{name}_scale" for name in ("k", "v", "q", "kv", "prob")]
    tensors |= {"experts.w_activation_scale": np.ones(2, np.float32), **dict.fromkeys(caches, np.ones(1, np.float32))}
    for scheme in ("static", "dynamic"):
        folder = tmp_path / scheme
        folder.mkdir()
        found = dequantized_tensors(folder, tensors, FP8 | dict(weight_block_size=block, activation_scheme=scheme))
        assert set(found) == {"experts.w", "one.weight"}
        spread = scales.reshape(2, -1, 1) * np.ones((2, 6, 1), np.float32)
        assert same(found["experts.w"], stack.astype(np.float32) * spread)
        assert same(found["one.weight"], stack[1].astype(np.float32) * scale.reshape(-1, 1))


@pytest.mark.slow(fast=("gpt_oss_mxfp4",))
@pytest.mark.parametrize("name", NAMES)
def test_sharded_weights_equal_those_on_one_device(name):
    model = ed.load_hf(FIXTURES / name)
    placed = ed.load_hf(FIXTURES / name, layout=ed.Layout.create(fsdp=2, tensor=2, devices=jax.devices()[:4]))
    for (path, one), other in zip(named_leaves(model).items(), jax.tree.leaves(placed), strict=True):
        assert one.dtype == jnp.float32
        assert np.array_equal(one, other), path


@pytest.mark.slow
def test_dtype_argument_selects_the_dtype():
    exact = named_leaves(ed.load_hf(FIXTURES / NAMES[0]))
    for dtype in ("bfloat16", None):  # MXFP4 values are exact in bfloat16
        for path, leaf in named_leaves(ed.load_hf(FIXTURES / NAMES[0], dtype=dtype)).items():
            assert leaf.dtype == jnp.bfloat16
            assert np.array_equal(leaf.astype(jnp.float32), exact[path]), path


@pytest.mark.slow(fast=("gpt_oss_mxfp4",))
@pytest.mark.parametrize("name", NAMES)
def test_an_exported_model_is_not_quantized(name, tmp_path):
    model = ed.load_hf(FIXTURES / name)
    ed.save_hf(model, tmp_path / "new")
    content = json.loads((tmp_path / "new" / "config.json").read_text())
    assert "quantization_config" not in content
    assert content["dtype"] == "float32"
    stored = raw_tensors(tmp_path / "new")
    assert {x.dtype for x in stored.values()} == {np.dtype(np.float32)}
    wanted = {key[8:]: x for key, x in np.load(FIXTURES / name / "expected.npz").items() if key.startswith("weights/")}
    assert all(same(stored[key], x) for key, x in wanted.items())
    again = ed.load_hf(tmp_path / "new")
    assert again.config == model.config
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True))
    assert compare_directories(FIXTURES / name, tmp_path / "new") == ([], [])


@pytest.mark.slow(fast=("gpt_oss_mxfp4",))
@pytest.mark.parametrize("name", NAMES)
def test_verification_compares_dequantized_tensors(name):
    count, different = compare_tensors(FIXTURES / name)
    assert (count, different) == (len(checkpoint_tensors(Directory(FIXTURES / name))), [])


def test_a_dense_model_in_fp8(tmp_path):
    """Any family may be quantized; tensors of other dtypes need no scale."""

    def scaled(tensors, store):
        found = {}
        for name, x in tensors.items():
            if "_proj" not in name:
                found[name] = x
                continue
            rows, columns = (-(-size // block) for size, block in zip(x.shape, (16, 12), strict=True))
            scales = (10 + np.arange(rows * columns, dtype=np.float32)).reshape(rows, columns) / 1000
            spread = scales.repeat(16, 0).repeat(12, 1)[: x.shape[0], : x.shape[1]]
            found |= store(name, (x.astype(np.float32) / spread).astype(E4M3), scales, spread)
        return found

    def quantised(tensors):
        return scaled(tensors, lambda name, x, scales, _: {name: x, f"{name}_scale_inv": scales})

    def rounded(tensors):
        return scaled(tensors, lambda name, x, _, spread: {name: x.astype(np.float32) * spread})

    ignored = dict(ignored_layers=["lm_head"], modules_to_not_convert=None)
    model = ed.load_hf(edited_copy("mistral_window", tmp_path / "fp8", quantised, **FP8, **ignored))
    plain = edited_copy("mistral_window", tmp_path / "plain", rounded)
    content = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(content | {"quantization_config": None}))
    exact, before = named_leaves(ed.load_hf(plain)), named_leaves(ed.load_hf(FIXTURES / "mistral_window"))
    for path, leaf in named_leaves(model).items():
        assert np.array_equal(leaf, exact[path]), path
        assert np.array_equal(leaf, before[path]) == (not path.endswith(PROJECTIONS)), path


# --- refused checkpoints ---------------------------------------------------------------------------------------------


def drop(end):
    return lambda tensors: {name: x for name, x in tensors.items() if not name.endswith(end)}


def change(end, how):
    return lambda tensors: {name: how(x) if name.endswith(end) else x for name, x in tensors.items()}


same_tensors = dict
DOWN, SHAPES = "model.layers.0.mlp.down_proj.weight", ("(2, 4)", "(24, 40)")
INPUT = "model.norm.input_scale"
BROKEN = {
    "hqq": (0, same_tensors, dict(quant_method="hqq"), ["quant_method=hqq", "mxfp4, fp8"]),
    "aqlm": (0, same_tensors, dict(quant_method="aqlm", bits=4), ["quant_method=aqlm"]),
    "no method": (0, same_tensors, dict(quant_method=...), ["quant_method=None"]),
    "a list": (0, same_tensors, dict(quant_method=["mxfp4"]), ["quant_method=['mxfp4']"]),
    "unknown key": (0, same_tensors, dict(group_size=64), ["group_size"]),
    "no list": (0, same_tensors, dict(modules_to_not_convert="lm_head"), ["modules_to_not_convert"]),
    "no scheme": (1, same_tensors, dict(activation_scheme="none"), ["activation_scheme=none", "dynamic"]),
    "e5m2": (1, same_tensors, dict(fmt="e5m2"), ["fmt=e5m2", "e4m3"]),
    "fp4 experts": (1, same_tensors, dict(expert_dtype="fp4"), ["expert_dtype=fp4", "fp8"]),
    "scale format": (1, same_tensors, dict(scale_fmt="e4m3"), ["scale_fmt=e4m3", "ue8m0"]),
    "no block": (1, same_tensors, dict(weight_block_size=...), [DOWN, *SHAPES, "weight_block_size"]),
    "null block": (1, same_tensors, dict(weight_block_size=None), [DOWN, *SHAPES, "weight_block_size"]),
    "one block": (1, same_tensors, dict(weight_block_size=[16]), ["weight_block_size=[16]"]),
    "zero block": (1, same_tensors, dict(weight_block_size=[16, 0]), ["weight_block_size=[16, 0]"]),
    "other block": (1, same_tensors, dict(weight_block_size=[16, 16]), [DOWN, *SHAPES, "weight_block_size=[16, 16]"]),
    "without scales": (0, drop("_scales"), {}, ["down_proj_blocks", "down_proj_scales"]),
    "without blocks": (0, drop("_blocks"), {}, ["down_proj_scales", "U8", "quantization_config"]),
    "shape of scales": (0, change("_scales", lambda x: x[:, 1:]), {}, ["_scales", "(3, 63, 1)", "(3, 64, 1)"]),
    "dtype of scales": (0, change("_scales", lambda x: x.astype(np.float32)), {}, ["_scales", "F32", "U8"]),
    "size of blocks": (0, change("_blocks", lambda x: x[..., :8]), {}, ["_blocks", "(3, 64, 1, 8)", "U8", "16"]),
    "shape of blocks": (0, change("_blocks", lambda x: x[:, :, 1:]), {}, ["_scales", "(3, 64, 1)", "(3, 64, 0)"]),
    "without scale_inv": (1, drop("_scale_inv"), {}, [DOWN, f"{DOWN}_scale_inv"]),
    "without weights": (1, change("proj.weight", lambda x: x.astype(np.float32)), {}, [f"{DOWN}_scale_inv", "F8_E4M3"]),
    "shape of scale_inv": (
        1,
        change("_scale_inv", lambda x: x[:1]),
        {},
        [DOWN, "(1, 4)", "weight_block_size=[16, 12]"],
    ),
    "scale_inv in bytes": (1, change("_scale_inv", lambda x: x.astype(np.uint8)), {}, [f"{DOWN}_scale_inv", "U8"]),
    "a vector": (1, change("norm.weight", lambda x: x.astype(E4M3)), {}, ["layernorm.weight_scale_inv"]),
    "input scales": (1, lambda x: x | {INPUT: np.ones(1, np.float32)}, {}, ["1 tensors", INPUT]),
}
FAST = ("hqq", "aqlm", "no method", "a list", "unknown key", "no list", "no scheme", "e5m2", "fp4 experts",
        "scale format", "no block", "null block")  # fmt: skip


@pytest.mark.slow(fast=FAST)
@pytest.mark.parametrize("name", BROKEN)
def test_errors_are_raised_before_reading_weights(name, tmp_path, monkeypatch):
    fixture, breaks, settings, named = BROKEN[name]
    directory = edited_copy(NAMES[fixture], tmp_path, breaks, **settings)

    def read(self, part):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(StoredTensor, "read", read)
    for read_in in (ed.abstract_hf, ed.load_hf):
        with refused(ed.ConversionError, *named):
            read_in(directory)


def test_8_bit_weights_need_a_quantization_config(tmp_path):
    directory = edited_copy("deepseek3_fp8", tmp_path)
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(content | {"quantization_config": None}))
    with refused(ed.ConversionError, DOWN, "F8_E4M3", "quantization_config"):
        ed.load_hf(directory)
    with refused(ed.ConversionError, "quantization_config=[]"):
        read_scheme({"quantization_config": []})


ODD = (None, 0, -1, 1.5, True, "", "fp8", "mxfp4", [], [1], [1, 1], [True, 1], ["x"], {}, {"x": 1}, [[1], [1]], 10**40)


@pytest.mark.parametrize("scheme", [FP8 | dict(scale_fmt="ue8m0", expert_dtype="fp8"), MXFP4], ids=["fp8", "mxfp4"])
def test_unusual_settings_are_read_or_refused(scheme):
    errors = []
    for key in (*scheme, "x"):
        for value in ODD:
            try:
                read_scheme({"quantization_config": scheme | {key: value}})
            except ed.ConversionError as error:
                assert len(str(error)) < 1000
                errors.append(key)
    assert all(errors.count(key) > len(ODD) // 2 for key in scheme)
    assert errors.count("x") == len(ODD) - 1  # null is ignored


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow(fast=("gpt_oss_mxfp4",))
@pytest.mark.parametrize("name", [*NAMES, "gpt_oss_yarn"])
def test_a_large_tensor_is_read_in_pieces(name, monkeypatch):
    """No dequantized piece is larger than the limit, and the pieces give the same weights."""
    expected = named_leaves(ed.load_hf(FIXTURES / name))
    taken, part = [], load._read_part

    def recorded(tensor, row, index):
        x = part(tensor, row, index)
        others = 1 if row.section is None or row.section.blocks == 1 else row.section.block_size // row.section.size
        taken.append((x.size * others, x.shape))
        return x

    monkeypatch.setattr(load, "_read_part", recorded)
    monkeypatch.setattr(load, "_MAX_READ", 4 * 1500)
    for path, leaf in named_leaves(ed.load_hf(FIXTURES / name)).items():
        assert np.array_equal(leaf, expected[path]), path
    rows = 2 * 64 * 32  # a row of the largest tensor: one expert's matrix
    assert max(size for size, _ in taken) <= (rows if name == "gpt_oss_mxfp4" else 1500)
    assert len(taken) > 1.2 * sum(np.prod(leaf.shape[:1]) for leaf in expected.values() if leaf.ndim > 2)
