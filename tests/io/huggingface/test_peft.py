"""Adapters written by PEFT give PEFT's logits and are exported bit by bit; unsupported adapters are refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqx_decoders as ed
from eqx_decoders.cli.serve import read_adapter
from eqx_decoders.errors import ConfigError, ConversionError
from eqx_decoders.families.registry import FAMILIES
from eqx_decoders.io.huggingface import peft
from eqx_decoders.io.huggingface.load import load_hf
from eqx_decoders.io.huggingface.peft import load_peft, save_peft
from eqx_decoders.io.huggingface.peft_config import IGNORED_PEFT_KEYS, UNSUPPORTED_KEYS
from eqx_decoders.numerics.low_rank import LowRank, low_rank_weights
from eqx_decoders.sharding.axes import named_leaves, replaced
from eqx_decoders.training.lora import add_lora, merge_lora, without_lora
from eqx_decoders.training.settings.lora import LoRAConfig
from tests.adapters import pairs, trained
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused


FIXTURES = Path(__file__).parents[2] / "fixtures"
NAMES = ("peft_llama", "peft_gpt2")
WITH_MORE = ("peft_dora", "peft_pissa")  # values that are exported in another form than they are stored
LLAMA = FIXTURES / "peft_llama"
Q_PROJ = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"


@pytest.fixture(scope="module", params=NAMES)
def fixture(request):
    """Directory, base model and adapted model."""
    directory = FIXTURES / request.param
    base = load_hf(directory / "base")
    return directory, base, load_peft(base, directory / "adapter")


@pytest.fixture(scope="module")
def llama():
    return load_hf(LLAMA / "base")


def settings(directory: Path) -> dict:
    return json.loads((directory / "adapter_config.json").read_text())


def tensors(directory: Path) -> dict[str, np.ndarray]:
    return load_file(directory / "adapter_model.safetensors")


def same(first, second) -> None:
    """Return whether two models are equal bit by bit, scales included."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(assert_array_equal, first, second)


@pytest.fixture
def copy(tmp_path):
    """Return a function that copies the Llama adapter with changed settings and tensors (None removes an entry)."""

    def make(changed: dict | None = None, weights: dict | None = None) -> Path:
        directory = Path(shutil.copytree(LLAMA / "adapter", tmp_path / "copy"))
        content = settings(directory) | (changed or {})
        (directory / "adapter_config.json").write_text(json.dumps(content))
        kept = {name: x for name, x in (tensors(directory) | (weights or {})).items() if x is not None}
        save_file(kept, directory / "adapter_model.safetensors")
        return directory

    return make


# --- agreement with PEFT ---


@pytest.mark.slow(fast=("peft_gpt2",))
def test_logits_equal_those_of_peft(fixture):
    directory, base, model = fixture
    expected = np.load(directory / "expected.npz")
    ids = jnp.asarray(expected["input_ids"])
    assert_allclose(model(ids).logits, expected["logits"], rtol=0, atol=1e-4)
    assert np.abs(expected["logits"] - expected["base_logits"]).max() > 1
    kept = named_leaves(base)
    assert all(
        leaf is kept[name.removesuffix(".base")]
        for name, leaf in named_leaves(model).items()
        if name not in pairs(model)
    )


def test_the_merged_model_gives_the_same_logits(llama):
    expected = np.load(LLAMA / "expected.npz")
    merged = merge_lora(load_peft(llama, LLAMA / "adapter"))
    assert_allclose(merged(jnp.asarray(expected["input_ids"])).logits, expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_MORE)
def test_dora_and_pissa_logits_equal_those_of_peft(name, tmp_path):
    """After loading, after merging, and after a round trip. PiSSA is written as a pair of twice the rank."""
    expected = np.load(FIXTURES / name / "expected.npz")
    base = load_hf(FIXTURES / name / "base")
    model = load_peft(base, FIXTURES / name / "adapter")
    save_peft(model, tmp_path / "again")
    again, written = load_peft(base, tmp_path / "again"), settings(tmp_path / "again")
    logits = eqx.filter_jit(lambda model: model(jnp.asarray(expected["input_ids"])).logits)
    for one in (model, merge_lora(model), again):
        assert_allclose(logits(one), expected["logits"], rtol=0, atol=2e-5)
    assert np.abs(expected["logits"] - expected["base_logits"]).max() > 1
    assert_allclose(logits(without_lora(model)), expected["base_logits"], rtol=0, atol=1e-5)
    assert all(node.start_a is None for node in low_rank_weights(again).values())
    if name == "peft_pissa":
        assert (written["r"], written["lora_alpha"]) == (4, 6)
    else:  # all layers of a stack have the same rank
        assert written["use_dora"] and written["use_rslora"] and written["rank_pattern"] == {"down_proj": 2}
        assert written["alpha_pattern"] == {"o_proj": 6}
        theirs, ours = tensors(FIXTURES / name / "adapter"), tensors(tmp_path / "again")
        assert theirs.keys() == ours.keys()
        lengths = [key for key in ours if key.endswith("lora_magnitude_vector")]
        assert len(lengths) == 8
        for key in lengths:
            assert_allclose(ours[key], theirs[key], rtol=1e-6)


def test_adapters_of_peft_are_written_back_bit_by_bit(fixture, tmp_path):
    directory, base, model = fixture
    save_peft(model, tmp_path / "again")
    theirs, ours = tensors(directory / "adapter"), tensors(tmp_path / "again")
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == ours[name].dtype
        assert_array_equal(tensor, ours[name], err_msg=name)
    same(load_peft(base, tmp_path / "again"), model)
    first, second = settings(directory / "adapter"), settings(tmp_path / "again")
    assert second.keys() <= first.keys()
    for key in ("r", "lora_alpha", "use_rslora", "bias", "fan_in_fan_out", "peft_type", "task_type", "lora_dropout"):
        assert second[key] == first[key]


def test_target_modules_are_short_if_all_layers_are_adapted(fixture, tmp_path):
    directory, _, model = fixture
    save_peft(model, tmp_path / "again", base_model="org/base")
    named = settings(tmp_path / "again")["target_modules"]
    short = set(settings(directory / "adapter")["target_modules"])
    if directory.name == "peft_gpt2":  # c_proj of the attention has no adapter
        short = short - {"mlp.c_proj"} | {f"transformer.h.{layer}.mlp.c_proj" for layer in range(2)}
    assert named == sorted(short)
    assert settings(tmp_path / "again")["base_model_name_or_path"] == "org/base"


@pytest.mark.slow
def test_adapts_a_single_layer_between_two_stacks(tmp_path):
    base = load_hf(FIXTURES / "gemma3_pattern")
    model = trained(base, LoRAConfig(rank=2, targets=("scanned_layers.1.unit.0.mixer.query", "*.mixer.out")))
    save_peft(model, tmp_path / "some")
    assert settings(tmp_path / "some")["target_modules"] == ["model.layers.2.self_attn.q_proj", "o_proj"]
    back = load_peft(base, tmp_path / "some")
    jax.tree.map(assert_array_equal, pairs(back), pairs(model))


@pytest.mark.slow(fast=("8-16.0-False",))
@pytest.mark.parametrize(
    "rank, alpha, rank_stabilized", [(8, 16.0, False), (6, 1.0, False), (5, 3.0, True), (3, 0.7, False)]
)
def test_scales_round_trip(llama, tmp_path, rank, alpha, rank_stabilized):
    lora = LoRAConfig(rank=rank, alpha=alpha, rank_stabilized=rank_stabilized)
    model = trained(llama, lora)
    save_peft(model, tmp_path / "one")
    content = settings(tmp_path / "one")
    assert (pytest.approx(content["lora_alpha"]), content["use_rslora"]) == (alpha, rank_stabilized)
    for node in low_rank_weights(load_peft(llama, tmp_path / "one")).values():
        assert node.scale == pytest.approx(lora.scale, rel=1e-15)


# --- dtypes and devices ---


def test_dtypes(llama, tmp_path):
    half = load_peft(llama, LLAMA / "adapter", dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in pairs(half).values()} == {jnp.dtype(jnp.bfloat16)}
    save_peft(half, tmp_path / "half")
    jax.tree.map(
        lambda a, b: assert_array_equal(a, np.asarray(b, a.dtype)),
        tensors(tmp_path / "half"),
        tensors(LLAMA / "adapter"),
    )
    again = pairs(load_peft(llama, tmp_path / "half"))  # dtype of the model's weights
    for name, leaf in pairs(half).items():
        assert again[name].dtype == jnp.float32
        assert_array_equal(again[name], leaf.astype(jnp.float32))


def test_pairs_are_created_and_written_sharded(llama, tmp_path):
    layout = ed.Layout.create(fsdp=4, tensor=2)
    model = load_peft(llama.place(layout), LLAMA / "adapter")
    shardings = named_leaves(layout.shardings(model))
    for name, leaf in pairs(model).items():
        assert leaf.sharding == shardings[name]
    assert not shardings["scanned_layers.0.unit.0.mixer.query.lora_a"].is_fully_replicated
    save_peft(model, tmp_path / "again")
    jax.tree.map(assert_array_equal, tensors(tmp_path / "again"), tensors(LLAMA / "adapter"))


# --- refusals of settings ---

REFUSED = {
    "peft_type": "IA3",
    "r": 0,
    "lora_alpha": -1,
    "use_rslora": "yes",
    "bias": "some",
    "ensure_weight_tying": "yes",
    "use_dora": "yes",
    "use_qalora": True,
    "use_bdlora": {"target_modules_bd_a": []},
    "lora_bias": True,
    "modules_to_save": "lm_head",
    "layer_replication": [[0, 2], [1, 3]],
    "rank_pattern": {"q_proj": 0},
    "alpha_pattern": {"q_proj(": 2},
    "loftq_config": {"loftq_bits": 4},
    "init_lora_weights": "pissa_niter_4",
    "megatron_config": {"a": 1},
    "trainable_token_indices": [-1],
    "target_parameters": "experts.down_proj",
    "alora_invocation_tokens": [5],
    "corda_config": {},
    "lora_ga_config": {},
    "arrow_config": {},
    "kasa_config": {},
    "monteclora_config": {},
    "velora_config": {},
    "made_up": 1,
}


@pytest.mark.parametrize(
    "key, value",
    [pytest.param(key, value, id=key) for key, value in REFUSED.items()]
    + [pytest.param(key, None, id=f"no {key}") for key in ("peft_type", "r", "lora_alpha")],
)
def test_unsupported_and_missing_settings_are_refused(llama, copy, key, value):
    with pytest.raises(ConversionError, match=rf"adapter_config\.json.*\b{key}\b"):
        load_peft(llama, copy({key: value}))


def test_every_unsupported_setting_has_a_case():
    assert UNSUPPORTED_KEYS.keys() <= REFUSED.keys() and not UNSUPPORTED_KEYS.keys() & IGNORED_PEFT_KEYS.keys()
    known = REFUSED.keys() | IGNORED_PEFT_KEYS.keys()
    assert settings(LLAMA / "adapter").keys() <= known


def test_settings_without_an_effect_are_ignored(llama, copy):
    directory = copy(dict.fromkeys(IGNORED_PEFT_KEYS, "anything") | {"init_lora_weights": "gaussian"})
    same(load_peft(llama, directory), load_peft(llama, LLAMA / "adapter"))


def test_pissa_with_several_scales_in_one_stack_is_refused(llama, copy):
    changes = {"init_lora_weights": "pissa", "alpha_pattern": {"layers.1.mlp.up_proj": 2}}
    with refused(ConversionError, "adapter_config.json", "init_lora_weights='pissa'", "up_proj"):
        load_peft(llama, copy(changes))


# --- refusals of tensors ---


def test_tensors_that_do_not_fit_are_all_listed(llama, copy):
    stranger = "base_model.model.model.norm.lora_A.weight"
    directory = copy(
        weights={
            Q_PROJ.format(0, "A"): None,
            Q_PROJ.format(2, "B"): np.zeros((24, 2), np.float32),
            stranger: np.zeros((3, 16), np.float32),
        }
    )
    named = (Q_PROJ.format(0, "A"), Q_PROJ.format(2, "B"), stranger)
    with refused(ConversionError, "3 tensors", *named, "(24, 2)", "(24, 3)", "r=3"):
        load_peft(llama, directory)


def test_a_pair_without_one_of_its_factors_is_refused(llama, copy):
    name = Q_PROJ.format(1, "B")
    with refused(ConversionError, name):
        load_peft(llama, copy(weights={name: None}))


# --- adapters compared with checkpoints to which the difference was added ---

RANK, ALPHA = 2, 3


def adapter(folder: Path, pairs: dict[str, tuple[int, ...]], whole: dict[str, np.ndarray], **changed) -> dict:
    """Write an adapter. Returns the weight differences of its pairs, and its completely stored tensors, by name.

    `pairs`: shapes of the adapted modules. `whole`: tensors that are stored completely.
    """
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    content = dict(peft_type="LORA", r=RANK, lora_alpha=ALPHA, target_modules="all-linear", bias="none")
    (folder / "adapter_config.json").write_text(json.dumps(content | changed))
    stored, found = {f"base_model.model.{name}": x for name, x in whole.items()}, dict(whole)
    for module, (rows, columns) in pairs.items():
        a, b = (rng.normal(size=size).astype(np.float32) for size in ((RANK, columns), (rows, RANK)))
        stored |= {f"base_model.model.{module}.lora_{x}.weight": value for x, value in (("A", a), ("B", b))}
        found[f"{module}.weight"] = ALPHA / RANK * b @ a
    save_file(stored, folder / "adapter_model.safetensors")
    return found


def stored_tensors_of(name: str) -> dict[str, np.ndarray]:
    files = sorted((FIXTURES / name).glob("*.safetensors"))
    return {key: x for file in files for key, x in load_file(file).items()}


def assert_adapted(name: str, folder: Path, directory: Path, difference: dict, *, whole=(), text=False) -> None:
    """Compare the merged model with a checkpoint to which the differences were added, in float32."""
    base = {key: np.asarray(x, np.float32) for key, x in stored_tensors_of(name).items()}
    for key, x in difference.items():
        base[key] = x if key in whole else base[key] + x
    plain = folder / "plain"
    plain.mkdir()
    shutil.copy(FIXTURES / name / "config.json", plain / "config.json")
    save_file({key: np.ascontiguousarray(x) for key, x in base.items()}, plain / "model.safetensors")
    merged = merge_lora(load_peft(load_hf(FIXTURES / name, text_only=text), directory))
    got, want = named_leaves(merged), named_leaves(load_hf(plain, text_only=text))
    assert got.keys() == want.keys() and merged.config == load_hf(plain, text_only=text).config
    for path, leaf in want.items():
        assert_allclose(got[path], leaf, rtol=0, atol=1e-5, err_msg=path)


def shapes_in(name: str, end: str, without: str = "vision") -> dict[str, tuple[int, ...]]:
    found = {key: x.shape for key, x in stored_tensors_of(name).items() if key.endswith(end) and without not in key}
    return {key.removesuffix(".weight"): shape for key, shape in found.items()}


NAMED = ["model.language_model.", "language_model.model.", "model.", ""]


@pytest.mark.slow(fast=("model.-text",))
@pytest.mark.parametrize("text", [False, True], ids=["whole", "text"])
@pytest.mark.parametrize("prefix", NAMED, ids=lambda prefix: prefix or "none")
def test_accepts_names_with_any_prefix_of_the_decoder(prefix, text, tmp_path):
    shapes = shapes_in("mistral3", "self_attn.q_proj.weight")
    inner = {name: prefix + name[name.index("layers.") :] for name in shapes}
    pattern = {"rank_pattern": {}, "alpha_pattern": {f"^{inner[name]}": ALPHA for name in shapes}, "lora_alpha": 77}
    found = adapter(tmp_path / "peft", {inner[name]: shape for name, shape in shapes.items()}, {}, **pattern)
    difference = {f"{name}.weight": found[f"{new}.weight"] for name, new in inner.items()}
    assert_adapted("mistral3", tmp_path, tmp_path / "peft", difference, text=text)


@pytest.mark.parametrize("kind", [kind for kind, family in FAMILIES.items() if family.text_names])
def test_every_family_accepts_all_names_of_its_decoder(kind):
    """Names in checkpoints, names in transformers, and names of the text-only model, for models with and without
    encoders.
    """
    family = FAMILIES[kind]
    assert family.text is not None
    for text, inner in family.text_names.items():
        text_only = f"{text}layers.0.self_attn.q_proj.lora_A.weight"
        stored = f"{inner}layers.0.self_attn.q_proj.lora_A.weight"
        current = family.module_name(stored)
        for name in (text_only, stored, current):
            assert current in peft._current_names(family, name), (name, current)
            assert family.text.module_name(text_only) in peft._current_names(family.text, name), (name, text_only)


@pytest.mark.parametrize("name, size", [("model.embed_tokens.lora_embedding_A", 32), ("lm_head.lora_A.weight", 16)])
def test_pairs_of_embedding_and_head_are_refused(llama, copy, name, size):
    with refused(ConversionError, name, "target_modules", "merge_and_unload"):
        load_peft(llama, copy(weights={f"base_model.model.{name}": np.zeros((3, size), np.float32)}))


@pytest.mark.slow(fast=("second",))
@pytest.mark.parametrize("layers", [[0], [1]], ids=["first", "second"])
def test_layers_without_a_pair_do_not_change(layers, tmp_path):
    shapes = {k: v for k, v in shapes_in("llama_rope", "_proj.weight").items() if int(k.split(".")[2]) in layers}
    difference = adapter(tmp_path / "peft", shapes, {}, layers_to_transform=layers, layers_pattern="layers")
    assert_adapted("llama_rope", tmp_path, tmp_path / "peft", difference)


def test_layers_without_magnitudes_do_not_change(tmp_path):
    """As in DoRA, whose column norms stay the same in layers that the adapter does not contain."""
    directory = FIXTURES / "peft_dora" / "adapter"
    stored = {name: x for name, x in tensors(directory).items() if ".layers.0." in name}
    shutil.copytree(directory, tmp_path / "some")
    save_file(stored, tmp_path / "some" / "adapter_model.safetensors")
    base = load_hf(FIXTURES / "peft_dora" / "base")
    some = named_leaves(merge_lora(load_peft(base, tmp_path / "some")))
    every, before = named_leaves(merge_lora(load_peft(base, directory))), named_leaves(base)
    changed = [path for path in every if not np.array_equal(every[path], before[path])]
    for path in changed:
        assert_allclose(some[path][0], every[path][0], atol=1e-6)
        assert_allclose(some[path][1:], before[path][1:], atol=1e-6)
    assert changed


@pytest.mark.slow(fast=("some",))
@pytest.mark.parametrize("experts", [None, (0, 3)], ids=["all", "some"])
def test_reads_pairs_of_single_experts(experts, tmp_path):
    shapes = shapes_in("qwen3_moe_mixed", "_proj.weight")
    chosen = lambda name: experts is None or ".experts." not in name or int(name.split(".")[5]) in experts  # noqa: E731
    difference = adapter(tmp_path / "peft", {name: shape for name, shape in shapes.items() if chosen(name)}, {})
    assert any(".experts.0." in name for name in difference)
    assert_adapted("qwen3_moe_mixed", tmp_path, tmp_path / "peft", difference)


@pytest.mark.slow(fast=("older-tied embedding and head",))
@pytest.mark.parametrize(
    "fixture, modules",
    [
        ("mistral_window", ["lm_head"]),
        ("mistral_window", ["model.embed_tokens", "lm_head", "model.norm"]),
        ("qwen2_mixed", ["lm_head"]),
        ("qwen2_mixed", ["model.embed_tokens", "lm_head"]),
        ("qwen2_mixed", ["model.embed_tokens"]),
    ],
    ids=["head", "embedding, head and norm", "tied head", "tied embedding and head", "tied embedding"],
)
@pytest.mark.parametrize("older", [False, True], ids=["current", "older"])
def test_saved_modules_replace_those_of_the_model(fixture, modules, older, tmp_path):
    """A trained head unties a tied model. A trained embedding without a head needs `ensure_weight_tying`."""
    stored, rng = stored_tensors_of(fixture), np.random.default_rng(1)
    table = stored["model.embed_tokens.weight"]
    whole = {}
    for module in modules:
        like = stored.get(f"{module}.weight", table)
        whole[f"{module}.weight"] = rng.normal(size=like.shape).astype(np.float32)
    saved = dict(modules_to_save=[name.rpartition(".")[2] for name in modules], ensure_weight_tying=len(modules) == 1)
    difference = adapter(tmp_path / "peft", shapes_in(fixture, "q_proj.weight"), whole, **saved)
    if older:  # older versions of PEFT write the names of wrappers, and also the original modules
        file = tmp_path / "peft" / "adapter_model.safetensors"
        wrapped = {}
        for name, x in load_file(file).items():
            module = name.removeprefix("base_model.model.").removesuffix(".weight")
            if module in modules:
                wrapped[name.replace(".weight", ".modules_to_save.default.weight")] = x
                wrapped[name.replace(".weight", ".original_module.weight")] = 0 * x
            else:
                wrapped[name] = x
        save_file(wrapped, file)
    assert_adapted(fixture, tmp_path, tmp_path / "peft", difference, whole=whole)


# Stored names of the parts of each expert, in the order of the parameter's rows; None: experts share one parameter.
EXPERTS = {
    "gpt_oss_yarn": None,
    "mixtral_window": {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
    "qwen3_moe_mixed": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
}


@pytest.mark.slow(fast=("gate_up-mixtral_window", "gate_up and down-gpt_oss_yarn", "older down-qwen3_moe_mixed"))
@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize(
    "adapted, older",
    [
        (("gate_up_proj",), False),
        (("down_proj",), False),
        (("gate_up_proj", "down_proj"), False),
        (("down_proj",), True),
    ],
    ids=["gate_up", "down", "gate_up and down", "older down"],
)
def test_reads_pairs_of_experts_in_one_parameter(name, adapted, older, tmp_path):
    """Differences are those of PEFT's `ParamWrapper`. Older versions of PEFT exchange the in and out dimensions."""
    rng, layer, names = np.random.default_rng(4), 1, EXPERTS[name]
    stored = stored_tensors_of(name)
    experts = 5 if names is None else len({key.split(".")[5] for key in stored if ".experts." in key})
    module, transposed = f"model.layers.{layer}.mlp.experts", names is None
    difference, pairs = {}, {}
    for level, parameter in enumerate(reversed(adapted)):
        rows, columns = (24, 12) if parameter == "down_proj" else (24, 24)
        rank = 3 if parameter == "gate_up_proj" else RANK
        (first, last) = (columns, rows) if transposed else (rows, columns)
        features = (first, last) if transposed or older else (last, first)
        a = rng.normal(size=(experts * rank, features[0])).astype(np.float32)
        b = rng.normal(size=(features[1], rank * experts)).astype(np.float32)
        prefix = f"base_model.model.{module}{'.base_layer' * level}"
        pairs |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
        form = "o r e, e r i -> e i o" if transposed or older else "o r e, e r i -> e o i"
        delta = np.einsum(form, b.reshape(-1, rank, experts), a.reshape(experts, rank, -1)) * (ALPHA / rank)
        if names is None:
            difference[f"{module}.{parameter}"] = delta
            continue
        start = next(key for key in stored if f".{layer}." in key and ".experts.0." in key).rpartition(".experts.")[0]
        for expert in range(experts):
            for part, x in zip(names[parameter], np.split(delta[expert], len(names[parameter])), strict=True):
                difference[f"{start}.experts.{expert}.{part}.weight"] = x
    changed = {"target_parameters": [f"mlp.experts.{parameter}" for parameter in sorted(adapted)]}
    adapter(tmp_path / "peft", {}, {}, rank_pattern={r".*\.gate_up_proj": 3}, **changed)
    save_file(pairs, tmp_path / "peft" / "adapter_model.safetensors")
    assert_adapted(name, tmp_path, tmp_path / "peft", difference)


@pytest.mark.parametrize(
    "name, targets, named",
    [
        pytest.param("mixtral_window", ["experts.down_proj"], ["target_parameters=['experts.down_proj']"], id="count"),
        pytest.param("mixtral_window", ["gate_up_proj", "down_proj"], ["(7, 7)", "(5, 24, 24)"], id="shape"),
        pytest.param("llama_rope", ["gate_up_proj", "down_proj"], ["lora_A", "gate_up_proj"], id="no experts"),
    ],
)
def test_pairs_of_other_parameters_are_refused(name, targets, named, tmp_path):
    adapter(tmp_path / "peft", {}, {}, target_parameters=targets)
    prefix = "base_model.model.model.layers.1.mlp.experts"
    pairs = {f"{prefix}{level}.lora_{x}.weight": np.zeros((7, 7)) for level in ("", ".base_layer") for x in "AB"}
    save_file(pairs, tmp_path / "peft" / "adapter_model.safetensors")
    with refused(ConversionError, "adapter_model.safetensors", "model.layers.1.mlp.experts", *named):
        load_peft(load_hf(FIXTURES / name), tmp_path / "peft")


@pytest.mark.slow
@pytest.mark.parametrize("fixture, end", [("mixtral_window", "block_sparse_moe.gate"), ("qwen3_moe_mixed", "mlp.gate")])
def test_routers_may_have_pairs_and_be_saved(fixture, end, tmp_path):
    """Adapters of transformers 5 call the router of Mixtral `mlp.gate`."""
    shapes = shapes_in(fixture, f"{end}.weight")
    shown = {name: name.replace("block_sparse_moe", "mlp") for name in shapes}
    found = adapter(tmp_path / "pairs", {shown[name]: shape for name, shape in shapes.items()}, {})
    difference = {f"{name}.weight": found[f"{new}.weight"] for name, new in shown.items()}
    assert_adapted(fixture, tmp_path / "pairs", tmp_path / "pairs", difference)
    with refused(ConversionError, "PEFT", ".router.kernel"):
        save_peft(load_peft(load_hf(FIXTURES / fixture), tmp_path / "pairs"), tmp_path / "new")
    whole = {f"{name}.weight": found[f"{new}.weight"] for name, new in shown.items()}
    adapter(tmp_path / "saved", {}, {f"{shown[name]}.weight": whole[f"{name}.weight"] for name in shapes})
    assert_adapted(fixture, tmp_path / "saved", tmp_path / "saved", whole, whole=whole)


TOKENS = {
    "list": ("mistral_window", [3, 5], ["model.embed_tokens"]),
    "embedding and head": (
        "mistral_window",
        {"embed_tokens": [3, 5], "lm_head": [1, 2]},
        ["model.embed_tokens", "lm_head"],
    ),
    "tied": ("qwen2_mixed", [3, 5], ["model.embed_tokens"]),
}


@pytest.mark.slow(fast=("list",))
@pytest.mark.parametrize("fixture, ids, modules", TOKENS.values(), ids=TOKENS)
def test_reads_rows_of_trained_tokens(fixture, ids, modules, tmp_path):
    stored, rng = stored_tensors_of(fixture), np.random.default_rng(5)
    difference = adapter(tmp_path / "peft", shapes_in(fixture, "q_proj.weight"), {}, trainable_token_indices=ids)
    file, whole = tmp_path / "peft" / "adapter_model.safetensors", {}
    rows = {}
    for module in modules:
        table = np.array(stored[f"{module}.weight"], np.float32)
        chosen = ids if isinstance(ids, list) else ids[module.rpartition(".")[2]]
        table[chosen] = rng.normal(size=(2, table.shape[1]))
        whole[f"{module}.weight"] = table
        rows[f"base_model.model.{module}.token_adapter.trainable_tokens_delta"] = table[chosen]
    save_file(load_file(file) | rows, file)
    assert_adapted(fixture, tmp_path, tmp_path / "peft", difference | whole, whole=whole)
    model = load_peft(load_hf(FIXTURES / fixture), tmp_path / "peft")
    save_peft(model, tmp_path / "again")
    again = load_peft(load_hf(FIXTURES / fixture), tmp_path / "again")
    assert_array_equal(again.embedding.table, model.embedding.table)


@pytest.mark.parametrize(
    "fixture, tokens, module, named",
    [
        pytest.param("mistral_window", [3], "model.embed_tokens", "(2, 24)", id="count"),
        pytest.param("mistral_window", [3, 10**6], "model.embed_tokens", "64", id="vocabulary"),
        pytest.param("mistral_window", {"wte": [3, 5]}, "model.embed_tokens", "embed_tokens", id="module"),
        pytest.param("qwen2_mixed", {"lm_head": [3, 5]}, "lm_head", "ensure_weight_tying=True", id="tied head"),
    ],
)
def test_rows_of_other_tokens_are_refused(fixture, tokens, module, named, tmp_path):
    adapter(tmp_path / "peft", {}, {}, trainable_token_indices=tokens)
    size = stored_tensors_of(fixture)["model.embed_tokens.weight"].shape[1]
    rows = {f"base_model.model.{module}.token_adapter.trainable_tokens_delta": np.zeros((2, size))}
    save_file(rows, tmp_path / "peft" / "adapter_model.safetensors")
    with refused(ConversionError, "trainable_token_indices=", str(tokens), named):
        load_peft(load_hf(FIXTURES / fixture), tmp_path / "peft")


def test_a_resized_vocabulary_is_explained(tmp_path):
    """PEFT then stores the embedding twice, and only the module in modules_to_save is trained."""
    table = stored_tensors_of("mistral_window")["model.embed_tokens.weight"]
    trained = {"model.embed_tokens.modules_to_save.weight": table + 1, "model.embed_tokens.weight": table}
    adapter(tmp_path / "same", {}, trained, modules_to_save=["embed_tokens"])
    model = load_peft(load_hf(FIXTURES / "mistral_window"), tmp_path / "same")
    assert_array_equal(model.embedding.table, table + 1)
    longer = {name: np.concatenate([x, x[:6]]) for name, x in trained.items()}
    adapter(tmp_path / "longer", {}, longer, modules_to_save=["embed_tokens"])
    with refused(ConversionError, len(table), f"resize_token_embeddings({len(table) + 6})"):
        load_peft(load_hf(FIXTURES / "mistral_window"), tmp_path / "longer")


def test_two_trained_tensors_of_one_module_are_refused(tmp_path):
    table = stored_tensors_of("mistral_window")["model.embed_tokens.weight"]
    names = ("model.embed_tokens.modules_to_save.weight", "model.embed_tokens.modules_to_save.default.weight")
    adapter(tmp_path / "peft", {}, dict.fromkeys(names, table), modules_to_save=["embed_tokens"])
    with refused(ConversionError, *names):
        load_peft(load_hf(FIXTURES / "mistral_window"), tmp_path / "peft")


SAVED_MODULES = {
    "norm": ("peft_llama/base", ["model.norm.weight"], {}),
    "head": ("mistral_window", ["lm_head.weight"], {}),
    "head of a tied model": ("qwen2_mixed", ["lm_head.weight"], {}),
    "tied embedding": ("qwen2_mixed", ["model.embed_tokens.weight"], {"ensure_weight_tying": True}),
    "norms of all layers": ("llama_rope", [f"model.layers.{layer}.input_layernorm.weight" for layer in range(2)], {}),
    "biases": ("qwen2_mixed", ["self_attn.q_proj.bias", "self_attn.k_proj.bias"], {"bias": "all"}),
}


@pytest.mark.slow(fast=("biases",))
@pytest.mark.parametrize("fixture, names, changed", SAVED_MODULES.values(), ids=SAVED_MODULES)
def test_save_peft_writes_saved_modules(fixture, names, changed, tmp_path):
    """Loading, saving and loading again gives the same model. Biases have the names that PEFT writes."""
    stored, rng = stored_tensors_of(fixture), np.random.default_rng(2)
    names = [key for key in stored if any(key.endswith(name) for name in names)] or names
    whole = {name: rng.normal(size=stored.get(name, stored["model.embed_tokens.weight"]).shape) for name in names}
    whole = {name.replace(".bias", ".base_layer.bias"): x.astype(np.float32) for name, x in whole.items()}
    modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    shapes = shapes_in(fixture, "q_proj.weight") | shapes_in(fixture, "k_proj.weight")
    adapter(tmp_path / "peft", shapes, whole, modules_to_save=modules, **changed)
    base = load_hf(FIXTURES / fixture)
    model = load_peft(base, tmp_path / "peft")
    save_peft(model, tmp_path / "again")
    expected, written = tensors(tmp_path / "peft"), tensors(tmp_path / "again")
    if model.config.tied and "model.embed_tokens.weight" in names:  # PEFT also looks for a tied head
        head = "base_model.model.lm_head.weight"
        expected[head] = expected["base_model.model.model.embed_tokens.weight"]
        assert_array_equal(written[head], expected[head])
        assert settings(tmp_path / "again")["modules_to_save"] == ["lm_head", "model.embed_tokens"]
    assert written.keys() == expected.keys()
    again = load_peft(base, tmp_path / "again")
    assert again.config == model.config
    got, want, before = named_leaves(again), named_leaves(model), named_leaves(base)
    assert got.keys() == want.keys()
    for path, leaf in want.items():
        assert_array_equal(got[path], leaf, err_msg=path)
    changed_paths = [path for path in want if path in before and not np.array_equal(want[path], before[path])]
    assert changed_paths or "head.kernel" in want.keys() - before.keys()
    assert merge_lora(model).saved_modules == ()


@pytest.mark.slow
def test_trained_weights_other_than_pairs_are_written(tmp_path):
    """Also after a step and for the state of a restored run."""
    base = load_hf(FIXTURES / "qwen2_mixed")
    before = {path: np.asarray(leaf) for path, leaf in named_leaves(base).items()}
    optimizer = ed.OptimizerConfig(trainable=("*.lora_*", "embedding.table", "final_norm.scale"))
    adapted = add_lora(base, LoRAConfig(rank=2), key=jax.random.key(0))
    trainer = ed.Trainer.create(optimizer, adapted, steps=2)
    abstract = trainer.abstract(adapted, key=jax.random.key(1))
    state = trainer.init(adapted, key=jax.random.key(1))
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    state, _ = trainer.step(state, ed.Batch(np.asarray([[1, 2, 3, 4]])))
    assert np.abs(named_leaves(state.model)["final_norm.scale"] - before["final_norm.scale"]).max() > 0
    save_peft(state.model, tmp_path / "new")
    assert settings(tmp_path / "new")["modules_to_save"] == ["lm_head", "model.embed_tokens", "model.norm"]
    again = load_peft(load_hf(FIXTURES / "qwen2_mixed"), tmp_path / "new")
    for path, leaf in named_leaves(state.model).items():
        assert_array_equal(named_leaves(again)[path], leaf, err_msg=path)


def test_saved_modules_that_the_model_lacks_are_refused(llama, tmp_path):
    model = dataclasses.replace(load_peft(llama, LLAMA / "adapter"), saved_modules=("made_up",))
    with refused(ConversionError, "saved_modules=['made_up']"):
        save_peft(model, tmp_path / "new")


@pytest.mark.parametrize("wrapper", ["modules_to_save", "modules_to_save.default", "modules_to_save.my_adapter"])
def test_adapter_with_saved_modules_only(wrapper, tmp_path):
    norm = np.random.default_rng(3).normal(size=16).astype(np.float32)
    size = stored_tensors_of("llama_rope")["model.norm.weight"].size
    norm = np.resize(norm, size)
    adapter(tmp_path / "peft", {}, {f"model.norm.{wrapper}.weight": norm}, modules_to_save=["norm"])
    model = load_peft(load_hf(FIXTURES / "llama_rope"), tmp_path / "peft")
    assert_array_equal(model.final_norm.scale, norm)


@pytest.mark.parametrize("difference, tied", [(0.0, True), (1.0, False)])
def test_an_equal_head_and_embedding_leave_the_model_tied(difference, tied, tmp_path):
    table = stored_tensors_of("qwen2_mixed")["model.embed_tokens.weight"] + np.float32(1)
    whole = {"model.embed_tokens.weight": table, "lm_head.weight": table + np.float32(difference)}
    adapter(tmp_path / "peft", {}, whole, modules_to_save=["embed_tokens", "lm_head"])
    model = load_peft(load_hf(FIXTURES / "qwen2_mixed"), tmp_path / "peft")
    assert model.config.tied == tied
    assert_array_equal(model.embedding.table, table)


def test_a_trained_embedding_without_weight_tying_keeps_the_original_head(tmp_path):
    """PEFT's default: the output head of a tied model stays the original embedding."""
    table = stored_tensors_of("qwen2_mixed")["model.embed_tokens.weight"]
    shapes = shapes_in("qwen2_mixed", "q_proj.weight")
    adapter(tmp_path / "peft", shapes, {"model.embed_tokens.weight": table + 1}, modules_to_save=["embed_tokens"])
    base = load_hf(FIXTURES / "qwen2_mixed")
    model = load_peft(base, tmp_path / "peft")
    leaves = named_leaves(model)
    assert not model.config.tied
    assert_array_equal(leaves["embedding.table"], table + 1)
    assert_array_equal(leaves["head.kernel"], table.T)
    abstract = load_peft(ed.abstract_hf(FIXTURES / "qwen2_mixed"), tmp_path / "peft")
    assert jax.tree.structure(abstract) == jax.tree.structure(model)
    save_peft(model, tmp_path / "again")
    same(load_peft(base, tmp_path / "again"), model)


@pytest.mark.parametrize("end", ["input_layernorm.weight", "o_proj.weight"])
def test_modules_saved_in_some_layers_only(end, tmp_path):
    fixture = "llama_rope"
    stored = stored_tensors_of(fixture)
    name = next(key for key in stored if ".layers.1." in key and key.endswith(end))
    whole = {name: stored[name] + 1}
    module = name.removesuffix(".weight")
    difference = adapter(tmp_path / "peft", shapes_in(fixture, "q_proj.weight"), whole, modules_to_save=[module])
    assert_adapted(fixture, tmp_path, tmp_path / "peft", difference, whole=whole)
    base = load_hf(FIXTURES / fixture)
    model = load_peft(base, tmp_path / "peft")
    save_peft(model, tmp_path / "again")
    same(load_peft(base, tmp_path / "again"), model)


def test_a_server_refuses_adapters_with_saved_modules(tmp_path):
    whole = {"lm_head.weight": stored_tensors_of("mistral_window")["lm_head.weight"] + 1}
    adapter(tmp_path / "peft", shapes_in("mistral_window", "q_proj.weight"), whole, modules_to_save=["lm_head"])
    base = load_hf(FIXTURES / "mistral_window")
    with refused(ConfigError, "adapter=", "head.kernel", "modules_to_save"):
        read_adapter(base, str(tmp_path / "peft"))
    adapter(tmp_path / "pairs", shapes_in("mistral_window", "q_proj.weight"), {})
    assert read_adapter(base, str(tmp_path / "pairs"))


def test_adapters_of_another_model_are_refused(llama):
    with refused(ConversionError, "12 tensors", "transformer.h.0.attn.c_attn.lora_A.weight"):
        load_peft(llama, FIXTURES / "peft_gpt2" / "adapter")


def test_an_empty_adapter_is_refused(llama, copy):
    directory = copy(weights=dict.fromkeys(tensors(LLAMA / "adapter")))
    with refused(ConversionError, directory / "adapter_model.safetensors"):
        load_peft(llama, directory)


def test_only_safetensors_inside_the_directory_are_read(llama, copy, tmp_path):
    directory = copy()
    outside = tmp_path / "outside.safetensors"
    (directory / "adapter_model.safetensors").rename(outside)
    (directory / "adapter_model.bin").write_bytes(b"never opened")
    with refused(ConversionError, "adapter_model.bin"):
        load_peft(llama, directory)
    (directory / "adapter_model.safetensors").symlink_to(outside)
    with refused(ConversionError, directory / "adapter_model.safetensors"):
        load_peft(llama, directory)
    with refused(ConversionError, tmp_path / "nowhere"):
        load_peft(llama, tmp_path / "nowhere")


def test_a_second_adapter_is_refused(fixture):
    directory, _, model = fixture
    with refused(ConversionError, "load_peft", "merge_lora"):
        load_peft(model, directory / "adapter")


# --- refusals of models to write ---


def test_models_without_a_peft_form_are_not_written(fixture, tmp_path, monkeypatch):
    _, base, model = fixture
    with refused(ConversionError, "save_peft", "add_lora"):
        save_peft(base, tmp_path / "none")
    path, node = next(iter(low_rank_weights(model).items()))
    other = LowRank(node.base, node.lora_a, node.lora_b, node.scale, node.lora_b[:, 0])
    with refused(ConversionError, "save_peft", "magnitudes"):
        save_peft(replaced(model, {path: other}), tmp_path / "none")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with refused(ConversionError, tmp_path / "full"):
        save_peft(model, tmp_path / "full")
    monkeypatch.setattr(peft, "_adaptable", lambda model, magnitudes: {})
    with refused(ConversionError, "PEFT", path):
        save_peft(model, tmp_path / "none")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["full"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, targets, modules",
    [
        ("qwen2_5_vl", ("scanned_layers.*.mixer.query", "vision.projector.*", "vision.scanned_layers.*.mlp.up"),
         {"q_proj", "model.visual.merger.mlp.0", "model.visual.merger.mlp.2"}
         | {f"model.visual.blocks.{layer}.mlp.up_proj" for layer in range(3)}),
        ("mistral3", ("*.mixer.query", "vision.projector.*"), {"q_proj", "merging_layer", "linear_1", "linear_2"}),
    ],
    ids=["qwen2_5_vl", "mistral3"],
)  # fmt: skip
def test_pairs_of_encoders_are_named_as_their_modules(name, targets, modules, tmp_path):
    """Names are those of the modules in transformers. Adapters with the names of the files can be read, too."""
    base = load_hf(FIXTURES / name)
    model = trained(base, LoRAConfig(rank=2, targets=targets))
    save_peft(model, tmp_path / "new")
    assert set(settings(tmp_path / "new")["target_modules"]) == modules
    new = tensors(tmp_path / "new")
    assert all(key.startswith(("base_model.model.model.", "base_model.model.lm_head.")) for key in new)
    assert any(".model.language_model.layers.0." in key for key in new)
    jax.tree.map(assert_array_equal, pairs(load_peft(base, tmp_path / "new")), pairs(model))
    inner = {"qwen2_5_vl": "model.", "mistral3": "language_model.model."}[name]
    before = {key.replace("model.model.language_model.", f"model.{inner}"): value for key, value in new.items()}
    before = {key.replace("model.model.visual.", "model.visual."): value for key, value in before.items()}
    for prefix in ("multi_modal_projector", "vision_tower"):
        before = {key.replace(f"model.model.{prefix}.", f"model.{prefix}."): value for key, value in before.items()}
    assert not before.keys() & new.keys()
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    save_file(before, tmp_path / "old" / "adapter_model.safetensors")
    jax.tree.map(assert_array_equal, pairs(load_peft(base, tmp_path / "old")), pairs(model))
