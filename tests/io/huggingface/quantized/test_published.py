"""NVFP4, MXFP8, ModelOpt and bitsandbytes: weights equal those of the packages that wrote them and stay quantized.

`tests/fixtures/few_bits.npz` has a quantized matrix of each format and its float32 values, computed with bitsandbytes
0.50.2 and compressed-tensors 0.20 (torch, CPU).
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.families.registry import FAMILIES
from eqx_decoders.io.huggingface.directory import Directory
from eqx_decoders.io.huggingface.quantized import checkpoint_tensors
from eqx_decoders.model.init import abstract
from eqx_decoders.numerics.nf4_weight import LEVELS
from eqx_decoders.numerics.quantized_weight import quantized_weights
from eqx_decoders.sharding.axes import named_leaves
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused


FIXTURE = np.load(Path(__file__).parents[3] / "fixtures" / "few_bits.npz")
FOUR, EIGHT = ({"quant_method": "bitsandbytes", f"load_in_{bits}bit": True} for bits in (4, 8))


def compressed(form: str, bits: int, group: int) -> dict:
    weights = {"num_bits": bits, "type": "float", "group_size": group, "strategy": "group"}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}


NVFP4, MXFP8 = compressed("nvfp4-pack-quantized", 4, 16), compressed("mxfp8-quantized", 8, 32)
SCHEMES = dict.fromkeys(("nf4", "nf4_nested", "nf4_odd", "fp4"), FOUR) | {"int8": EIGHT, "nvfp4": NVFP4, "mxfp8": MXFP8}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}

Typed = tuple[str, np.ndarray]  # dtype name in the file, and the bits


def write(folder: Path, tensors: dict[str, Typed], config: dict) -> Path:
    header, offset = {}, 0
    for name, (dtype, x) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [offset, offset + x.nbytes]}
        offset += x.nbytes
    raw = json.dumps(header).encode()
    content = b"".join(x.tobytes() for _, x in tensors.values())
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + content)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def stored(name: str) -> dict[str, Typed]:
    keys = [key.removeprefix(f"{name}/") for key in FIXTURE if key.startswith(f"{name}/") and "|" in key]
    return {f"m.{key.partition('|')[0]}": (key.partition("|")[2], FIXTURE[f"{name}/{key}"]) for key in keys}


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_equal_those_of_the_package(name, tmp_path):
    folder = write(tmp_path, stored(name), {"quantization_config": SCHEMES[name]})
    tensors, want = checkpoint_tensors(Directory(folder)), FIXTURE[f"{name}/want"]
    assert list(tensors) == ["m.weight"]
    close = dict(rtol=2e-7, atol=0) if name == "int8" else dict(rtol=0, atol=0)  # the package multiplies by 1 / 127
    assert_allclose(tensors["m.weight"].read_all(), want, **close)
    rng = np.random.default_rng(0)
    for _ in range(10):
        part = tuple(slice(*map(int, sorted(rng.choice(size + 1, 2, replace=False)))) for size in want.shape)
        assert_allclose(tensors["m.weight"].read(part), want[part], **close)


@pytest.mark.parametrize("dtype, size", [("I8", 1), ("BF16", 2), ("F16", 2), ("F32", 4), ("F64", 8), ("I32", 4)])
@pytest.mark.parametrize("name", ["nf4", "nf4_nested"])
def test_bitsandbytes_stores_bytes_as_any_dtype(name, dtype, size, tmp_path):
    """FSDP needs one dtype for all tensors, so bitsandbytes stores bytes as any dtype: `bnb_4bit_quant_storage`."""
    tensors = stored(name)
    octets = tensors["m.weight"][1].reshape(-1, size)
    config = FOUR | {"bnb_4bit_quant_storage": dtype}
    folder = write(tmp_path, tensors | {"m.weight": (dtype, octets.view(f"u{size}"))}, {"quantization_config": config})
    found, want = checkpoint_tensors(Directory(folder))["m.weight"], FIXTURE[f"{name}/want"]
    assert_array_equal(found.read_all(), want)
    assert_array_equal(found.read((slice(1, 3), slice(3, 9))), want[1:3, 3:9])


@pytest.mark.parametrize("own_file", [False, True])
def test_modelopt_multiplies_by_the_global_scale(own_file, tmp_path):
    """The settings are in config.json, or in ModelOpt's own file."""
    rows = stored("nvfp4")
    factor = np.float32(0.375)
    tensors = {"m.weight": rows["m.weight_packed"], "m.weight_scale": rows["m.weight_scale"]}
    tensors |= {"m.weight_scale_2": ("F32", np.array(factor)), "m.input_scale": ("F32", np.array(factor))}
    folder = write(tmp_path, tensors, {} if own_file else {"quantization_config": MODELOPT})
    if own_file:
        own = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
        (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": own}))
    divisor = rows["m.weight_global_scale"][1]
    found = checkpoint_tensors(Directory(folder))
    assert list(found) == ["m.weight"]
    want = FIXTURE["nvfp4/want"] * divisor * factor
    assert_allclose(found["m.weight"].read_all(), want, rtol=3e-7)


@pytest.mark.parametrize("shape", [(), (1,), (6,)])
def test_fp8_of_modelopt(shape, tmp_path):
    bits = np.random.default_rng(0).integers(0, 126, (6, 64), dtype=np.uint8)
    scales = np.random.default_rng(1).uniform(0.5, 2, shape).astype(np.float32)
    tensors = {"m.weight": ("F8_E4M3", bits), "m.weight_scale": ("F32", np.asarray(scales))}
    folder = write(tmp_path, tensors, {"quantization_config": MODELOPT | {"quant_algo": "FP8"}})
    want = bits.view(jax.numpy.float8_e4m3fn).astype(np.float32) * scales.reshape(-1, 1)
    assert_array_equal(checkpoint_tensors(Directory(folder))["m.weight"].read_all(), want)


# --- models -----------------------------------------------------------------------------------------------------------


def random_parts(kind: str, rng: np.random.Generator, rows: int, columns: int) -> dict[str, Typed]:
    """Return the stored tensors of a matrix, with random bits."""
    octets = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    small = rng.integers(40, 60, (rows, columns // 16), dtype=np.uint8)
    if kind == "nvfp4":
        factor = ("F32", np.array([3.7], np.float32))
        return {"weight_packed": ("U8", octets), "weight_scale": ("F8_E4M3", small), "weight_global_scale": factor}
    if kind == "modelopt":
        factor = ("F32", np.array(0.3, np.float32))
        return {"weight": ("U8", octets), "weight_scale": ("F8_E4M3", small), "weight_scale_2": factor}
    if kind == "mxfp8":
        bits = rng.integers(0, 126, (rows, columns), dtype=np.uint8)
        return {"weight": ("F8_E4M3", bits), "weight_scale": ("U8", small[:, ::2] + np.uint8(70))}
    count = rows * columns // 64
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
    parts = {"weight": ("U8", octets.reshape(-1, 1)), "weight.quant_map": ("F32", np.array(LEVELS, np.float32))}
    parts["weight.absmax"] = "F32", rng.uniform(0.01, 0.1, count).astype(np.float32)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return parts | {"weight.quant_state.bitsandbytes__nf4": ("U8", text)}


@pytest.mark.slow(fast=("nvfp4", "nf4"))
@pytest.mark.parametrize(
    ("kind", "scheme", "form"),
    [("nvfp4", NVFP4, "uint4"), ("modelopt", MODELOPT, "uint4"), ("mxfp8", MXFP8, "uint8"), ("nf4", FOUR, "nf4")],
    ids=["nvfp4", "modelopt", "mxfp8", "nf4"],
)
def test_weights_stay_quantized(kind, scheme, form, tmp_path):
    """Quantized weights equal the weights that are dequantized during loading."""
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, vocab_size=32)
    config = {"model_type": "llama", **sizes, "tie_word_embeddings": True}
    family, rng = FAMILIES["llama"], np.random.default_rng(0)
    tensors: dict[str, Typed] = {}
    for mapping in family.bind(abstract(family.decode(config)[0])).values():
        for name in mapping.names:
            if "_proj" in name:
                parts = random_parts(kind, rng, *mapping.shape)
                tensors |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
            else:
                tensors[name] = "F32", rng.normal(1, 0.1, mapping.shape).astype(np.float32)
    folder = write(tmp_path, tensors, config | {"quantization_config": scheme})
    wide, narrow = (ed.load_hf(folder, quantized=way) for way in ("expand", "keep"))
    nodes = quantized_weights(narrow)
    assert len(nodes) == 7 and {node.format for node in nodes.values()} == {form}
    for path, leaf in named_leaves(ed.dequantize(narrow)).items():
        assert_array_equal(leaf, named_leaves(wide)[path], err_msg=path)


STATE, SCALE = "m.weight.quant_state.bitsandbytes__nf4", "m.weight_scale"


def text(**edit) -> Typed:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [6, 128]} | edit
    return "U8", np.frombuffer(json.dumps(state).encode(), np.uint8)


@pytest.mark.parametrize(
    ("name", "key", "tensor", "named"),
    [
        pytest.param("nf4", "m.weight.absmax", None, [], id="absmax"),
        pytest.param("nf4", STATE, text(shape=[6, 64]), ["(384, 1)", "(192, 1)"], id="shape"),
        pytest.param("nf4", STATE, text(shape=[2**40, 2**40]), [f"shape=[{2**40}, {2**40}]"], id="huge shape"),
        pytest.param("nf4", STATE, text(blocksize=0), [STATE, "blocksize=0"], id="blocksize"),
        pytest.param("nf4", STATE, text(quant_type="nf5"), [STATE, "quant_type=nf5", "nf4"], id="quant_type"),
        pytest.param("nf4", STATE, ("U8", np.zeros(20_000, np.uint8)), [STATE, "20000", "10000"], id="long state"),
        pytest.param("nf4", STATE, ("U8", np.zeros(9, np.uint8)), [STATE, "JSON"], id="no JSON"),
        pytest.param("nf4_nested", "m.weight.nested_absmax", None, [], id="nested_absmax"),
        pytest.param("nvfp4", "m.weight_global_scale", ("F32", np.ones(2, np.float32)), ["(2,)"], id="global scale"),
        pytest.param("nvfp4", SCALE, ("F8_E4M3", np.ones((6, 2), np.uint8)), ["(6, 2)", "(6, 4)"], id="nvfp4 scale"),
        pytest.param("mxfp8", SCALE, ("U8", np.ones((6, 64), np.uint8)), ["(6, 64)", "(6, 2)"], id="mxfp8 scale"),
        pytest.param("int8", "m.SCB", ("F32", np.ones(3, np.float32)), ["(3,)", "(6,)"], id="SCB"),
    ],
)
def test_malformed_files_are_refused(name, key, tensor, named, tmp_path):
    tensors = {key: value for key, value in (stored(name) | {key: tensor}).items() if value is not None}
    folder = write(tmp_path, tensors, {"quantization_config": SCHEMES[name]})
    with refused(ed.ConversionError, "m.weight" if key == STATE else key, *named):
        checkpoint_tensors(Directory(folder))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (MODELOPT | {"quant_algo": "NVFP4_AWQ"}, ["quant_algo=NVFP4_AWQ", "NVFP4"]),
        (MODELOPT | {"pre_quant_scale": True}, ["pre_quant_scale=true"]),
        ({"quant_method": "bitsandbytes"}, ["load_in_4bit", "load_in_8bit"]),
        (FOUR | {"unheard": 1}, ["unheard"]),
    ],
    ids=["quant_algo", "pre_quant_scale", "no bits", "unknown"],
)
def test_unsupported_settings_are_refused(config, named, tmp_path):
    folder = write(tmp_path, stored("nf4"), {"quantization_config": config})
    with refused(ed.ConversionError, *named):
        checkpoint_tensors(Directory(folder))
