"""Published quantization formats: read by their definition, kept without change, written and read again."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.io.huggingface.directory import Directory, stored_tensors
from eqx_decoders.io.huggingface.peft import load_peft, save_peft
from eqx_decoders.io.huggingface.quantized import checkpoint_tensors
from eqx_decoders.io.huggingface.quantized.write import pack
from eqx_decoders.model.quantize import GROUPED
from eqx_decoders.numerics.quantized_weight import quantized_weights
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.lora import add_lora
from eqx_decoders.training.settings.lora import LoRAConfig
from tests.errors import refused


FIXTURES = Path(__file__).parents[3] / "fixtures"
LLAMA = FIXTURES / "llama_rope"
E4M3 = ml_dtypes.float8_e4m3fn
WORDS = {
    "uint8": "U8", "int8": "I8", "int32": "I32", "int64": "I64", "float8_e4m3fn": "F8_E4M3", "float32": "F32",
    "float16": "F16", "bfloat16": "BF16",
}  # fmt: skip

Stored = tuple[dict[str, np.ndarray], np.ndarray]


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, offset = {}, 0
    for name, x in tensors.items():
        end = offset + x.nbytes
        header[name] = {"dtype": WORDS[x.dtype.name], "shape": list(x.shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(x.tobytes() for x in tensors.values()))


def raw_tensors(directory) -> dict[str, np.ndarray]:
    return {name: tensor.read_all() for name, tensor in stored_tensors(Directory(directory)).items()}


def pack_bits(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Pack the last dimension: concatenate the bits of all values, lowest bits first, and split them into int32."""
    count, found = -(-numbers.shape[-1] * bits // 32), []
    for row in numbers.reshape(-1, numbers.shape[-1]):
        whole = sum(int(number) << bits * place for place, number in enumerate(row))
        found.append([(whole >> 32 * place) & 0xFFFFFFFF for place in range(count)])
    return np.array(found, np.uint32).view(np.int32).reshape(*numbers.shape[:-1], count)


# --- formats: the stored tensors of a module, and the matrix [out, in] that they represent ---


def rng_of(name: str) -> np.random.Generator:
    return np.random.default_rng(sum(map(ord, name)))


def gptq(bits=4, group=8, plain=False, shuffled=False) -> Callable[[str, np.ndarray], Stored]:
    def store(name, w):
        rng, (columns, rows) = rng_of(name), w.shape
        each = rows if group == -1 else group
        numbers = rng.integers(0, 2**bits, (rows, columns))
        zeros = rng.integers(0, 2**bits, (-(-rows // each), columns)) + (not plain)
        scales = rng.uniform(1e-3, 1e-2, zeros.shape).astype(np.float16)
        places = np.arange(rows) // each
        places = rng.permutation(places) if shuffled else places
        found = {
            "qweight": np.ascontiguousarray(pack_bits(numbers.T, bits).T),
            "qzeros": pack_bits(zeros - (not plain), bits),
            "scales": scales,
            "g_idx": places.astype(np.int32),
            "bias": np.zeros(columns, np.float16),
        }
        return found, ((numbers - zeros[places]).astype(np.float32) * scales.astype(np.float32)[places]).T

    return store


def awq(name, w) -> Stored:
    rng, (columns, rows), each = rng_of(name), w.shape, 8
    numbers, zeros = rng.integers(0, 16, (rows, columns)), rng.integers(0, 16, (rows // each, columns))
    scales = rng.uniform(1e-3, 1e-2, zeros.shape).astype(np.float16)

    def packed(x):
        found = np.zeros((len(x), columns // 8), np.uint32)
        for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            found |= x[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
        return found.view(np.int32)

    places = np.arange(rows) // each
    wide = (numbers - zeros[places]).astype(np.float32) * scales.astype(np.float32)[places]
    return {"qweight": packed(numbers), "qzeros": packed(zeros), "scales": scales}, wide.T


def unpacked(kind="int8", scales="channel", zeros=False) -> Callable[[str, np.ndarray], Stored]:
    """Store in the formats `int-quantized` and `float-quantized` of compressed-tensors, or in FBGEMM's format."""

    def store(name, w):
        rng, (rows, columns) = rng_of(name), w.shape
        numbers = rng.integers(-128, 128, w.shape).astype(np.int8)
        numbers = w.astype(E4M3) if kind == "fp8" else numbers
        block = {"channel": (1, columns), "tensor": (rows, columns), "group": (1, 8), "block": (16, 12)}[scales]
        shape = tuple(-(-size // each) for size, each in zip(w.shape, block, strict=True))
        factors = rng.uniform(1e-3, 1e-2, shape).astype(ml_dtypes.bfloat16)
        points = rng.integers(-128, 128, shape).astype(np.int8)
        spread = lambda x: x.repeat(block[0], 0).repeat(block[1], 1)[:rows, :columns].astype(np.float32)  # noqa: E731
        found = {"weight": numbers, "weight_scale": factors.reshape(-1) if scales == "tensor" else factors}
        found |= {"weight_zero_point": points} if zeros else {}
        found |= {"input_scale": np.ones(1, np.float32)}
        return found, (numbers.astype(np.float32) - (spread(points) if zeros else 0)) * spread(factors)

    return store


def packed(bits=4, group: int | None = 8, zeros=False, shuffled=False) -> Callable[[str, np.ndarray], Stored]:
    """Store in the format `pack-quantized` of compressed-tensors."""

    def store(name, w):
        rng, (rows, columns), half = rng_of(name), w.shape, 2 ** (bits - 1)
        numbers = rng.integers(-half, half, w.shape)
        each = columns if group is None else group
        factors = rng.uniform(1e-3, 1e-2, (rows, columns // each)).astype(np.float16)
        points = rng.integers(-half, half, factors.shape) if zeros else np.zeros(factors.shape, int)
        places = np.arange(columns) // each
        places = rng.permutation(places) if shuffled else places
        found = {
            "weight_packed": pack_bits(numbers + half, bits),
            "weight_scale": factors,
            "weight_shape": np.array(w.shape, np.int64),
        }
        found |= {"weight_zero_point": np.ascontiguousarray(pack_bits(points.T + half, bits).T)} if zeros else {}
        found |= {"weight_g_idx": places.astype(np.int32)} if shuffled else {}
        return found, (numbers - points[:, places]).astype(np.float32) * factors.astype(np.float32)[:, places]

    return store


def mxfp4(name, w) -> Stored:
    rng, (rows, columns) = rng_of(name), w.shape
    numbers = rng.integers(0, 16, w.shape).astype(np.uint8)
    powers = rng.integers(110, 128, (rows, columns // 32)).astype(np.uint8)
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    wide = sizes[numbers & 7] * np.where(numbers > 7, -1, 1) * 2.0 ** (powers.astype(float) - 127).repeat(32, 1)
    octets = numbers[:, 0::2] | numbers[:, 1::2] << 4
    return {"weight_packed": octets, "weight_scale": powers}, wide.astype(np.float32)


def compressed(form, **weights) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, **weights}}
    return dict(quant_method="compressed-tensors", format=form, config_groups={"group_0": group}, ignore=["lm_head"])


GPTQ = dict(quant_method="gptq", bits=4, group_size=8, desc_act=False, sym=False, damp_percent=0.1)
AWQ = dict(quant_method="awq", bits=4, group_size=8, zero_point=True, version="gemm", modules_to_not_convert=None)
INT8, FP8 = dict(num_bits=8), dict(num_bits=8, type="float")
FORMATS: dict[str, tuple[Callable, dict[str, Any], str | None]] = {  # the last entry: dtype of quantized values
    "gptq": (gptq(), GPTQ, "int4"),
    "gptq_v2": (gptq(plain=True, bits=8, group=-1), GPTQ | dict(format="gptq_v2", bits=8, group_size=-1), "int8"),
    "gptq in another order": (gptq(shuffled=True), GPTQ | dict(desc_act=True), None),
    "awq": (awq, AWQ, "int4"),
    "int8": (unpacked(), compressed("int-quantized", **INT8, strategy="channel"), "int8"),
    "int8, one scale": (unpacked(scales="tensor"), compressed("int-quantized", **INT8, strategy="tensor"), "int8"),
    "int8 with zeros": (unpacked(zeros=True), compressed("int-quantized", **INT8, symmetric=False), "int8"),
    "fp8": (unpacked("fp8"), compressed("float-quantized", **FP8, strategy="channel"), "uint8"),
    "fp8, one scale": (unpacked("fp8", "tensor"), compressed("naive-quantized", **FP8), "uint8"),
    "fp8 groups": (unpacked("fp8", "group"), compressed("float-quantized", **FP8, group_size=8), "uint8"),
    "fp8 blocks": (
        unpacked("fp8", "block"),
        compressed("float-quantized", **FP8, block_structure=[16, 12]),
        "uint8",
    ),
    "fp8 blocks, older notation": (
        unpacked("fp8", "block"),
        compressed("float-quantized", **FP8, block_structure="16x12"),
        "uint8",
    ),
    "pack": (packed(), compressed("pack-quantized", group_size=8), "int4"),
    "pack with zeros": (packed(zeros=True), compressed("pack-quantized", group_size=8, symmetric=False), "int4"),
    "pack 3 bits": (packed(bits=3), compressed("pack-quantized", num_bits=3, group_size=8), "int4"),
    "pack 8 bits": (packed(8, None, True), compressed("pack-quantized", num_bits=8, strategy="channel"), "int8"),
    "pack in another order": (packed(shuffled=True), compressed("pack-quantized", group_size=8), None),
    "fbgemm": (unpacked("fp8"), dict(quant_method="fbgemm_fp8", activation_scale_ub=1200.0), "uint8"),
}  # fmt: skip


def quantised(folder: Path, store: Callable, config: dict[str, Any], source: Path = LLAMA) -> tuple[Path, Path]:
    """Write a fixture with quantized projections, and a fixture with the equal dequantized projections."""
    directories = [Path(shutil.copytree(source, folder / name)) for name in ("few", "plain")]
    for old in [path for each in directories for path in each.glob("model*")]:
        old.unlink()
    few: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    for name, x in raw_tensors(source).items():
        if "_proj.weight" not in name:
            few[name] = plain[name] = x
            continue
        tensors, plain[name] = store(name, x.astype(np.float32))
        fbgemm = config["quant_method"] == "fbgemm_fp8"
        few |= {name.removesuffix("weight") + key: y for key, y in tensors.items() if not (fbgemm and "input" in key)}
    write(directories[0] / "model.safetensors", few)
    write(directories[1] / "model.safetensors", {name: np.ascontiguousarray(x) for name, x in plain.items()})
    content = json.loads((source / "config.json").read_text())
    (directories[0] / "config.json").write_text(json.dumps(content | {"quantization_config": config}))
    return directories[0], directories[1]


def assert_same(one, other) -> None:
    got, want = named_leaves(one), named_leaves(other)
    assert got.keys() == want.keys()
    for path, leaf in got.items():
        assert leaf.dtype == want[path].dtype, path
        assert np.asarray(leaf).tobytes() == np.asarray(want[path]).tobytes(), path


@pytest.mark.slow(fast=("pack in another order",))
@pytest.mark.parametrize("name", FORMATS)
def test_weights_equal_the_definition(name, tmp_path):
    """Dequantized during loading, or loaded and then dequantized; compared bit by bit."""
    store, config, kept = FORMATS[name]
    few, plain = quantised(tmp_path, store, config)
    want = ed.load_hf(plain)
    assert_same(ed.load_hf(few), want)
    model = ed.load_hf(few, quantized="keep")
    nodes = quantized_weights(model)
    assert {node.values.dtype.name for node in nodes.values()} == ({kept} if kept else set())
    assert len(nodes) == (7 if kept else 0)
    assert_same(ed.dequantize(model), want)
    shapes = ed.abstract_hf(few, quantized="keep")
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), model)


def test_mxfp4_of_compressed_tensors(tmp_path):
    """A matrix with 64 features, so that each row has two scales."""
    stored, wide = mxfp4("w", np.zeros((24, 64)))
    config = compressed("mxfp4-pack-quantized", type="float", group_size=32)
    write(tmp_path / "model.safetensors", {f"m.{key}": x for key, x in stored.items()})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    tensors = checkpoint_tensors(Directory(tmp_path))
    assert list(tensors) == ["m.weight"] and np.array_equal(tensors["m.weight"].read_all(), wide)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 7, 8])
def test_slices_of_packed_weights_may_start_anywhere(bits, tmp_path):
    stored, wide = packed(bits, 8, zeros=True)("w", np.zeros((24, 40)))
    write(tmp_path / "model.safetensors", {f"m.{key}": x for key, x in stored.items()})
    config = compressed("pack-quantized", num_bits=bits, group_size=8)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    tensor, rng = checkpoint_tensors(Directory(tmp_path))["m.weight"], np.random.default_rng(0)
    assert np.array_equal(tensor.read_all(), wide)
    for _ in range(10):
        part = tuple(slice(*map(int, sorted(rng.choice(size + 1, 2, replace=False)))) for size in wide.shape)
        assert np.array_equal(tensor.read(part), wide[part])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [16, -1])
def test_gptq_of_all_bits(bits, group, tmp_path):
    stored, wide = gptq(bits, group, shuffled=group > 0)("w", np.zeros((64, 96)))
    write(tmp_path / "model.safetensors", {f"m.{key}": x for key, x in stored.items()})
    config = GPTQ | dict(bits=bits, group_size=group, desc_act=True)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    tensor = checkpoint_tensors(Directory(tmp_path))["m.weight"]
    assert np.array_equal(tensor.read_all(), wide)
    assert np.array_equal(tensor.read((slice(3, 50), slice(37, 95))), wide[3:50, 37:95])


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(
    "changed",
    [
        dict(desc_act=False),
        dict(desc_act=True),
        dict(desc_act=None),
        dict(desc_act=False, dynamic={"other": {"desc_act": True}}),
        dict(desc_act=True, dynamic={"m": {"desc_act": False}}),
    ],
)
def test_g_idx_is_used_and_desc_act_ignored(shuffled, changed, tmp_path):
    """`desc_act` may be wrong for a module, because its pattern may not match the module's current name."""
    stored, wide = gptq(4, 16, shuffled=shuffled)("w", np.zeros((64, 96)))
    write(tmp_path / "model.safetensors", {f"m.{key}": x for key, x in stored.items()})
    config = GPTQ | dict(group_size=16) | changed
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    tensor = checkpoint_tensors(Directory(tmp_path))["m.weight"]
    assert np.array_equal(tensor.read_all(), wide)
    assert (tensor.group_index is None) == (not shuffled)


@pytest.mark.parametrize(
    "nulls",
    [dict(w_bit=None), dict(q_group_size=None), dict(w_bit=4, bits=None), dict(q_group_size=8, group_size=None)],
)
def test_a_null_key_does_not_conflict_with_its_other_name(nulls, tmp_path):
    few, _ = quantised(tmp_path, gptq(), GPTQ | nulls)
    ed.abstract_hf(few)


@pytest.mark.parametrize(
    "keys",
    [
        dict(),
        dict(quant_method="intel/auto-round"),
        dict(act_bits=16, act_dynamic=True, act_data_type=None, enable_torch_compile=False, train_bs=8),
    ],
)
@pytest.mark.parametrize("kind, backend", [(awq, "auto_round:awq:gemm"), (gptq(), "auto_round:gptq:exllamav2")])
def test_autoround_reads_the_packing_from_the_backend(kind, backend, keys, tmp_path):
    config = dict(quant_method="auto-round", bits=4, group_size=8, data_type="int", backend=backend) | keys
    few, plain = quantised(tmp_path, kind, config)
    assert_same(ed.load_hf(few), ed.load_hf(plain))


@pytest.mark.parametrize("shuffled", [False, True])
def test_awq_accepts_a_g_idx_in_order_only(shuffled, tmp_path):
    stored, wide = awq("w", np.zeros((64, 96)))
    places = np.arange(96) // 8
    stored |= {"g_idx": (places[::-1] if shuffled else places).astype(np.int32)}
    write(tmp_path / "model.safetensors", {f"m.{key}": x for key, x in stored.items()})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": AWQ}))
    if not shuffled:
        assert np.array_equal(checkpoint_tensors(Directory(tmp_path))["m.weight"].read_all(), wide)
        return
    with refused(ed.ConversionError, "m.g_idx", "AWQ", "8"):
        checkpoint_tensors(Directory(tmp_path))


GPTQMODEL_KEYS = {
    **dict(lm_head=False, pack_dtype="int32", act_group_aware=True, pack_impl="cpu", sym=True, mse=0.0),
    "meta": {"quantizer": ["gptqmodel:5.6.12"], "uri": "https://github.com/modelcloud/gptqmodel"},
}


@pytest.mark.parametrize("renamed", [False, True])
def test_modules_with_different_packings(renamed, tmp_path):
    """The packing is found by the patterns of `dynamic` or, if modules were renamed, by the shapes of the tensors."""
    base, down = gptq(), gptq(bits=8, group=4)
    store = lambda name, w: (down if "down_proj" in name else base)(name, w)  # noqa: E731
    pattern = "+:old.*down_proj" if renamed else "+:.*down_proj"
    dynamic = {"-:.*lm_head": {}, pattern: {"bits": 8, "group_size": 4}, ".*never": {"group_size": 16}}
    config = GPTQ | GPTQMODEL_KEYS | dict(checkpoint_format="gptq", format="gptq", method="gptq", dynamic=dynamic)
    few, plain = quantised(tmp_path, store, config)
    assert_same(ed.load_hf(few), ed.load_hf(plain))


@pytest.mark.parametrize(
    "keys",
    [
        dict(version="gemm", format="gemm", checkpoint_format="gemm", desc_act=False),
        dict(version="GEMM", dynamic={"-:.*lm_head": {}}),
        dict(version=None, format="gemm"),
    ],
)
def test_reads_awq_settings_of_gptqmodel(keys, tmp_path):
    few, plain = quantised(tmp_path, awq, AWQ | GPTQMODEL_KEYS | keys)
    assert_same(ed.load_hf(few), ed.load_hf(plain))


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_autoround_files_are_read_as_gptq_or_awq(kind, tmp_path):
    quantized_model = {"bits": 8, "group_size": 4} if kind == "gptq" else {"group_size": 8}
    modules = {"lm_head": {"bits": 16, "data_type": "float"}, "model.layers.0.mlp.down_proj": quantized_model}
    config = dict(quant_method="auto-round", bits=4, group_size=8, sym=True, data_type="int", iters=200)
    config |= dict(packing_format=f"auto_round:auto_{kind}", extra_config=modules, autoround_version="0.14.2")
    special = gptq(bits=8, group=4) if kind == "gptq" else awq
    base = gptq() if kind == "gptq" else awq
    store = lambda name, w: (special if "layers.0.mlp.down_proj" in name else base)(name, w)  # noqa: E731
    few, plain = quantised(tmp_path, store, config)
    assert_same(ed.load_hf(few), ed.load_hf(plain))


def test_packing_inverts_reading():
    numbers = np.random.default_rng(0).integers(-8, 8, (3, 12)).astype(np.int8)
    for bits in (4, 8):
        assert np.array_equal(pack(numbers, bits), pack_bits(numbers.astype(int) + 2 ** (bits - 1), bits))
    with refused(ed.ConversionError, "save_hf", "zero points", "4 bits"):
        pack(np.array([[8]]), 4)


def test_sharded_weights_equal_those_on_one_device(tmp_path):
    few, _ = quantised(tmp_path, packed(zeros=True), FORMATS["pack with zeros"][1])
    layout = ed.Layout.create(fsdp=2, tensor=2, devices=jax.devices()[:4])
    placed = ed.load_hf(few, layout=layout, quantized="keep")
    assert_same(placed, ed.load_hf(few, quantized="keep"))
    shapes = jax.tree.leaves(ed.abstract_hf(few, layout=layout, quantized="keep"))
    assert all(x.sharding == y.sharding for x, y in zip(jax.tree.leaves(placed), shapes, strict=True))


def test_layers_in_different_formats_are_dequantized(tmp_path):
    """Weights are stacked over layers. A weight whose format differs between layers is dequantized."""

    def store(name, w):
        if "layers.1.mlp" in name:
            return {"weight": w}, w
        return packed(4 if "q_proj" not in name else 8)(name, w)

    config = compressed("pack-quantized", group_size=8)
    config["config_groups"]["group_1"] = {"targets": ["x"], "weights": {"num_bits": 8, "group_size": 8}}
    few, plain = quantised(tmp_path, store, config)
    model = ed.load_hf(few, quantized="keep")
    kept = {path.rpartition(".")[2]: node.values.dtype for path, node in quantized_weights(model).items()}
    assert kept == {"query": jnp.int8, "key": jnp.int4, "value": jnp.int4, "out": jnp.int4}
    assert_same(ed.dequantize(model), ed.load_hf(plain))


# --- writing ---

MIXED = {"*.mlp.*": "int4", "*.query": None, "*.out": "fp8", "*": "fp8_block"}
WRITTEN = {
    "int8": ("llama_rope", "int8"),
    "mixed": ("llama_rope", MIXED),
    "experts": ("mixtral_window", {"*": "int4", "head.kernel": "fp8"}),
}
SLOW = {
    "latent": ("deepseek3_groups", {"*.kv_up": "fp8_block", "*": "int8"}),
    "shared tensors": ("qwen3_next", "int8"),
    "fp8 of a file": ("deepseek3_fp8", None),
    "mxfp4 of a file": ("gpt_oss_mxfp4", None),
}
EVERY = [*WRITTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


def quantized_model(name: str) -> ed.Decoder:
    fixture, modes = (WRITTEN | SLOW)[name]
    if modes is None:
        return ed.load_hf(FIXTURES / fixture, quantized="keep")
    has_groups = any(mode in GROUPED for mode in (modes.values() if isinstance(modes, dict) else [modes]))
    return ed.quantize(ed.load_hf(FIXTURES / fixture), modes, group_size=4 if has_groups else None)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_written_weights_round_trip(name, tmp_path):
    """Compared bit by bit. The config names exactly the modules with quantized weights."""
    model = quantized_model(name)
    ed.save_hf(model, tmp_path / "new", shard_bytes=20_000)
    again = ed.load_hf(tmp_path / "new", quantized="keep")
    assert_same(again, model)
    blocks = {path: (node.block, node.inner, node.outer) for path, node in quantized_weights(model).items()}
    assert blocks == {p: (node.block, node.inner, node.outer) for p, node in quantized_weights(again).items()}
    assert_same(ed.load_hf(tmp_path / "new"), ed.dequantize(model))
    config = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    if name == "mxfp4 of a file":
        assert config["quant_method"] == "mxfp4"
        return
    stored = raw_tensors(tmp_path / "new")
    few = {key.rpartition(".weight_scale")[0] for key in stored if key.endswith(".weight_scale")}
    named = {m for group in config["config_groups"].values() for m in modules_of(stored, group["targets"])}
    assert named == few and not modules_of(stored, config["ignore"]) & few
    formats = {group["format"] for group in config["config_groups"].values()}
    assert config["format"] == ("mixed-precision" if len(formats) > 1 else formats.pop())


def modules_of(stored, targets) -> set[str]:
    """Return the modules that compressed-tensors selects by these targets."""
    import re

    modules = {re.sub(r"\.weight\w*$", "", name) for name in stored}
    return {
        module
        for module in modules
        for target in targets
        if (re.match(target[3:], module) if target.startswith("re:") else module == target)
    }


def test_written_quantization_config(tmp_path):
    ed.save_hf(quantized_model("mixed"), tmp_path / "new")
    config = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    groups = {group["weights"]["strategy"]: group for group in config["config_groups"].values()}
    assert config["quant_method"] == "compressed-tensors" and config["quantization_status"] == "compressed"
    assert groups["group"]["weights"] == dict(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=4, block_structure=None, dynamic=False
    )
    assert groups["block"]["weights"]["block_structure"] == [128, 128]
    assert groups["channel"]["format"] == "float-quantized" and groups["group"]["format"] == "pack-quantized"
    assert groups["channel"]["targets"] == [r"re:model\.layers\.[0-9]+\.self_attn\.o_proj$"]
    assert config["ignore"] == [r"re:model\.layers\.[0-9]+\.self_attn\.q_proj$"]
    stored = stored_tensors(Directory(tmp_path / "new"))
    name = "model.layers.1.mlp.down_proj.weight"
    assert (stored[f"{name}_packed"].dtype, stored[f"{name}_packed"].shape) == ("I32", (24, 5))
    assert (stored[f"{name}_scale"].dtype, stored[f"{name}_scale"].shape) == ("F32", (24, 10))
    assert stored[f"{name}_shape"].read_all().tolist() == [24, 40]
    assert stored["model.layers.0.self_attn.o_proj.weight"].dtype == "F8_E4M3"
    assert stored["model.layers.0.self_attn.o_proj.weight_scale"].shape == (24, 1)
    assert stored["model.layers.0.self_attn.k_proj.weight_scale"].shape == (1, 1)


@pytest.mark.slow(fast=("gpt_oss_yarn",))
@pytest.mark.parametrize(
    ("fixture", "modes", "named"),
    [
        ("gpt_oss_yarn", "int8", ["compressed-tensors", "model.layers.0.mlp.experts.gate_up_proj", "dequantize"]),
        ("gpt2", "int8", ["compressed-tensors", "transformer.h.0.attn.c_attn.weight", "dequantize"]),
        ("qwen3_next", {"*.query": "int8"}, ["mixer.query", "model.layers.0.linear_attn.in_proj_qkvz.weight"]),
    ],
    ids=["gpt_oss_yarn", "gpt2", "qwen3_next"],
)
def test_weights_without_a_format_are_refused(fixture, modes, named, tmp_path):
    model = ed.quantize(ed.abstract_hf(FIXTURES / fixture), modes)
    with refused(ed.ConversionError, *named):
        ed.save_hf(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_adapters_of_a_quantized_base(tmp_path):
    base = ed.quantize(ed.load_hf(LLAMA), "int8")
    model = add_lora(base, LoRAConfig(rank=2), key=jax.random.key(0))
    save_peft(model, tmp_path / "adapter")
    assert_same(load_peft(base, tmp_path / "adapter"), model)


# --- refused files ---


def drop(end):
    return lambda tensors: {name: x for name, x in tensors.items() if not name.endswith(end)}


def change(end, how):
    return lambda tensors: {name: how(x) if name.endswith(end) else x for name, x in tensors.items()}


def no_change(tensors):
    return tensors


def setting(path: str, value: Any) -> Callable[[dict], dict]:
    def edit(config):
        config = json.loads(json.dumps(config))
        *above, last = path.split(".")
        inner = config
        for key in above:
            inner = inner[key]
        inner[last] = value
        return config

    return edit


W = "config_groups.group_0.weights."
D = "layers.0.mlp.down_proj."
BROKEN: dict[str, tuple[str, Callable, Callable, list[str]]] = {
    "3 of 7 bits": ("gptq", no_change, setting("bits", 7), ["bits=7", "2, 3, 4, 8"]),
    "group 0": ("gptq", no_change, setting("group_size", 0), ["group_size=0"]),
    "group 16": ("gptq", no_change, setting("group_size", 16), [D + "qweight", "bits=4, group_size=16"]),
    "marlin": ("gptq", no_change, setting("is_marlin_format", True), ["is_marlin_format=true"]),
    "dynamic bits": ("gptq", no_change, setting("dynamic", {"x": {"bits": 7}}), ["dynamic: x", "bits=7"]),
    "dynamic key": ("gptq", no_change, setting("dynamic", {"x": {"bit": 4}}), ["dynamic: x", "'bits'"]),
    "dynamic pattern": ("gptq", no_change, setting("dynamic", {"-:(": {}}), ["dynamic", "'-:('"]),
    "format": ("gptq", no_change, setting("checkpoint_format", "x"), ["checkpoint_format=x", "gptq_v2"]),
    "two formats": (
        "gptq",
        no_change,
        lambda config: config | dict(checkpoint_format="gptq", format="gptq_v2"),
        ["checkpoint_format=gptq", "format=gptq_v2"],
    ),
    "two methods": ("gptq", no_change, setting("method", "awq"), ["method=awq", "gptq"]),
    "rotated": ("gptq", no_change, setting("rotation", "hadamard"), ["rotation=hadamard"]),
    "int64": ("gptq", no_change, setting("pack_dtype", "int64"), ["pack_dtype=int64", "int32"]),
    "unknown key": ("gptq", no_change, setting("group", 1), ["group", "'group_size'"]),
    "no zeros": ("gptq", drop(".qzeros"), dict, [D + "qweight", D + "qzeros"]),
    "no scales": ("gptq", drop(".scales"), dict, [D + "qweight", D + "scales"]),
    "no weights": ("gptq", drop(".qweight"), dict, [D + "qzeros"]),
    "group of no scale": ("gptq", change(".g_idx", lambda x: x + 9), dict, [D + "g_idx", "9", "13", "4"]),
    "negative group": ("gptq", change(".g_idx", lambda x: x - 1), dict, [D + "g_idx", "-1", "3", "4"]),
    "packed group of no scale": (
        "pack in another order", change("g_idx", lambda x: x + 9), dict, [D + "weight_g_idx", "9", "13", "4"]
    ),
    "order": ("gptq", change(".g_idx", lambda x: x[1:]), dict, [D + "g_idx", "(39,)", "(40,)"]),
    "floats": ("gptq", change(".qweight", lambda x: x.astype(np.float32)), dict, [D + "qweight", "F32", "I32"]),
    "a bias": ("gptq", change("_proj.bias", lambda x: x + 1), dict, ["14 tensors", D + "bias"]),
    "gemv": ("awq", no_change, setting("version", "gemv"), ["version=gemv", "gemm"]),
    "awq bits": ("awq", no_change, setting("bits", 8), ["bits=8", "4"]),
    "awq zeros": ("awq", change("qzeros", lambda x: x[1:]), dict, [D + "qweight", "(4, 3)", "bits=4, group_size=8"]),
    "auto-round": (
        "gptq",
        no_change,
        lambda config: dict(quant_method="auto-round", bits=4, packing_format="auto_round:llm_compressor"),
        ["packing_format=auto_round:llm_compressor"],
    ),
    "sparse": ("pack", no_change, setting("sparsity_config", {"format": "sparse-24"}), ["sparsity_config="]),
    "turned": ("pack", no_change, setting("transform_config", {"config_groups": {"a": 1}}), ["transform_config="]),
    "no groups": ("pack", no_change, setting("config_groups", {}), ["config_groups"]),
    "mxfp6": ("pack", no_change, setting("format", "mxfp6-pack-quantized"), ['format="mxfp6-pack-quantized"']),
    "an empty group": ("pack", no_change, setting("config_groups.group_0", {}), ["config_groups.group_0", "weights"]),
    "16 bits": ("pack", no_change, setting(W + "num_bits", 16), ["num_bits=16", "type=int"]),
    "other bits": ("pack", no_change, setting(W + "num_bits", 8), ["weight_shape=[24, 40]", "num_bits=[8]"]),
    "other groups": ("pack", no_change, setting(W + "group_size", 6), [D + "weight_scale", "group_size", "[6]"]),
    "no shape": ("pack", drop("weight_shape"), dict, [D + "weight_packed", D + "weight_shape"]),
    "a shape of floats": ("pack", change("_shape", lambda x: x.astype(np.float32)), dict, [D + "weight_shape", "F32"]),
    "status": ("pack", no_change, setting("quantization_status", "calibration"), ["quantization_status=calibration"]),
    "block": ("fp8 blocks", no_change, setting(W + "block_structure", [16]), ["block_structure=[16]"]),
    "block size": ("fp8 blocks", no_change, setting(W + "block_structure", [16, 16]), [D + "weight_scale", "(16, 16)"]),
    "zeros": ("int8 with zeros", change("zero_point", lambda x: x[1:]), dict, [D + "weight_zero_point", "(23, 1)"]),
    "no scale": ("int8", drop("weight_scale"), dict, [D + "weight", D + "weight_scale"]),
    "scales without numbers": ("int8", change(".weight", lambda x: x.astype(np.float32)), dict, [D + "weight_scale"]),
    "fbgemm scales": ("fbgemm", change("weight_scale", lambda x: x[:, 0]), dict, ["weight_scale", "(24,)", "(24, 1)"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_malformed_files_are_refused(name, tmp_path):
    form, breaks, edit, named = BROKEN[name]
    few, _ = quantised(tmp_path, *FORMATS[form][:2])
    write(few / "model.safetensors", breaks(raw_tensors(few)))
    content = json.loads((few / "config.json").read_text())
    (few / "config.json").write_text(
        json.dumps(content | {"quantization_config": edit(content["quantization_config"])})
    )
    with refused(ed.ConversionError, *named):
        ed.abstract_hf(few, quantized="keep")


def test_keep_has_no_effect_without_quantized_weights():
    shapes = ed.abstract_hf(LLAMA, quantized="keep")
    assert jax.tree.structure(shapes) == jax.tree.structure(ed.abstract_hf(LLAMA))
