"""Names and layouts of a family's tensors in checkpoints, and tensors that an export adds."""

import dataclasses
import json
import shutil

import equinox as eqx
import jax
import numpy as np
import pytest
from einops import rearrange
from safetensors.numpy import load_file, save_file

import eqx_decoders as ed
from eqx_decoders.families import moe
from eqx_decoders.families.registry import FAMILIES
from eqx_decoders.families.weight_rows import Part
from eqx_decoders.io.huggingface.export import TOKEN_IDS, export_plan
from eqx_decoders.io.huggingface.load import read_config
from eqx_decoders.model.provenance import Provenance
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.lora import LoRAConfig
from tests.adapters import trained
from tests.compare import assert_array_equal
from tests.errors import refused
from tests.families.samples import FIXTURES, decode, sample


WEIGHTS = "model.safetensors"


@pytest.fixture
def copied(tmp_path):
    """Return a function that copies a fixture with changed tensors or keys of `config.json`."""

    def copy(name: str, tensors: dict | None = None, settings: dict | None = None, folder: str = "model"):
        directory = shutil.copytree(FIXTURES / name, tmp_path / folder)
        if tensors is not None:
            save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
        if settings is not None:
            (directory / "config.json").write_text(json.dumps(settings))
        return directory

    return copy


# --- names and layouts ---


def test_gates_are_the_first_half_of_fused_expert_tensors():
    """transformers: `gate, up = linear(x, gate_up[expert]).chunk(2)`, and `linear(h, down[expert])`."""
    router, gate, up, down = moe.fused_experts("mlp.")
    names = ("mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    assert (router.name, gate.name, down.name) == names
    stored = np.arange(3 * 8 * 5).reshape(3, 8, 5)
    for half, row in enumerate((gate, up)):
        assert row.part == Part(index=half, count=2, axis=1) and row.name == gate.name
        own = stored[:, 4 * half : 4 * half + 4]
        assert_array_equal(rearrange(own, row.pattern), np.swapaxes(own, 1, 2))
    stored = np.arange(3 * 5 * 4).reshape(3, 5, 4)
    assert_array_equal(rearrange(stored, down.pattern), np.swapaxes(stored, 1, 2))


def test_separate_expert_tensors_are_matrices():
    stored = np.arange(20).reshape(4, 5)
    for row in moe.separate_experts("mlp."):
        assert_array_equal(rearrange(stored, row.pattern), stored.T)


def test_gates_and_up_projections_of_gpt_oss_alternate_in_a_tensor():
    """transformers reads `gate_up[..., ::2]` and `gate_up[..., 1::2]`."""
    found = FAMILIES["gpt_oss"].bind(ed.abstract(decode(sample("gpt_oss"))))
    for tensor, ending in (("gate_up_proj", ""), ("gate_up_proj_bias", "_bias")):
        for part, path in enumerate(("gate", "up")):
            mapping = found[f"scanned_layers.0.unit.0.mlp.{path}{ending}"]
            stored = np.arange(np.prod(mapping.shape)).reshape(mapping.shape)
            own = mapping.section.of(stored).reshape(mapping.own_shape)
            assert_array_equal(rearrange(own, mapping.pattern), stored[..., part::2])
            assert mapping.section.index == part and mapping.name((0,)).endswith(f".experts.{tensor}")


def test_matrices_of_mixtrals_experts_are_numbered():
    """`w2(silu(w1 x) * w3 x)`, one tensor for each expert; newer files have one for all."""
    model = ed.abstract(decode(sample("mixtral")))
    own = FAMILIES["mixtral"].bind(model)
    for path, tensor in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        mapping = own[f"scanned_layers.0.unit.0.mlp.{path}"]
        assert mapping.name((1, 4)) == f"model.layers.1.block_sparse_moe.experts.4.{tensor}.weight"
        assert mapping.shape == ((24, 12) if path == "down" else (12, 24))
    fused = FAMILIES["mixtral"].for_tensors(["model.layers.0.mlp.experts.gate_up_proj"]).bind(model)
    for path, part in (("gate", 0), ("up", 1)):
        mapping = fused[f"scanned_layers.0.unit.0.mlp.{path}"]
        assert (mapping.name((1,)), mapping.section.index) == ("model.layers.1.mlp.experts.gate_up_proj", part)
        assert mapping.shape == (5, 24, 24)
    assert FAMILIES["mixtral"].for_tensors(["lm_head.weight"]) == FAMILIES["mixtral"]


@pytest.mark.parametrize(
    "name, norms",
    [
        ("falcon-7b", {"input_layernorm"}),
        ("falcon2-11b", {"input_layernorm"}),
        ("falcon-40b", {"ln_attn", "ln_mlp"}),
        ("falcon-rw-1b", {"input_layernorm", "post_attention_layernorm"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_second_norm_of_falcon_renames_the_first(name, norms):
    mappings = FAMILIES["falcon"].bind(ed.abstract(ed.get_config(name)))
    names = [mapping.name((0,)) for path, mapping in mappings.items() if "norm" in path and path != "final_norm.scale"]
    assert {name.split(".")[3] for name in names if name.startswith("transformer.h.0.")} == norms


def test_masks_and_frequencies_of_old_files_of_gpt_neox_are_ignored():
    config = decode(sample("gpt_neox"))
    for name in ("bias", "masked_bias", "rotary_emb.inv_freq"):
        assert FAMILIES["gpt_neox"].is_ignored(f"gpt_neox.layers.1.attention.{name}", config)
    assert not FAMILIES["gpt_neox"].is_ignored("gpt_neox.layers.1.attention.dense.bias", config)


@pytest.mark.slow
def test_dense_mlp_of_kimi_linear_may_have_the_name_of_experts(copied, tmp_path):
    """As transformers writes it."""
    tensors = load_file(FIXTURES / "kimi_linear" / WEIGHTS)
    renamed = {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    ed.save_hf(ed.load_hf(copied("kimi_linear", renamed)), tmp_path / "again")
    assert load_file(tmp_path / "again" / WEIGHTS).keys() == tensors.keys()


@pytest.mark.slow
def test_unused_keys_of_gemma4_layers_with_shared_keys_are_ignored(copied):
    """Published files have them."""
    tensors = load_file(FIXTURES / "gemma4_small" / WEIGHTS)
    unread = {f"model.layers.5.self_attn.{name}.weight": np.ones((4, 4), np.float32) for name in ("k_proj", "v_norm")}
    directories = (FIXTURES / "gemma4_small", copied("gemma4_small", tensors | unread))
    plain, more = (jax.tree.leaves(ed.load_hf(directory)) for directory in directories)
    assert all(np.array_equal(one, other) for one, other in zip(plain, more, strict=True))
    unknown = "model.layers.0.self_attn.v_norm.weight"
    with refused(ed.ConversionError, unknown):
        ed.load_hf(copied("gemma4_small", tensors | {unknown: np.ones(8, np.float32)}, folder="unknown"))


# --- decoders in files of models with encoders ---


def test_the_decoder_of_llama4_is_read_from_a_file_with_an_encoder(tmp_path):
    text = sample("llama4_text")
    content = dict(architectures=["Llama4ForConditionalGeneration"], model_type="llama4", text_config=text)
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert read_config(tmp_path, text_only=True)[0] == decode(text)
    with refused(ed.ConversionError, "vision_config"):
        read_config(tmp_path)


def test_the_decoder_of_qwen4_exp_is_read_from_a_file_with_an_encoder(copied):
    inner = json.loads((FIXTURES / "qwen4_exp" / "config.json").read_text())
    outer = {"model_type": "qwen4_exp", "architectures": ["Qwen4ExpForConditionalGeneration"], "image_token_id": 60}
    outer |= {"text_config": inner, "vision_config": {"model_type": "qwen4_exp", "depth": 27}}
    tensors = load_file(FIXTURES / "qwen4_exp" / WEIGHTS)
    tensors = {name.replace("model.", "model.language_model."): x for name, x in tensors.items()}
    tensors |= {"model.visual.pos_embed.weight": np.zeros((4, 2)), "mtp.fc_hidden.weight": np.zeros((2, 2))}
    assert ed.abstract_hf(copied("qwen4_exp", tensors, outer)).config == decode(sample("qwen4_exp_text"))


# --- computed values ---


def test_layer_dependent_lambdas_of_diffllama_are_checked(tmp_path):
    path = "scanned_layers.0.unit.0.mixer.layer_number"
    model = ed.load_hf(FIXTURES / "diffllama")
    assert named_leaves(model)[path].ravel().tolist() == [0, 1, 2]
    other = eqx.tree_at(
        lambda model: model.scanned_layers[0].unit[0].mixer.layer_number, model, replace_fn=lambda x: x + 1
    )
    with refused(ed.ConversionError, path):
        ed.save_hf(other, tmp_path / "other")


@pytest.mark.slow
def test_layer_dependent_lambdas_of_diffllama_on_a_mesh():
    model = ed.load_hf(FIXTURES / "diffllama", layout=ed.Layout.create(fsdp=4, tensor=2))
    numbers = named_leaves(model)["scanned_layers.0.unit.0.mixer.layer_number"]
    assert np.asarray(numbers).ravel().tolist() == [0, 1, 2]


@pytest.mark.slow
def test_experts_of_token_ids_are_stored_as_integers():
    model = ed.load_hf(FIXTURES / "deepseek_v4", dtype="bfloat16")
    routers = [block.mlp.router for segment in model.scanned_layers for block in segment.unit]
    (table,) = (router.table for router in routers if router.table is not None)
    assert table.dtype == np.int32 and set(np.unique(table)) == {0, 1, 2, 3}
    with refused(ed.ConfigError, "embeds"):
        model(embeds=model.embed_tokens(np.ones((1, 2), np.int32)))


def test_hash_multipliers_of_qwen4_exp_follow_from_the_configuration(copied):
    tensors = load_file(FIXTURES / "qwen4_exp" / WEIGHTS)
    name = "model.layers.0.ple.ple_embedding.layer_multipliers"
    assert tensors[name].dtype == np.int64 and tensors[name].min() > 2**53  # larger than the exact integers of a float
    tensors[name][0] += 2
    with refused(ed.ConversionError, "layer_multipliers"):
        ed.abstract_hf(copied("qwen4_exp", tensors))


def test_decay_powers_of_minimax_are_exported_only_from_the_source(copied, tmp_path):
    """transformers reads them, or computes them if they are missing."""
    directory = copied("minimax")
    model, names = ed.load_hf(directory), load_file(directory / WEIGHTS).keys()
    shutil.rmtree(directory)
    ed.save_hf(model, tmp_path / "new")
    left_out = names - load_file(tmp_path / "new" / WEIGHTS).keys()
    assert len(left_out) == 2 * 3 and all(name.endswith("_decay") for name in left_out)


def test_unused_matrices_of_zero_experts_of_longcat_are_exported(tmp_path):
    """transformers requires them. They are copied from the source, or zero."""
    source = FIXTURES / "longcat_flash"
    model = ed.load_hf(source)
    ed.save_hf(dataclasses.replace(model, origin=None), tmp_path / "new", family="longcat_flash")
    ed.save_hf(model, tmp_path / "again")
    original, new, again = (load_file(folder / WEIGHTS) for folder in (source, tmp_path / "new", tmp_path / "again"))
    layers = [f"model.layers.{layer}.mlp.experts." for layer in (0, 1)]
    unused = [f"{layer}{name}_proj.weight" for layer in layers for name in ("4.gate", "4.up", "5.gate", "5.up")]
    assert {name: x.shape for name, x in new.items()} == {name: x.shape for name, x in original.items()}
    for name, tensor in original.items():
        assert_array_equal(new[name], 0.0 if name in unused else tensor)
        assert_array_equal(again[name], tensor)


# --- token ids ---


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size, padding, begin", [(50_368, 50_283, 50_281), (64, 63, 63)])
def test_an_export_of_modernbert_has_the_token_ids_that_transformers_needs(vocab_size, padding, begin):
    """For a new model, and for a model whose source has null."""
    kind = "modernbert-decoder"
    new = ed.abstract(decode(sample(kind, vocab_size=vocab_size)))
    nulls = Provenance(family=kind, settings='{"pad_token_id": null, "bos_token_id": null}')
    for model in (new, dataclasses.replace(new, origin=nulls)):
        written = export_plan(model, family=kind)[1]
        assert [written[key] for key in TOKEN_IDS] == [begin, None, padding]
    assert export_plan(new, family=kind, settings={"pad_token_id": 7})[1]["pad_token_id"] == 7


@pytest.mark.slow
def test_an_export_of_qwen4_exp_keeps_several_end_tokens(copied, tmp_path):
    content = json.loads((FIXTURES / "qwen4_exp" / "config.json").read_text()) | {"eos_token_id": [2, 5]}
    ed.save_hf(ed.load_hf(copied("qwen4_exp", settings=content)), tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["eos_token_id"] == [2, 5]


# --- adapters ---


def test_parts_of_fused_matrices_of_gpt_neox_have_no_adapters(tmp_path):
    model = ed.load_hf(FIXTURES / "gpt_neox_partial")
    model = ed.add_lora(model, LoRAConfig(rank=2, targets=("*.mixer.query",)), key=jax.random.key(0))
    with refused(ed.ConversionError, "PEFT", "mixer.query"):
        ed.save_peft(model, tmp_path / "new")


def test_adapters_of_glm4_mlps_belong_to_the_fused_matrix(tmp_path):
    model = trained(ed.load_hf(FIXTURES / "glm4"), LoRAConfig(rank=2, targets=("*.gate_up",)))
    ed.save_peft(model, tmp_path)
    shapes = {name: x.shape for name, x in load_file(tmp_path / "adapter_model.safetensors").items()}
    module = "base_model.model.model.layers.{}.mlp.gate_up_proj.lora_{}.weight"
    assert shapes == {
        module.format(layer, letter): shape for layer in (0, 1) for letter, shape in (("A", (2, 24)), ("B", (80, 2)))
    }
