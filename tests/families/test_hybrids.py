"""Families whose layers differ in kind: layers of multi-token prediction, spellings, and what is refused."""

import json
import shutil

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from eqx_decoders.layers.attention.attention import AttentionConfig
from tests.compare import assert_array_equal, assert_close
from tests.families.samples import FIXTURES, decode, sample


# a fixture, and its layer with attention, whose names the layer of multi-token prediction repeats
DEPTHS = {"qwen3_next": 3, "qwen3_5_dense": 1, "qwen3_5_moe": 3}
FC = {
    "fc.weight": (24, 48),
    **dict.fromkeys(("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight"), (24,)),
}


def written(name: str, folder, **settings) -> dict[str, np.ndarray]:
    """A fixture with a layer of multi-token prediction."""
    shutil.copytree(FIXTURES / name, folder)
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    found, draws = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    prefix = f"model.layers.{DEPTHS[name]}."
    shapes = {f"layers.0.{key.removeprefix(prefix)}": x.shape for key, x in found.items() if key.startswith(prefix)}
    for key, shape in (shapes | FC).items():
        found[f"mtp.{key}"] = draws.normal(0.0, 0.3, shape).astype(np.float32)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return found


SLOW = [pytest.param(name, marks=() if name == "qwen3_5_dense" else pytest.mark.slow) for name in DEPTHS]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_stored_depth_is_read_and_written_and_changes_no_logit(name, tmp_path):
    tensors, expected = written(name, tmp_path / "model"), np.load(FIXTURES / name / "expected.npz")
    model = ed.load_hf(tmp_path / "model")
    assert model.mtp is not None and isinstance(model.config.mtp.block.mixer, AttentionConfig)
    own = model.mtp.unstacked()[0]
    query = tensors["mtp.layers.0.self_attn.q_proj.weight"].reshape(4, 2, -1, 24)
    assert_array_equal(own.block.mixer.query, query[:, 0].transpose(2, 0, 1))
    assert_array_equal(own.block.mixer.gate, query[:, 1].transpose(2, 0, 1))
    assert_array_equal(own.embed_kernel, tensors["mtp.fc.weight"].T[:24])
    assert_array_equal(own.stream_kernel, tensors["mtp.fc.weight"].T[24:])
    assert_array_equal(own.stream_norm.scale, tensors["mtp.pre_fc_norm_hidden.weight"])
    logits = eqx.filter_jit(model)(jnp.asarray(expected["input_ids"], jnp.int32)).logits
    assert_close(logits, expected["logits"], units=256)
    ed.save_hf(model, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys() and all(np.array_equal(again[key], x) for key, x in tensors.items())
    assert ed.abstract_hf(tmp_path / "again").config == model.config


def test_a_depth_that_is_not_stored_is_not_there(tmp_path):
    """Whatever the settings say; of one that is stored nothing may lack."""
    shutil.copytree(FIXTURES / "qwen3_5_dense", tmp_path / "none")
    content = json.loads((tmp_path / "none" / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (tmp_path / "none" / "config.json").write_text(json.dumps(content))
    assert ed.abstract_hf(tmp_path / "none").config.mtp is None and decode(content).mtp is not None
    tensors = written("qwen3_next", tmp_path / "part")
    del tensors["mtp.fc.weight"]
    save_file(tensors, tmp_path / "part" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ed.ConversionError, match=r"mtp\.fc\.weight is missing"):
        ed.abstract_hf(tmp_path / "part")


def test_names_that_transformers_writes_are_read(tmp_path):
    """The MLP of a dense layer of Kimi Linear under the name of experts."""
    shutil.copytree(FIXTURES / "kimi_linear", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    other = {key.replace(".mlp.", ".block_sparse_moe."): x for key, x in tensors.items()}
    assert other.keys() != tensors.keys()
    save_file(other, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    ed.save_hf(ed.load_hf(tmp_path / "model"), tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == tensors.keys()


REFUSED = [
    ("qwen3_next", dict(attention_bias=True), "attention_bias"),
    ("qwen3_next", dict(layer_types=["linear_attention"] * 6), "no layer has attention"),
    ("qwen3_next", dict(layer_types=["full_attention"] * 6), "all layers have attention"),
    ("qwen3_next", dict(num_nextn_predict_layers=2), "num_nextn_predict_layers=2 is not known"),
    ("qwen3_5_text", dict(attn_output_gate=False), "attn_output_gate"),
    ("qwen3_5_text", dict(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=True), "mtp_use_dedicated_embeddings"),
    ("qwen3_5_moe_text", dict(linear_num_value_heads=3), "num_heads=3 must be a multiple of num_key_heads=2"),
    ("nemotron_h", dict(layers_block_type=None, hybrid_override_pattern="M-X*"), "hybrid_override_pattern must have"),
    ("nemotron_h", dict(layers_block_type=["mlp"]), "no layer has attention"),
    ("nemotron_h", dict(mamba_hidden_act="gelu"), "mamba_hidden_act"),
    ("granitemoehybrid", dict(mamba_d_head=7), "mamba_n_heads=6 x mamba_d_head=7"),
    ("granitemoehybrid", dict(time_step_limit=[0.5]), r"time_step_limit\[0\]"),
    ("granitemoehybrid", dict(time_step_limit=[0.5, 0.1]), "dt_max=0.1"),
    ("granitemoehybrid", dict(position_embedding_type="alibi"), "position_embedding_type=alibi is not known"),
    ("olmo_hybrid", dict(layer_types=["full_attention"] * 3), "all layers have attention"),
    ("olmo_hybrid", dict(linear_use_gate=False), "Unknown keys: linear_use_gate"),
    ("zamba2", dict(add_bias_linear=True), "add_bias_linear=true is not supported"),
    ("zamba2", dict(use_long_context=True), "use_long_context=true is not supported"),
    ("zamba2", dict(num_mem_blocks=4), "num_mem_blocks is larger than the number of hybrid layers"),
    ("zamba2", dict(layers_block_type=None), "layers_block_type is missing"),
    ("minimax", dict(postnorm=False), "postnorm=false is not supported"),
    ("minimax", dict(sliding_window=8), "sliding_window=8 is not supported"),
    ("minimax", dict(mlp_beta_factor=0), "mlp_beta_factor=0 must be a finite number above 0"),
    ("kimi_linear", dict(mla_use_nope=False), "mla_use_nope"),
    ("kimi_linear", dict(mla_use_output_gate=True), "Unknown keys: mla_use_output_gate"),
    ("kimi_linear", dict(linear_attn_config={"gate_lower_bound": -5.0}), "gate_lower_bound"),
    ("kimi_linear", dict(linear_attn_config={"head_dim": 7}), "head_dim=7, but linear_head_dim=6 outside of it"),
    ("kimi_linear", dict(linear_attn_config={"full_attn_layers": [4], "kda_layers": [1]}), "each layer from 1 on"),
]


@pytest.mark.parametrize("kind, keys, sentence", REFUSED, ids=str)
def test_what_is_not_there_is_refused(kind, keys, sentence):
    with pytest.raises(ed.ConversionError, match=sentence):
        decode(sample(kind, **keys))


def test_layers_without_a_recurrence():
    """Granite 4 has models with attention alone, whose files name the sizes of a recurrence all the same."""
    content = sample("granitemoehybrid", layer_types=["attention"] * 4)
    config = decode(content)
    assert all(isinstance(block.mixer, AttentionConfig) for block in config.blocks)
    assert decode(FAMILIES["granitemoehybrid"].encode(config)) == config


def test_a_step_may_be_unlimited():
    for limit in ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], None):
        mamba = decode(sample("granitemoehybrid", time_step_limit=limit)).blocks[0].mixer
        assert (mamba.dt_min, mamba.dt_max) == (0.0, None)


SIZES = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")


@pytest.mark.parametrize("layers, full", [(3, [2]), (6, [3])])
def test_sizes_and_layers_of_olmo_hybrid_may_be_left_out(layers, full):
    config = decode(sample("olmo_hybrid", "layer_types", *SIZES, num_hidden_layers=layers, hidden_size=48))
    assert [index for index, block in enumerate(config.blocks) if isinstance(block.mixer, AttentionConfig)] == full
    delta = config.blocks[0].mixer
    assert (delta.num_key_heads, delta.num_heads, delta.key_dim, delta.value_dim) == (3, 3, 12, 24)


@pytest.mark.parametrize(
    "keys, theta",
    [
        (dict(rope_parameters={"rope_type": "default", "rope_theta": None}), None),
        (dict(rope_parameters=None, rope_theta=None), None),
        (dict(rope_parameters=None), 1e4),
        (dict(rope_parameters={"rope_type": "default"}), 1e4),
        (dict(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), 5e5),
    ],
)
def test_olmo_hybrid_rotates_nothing_where_theta_is_null(keys, theta):
    """Not where it is missing: then it is transformers' default."""
    config = decode(sample("olmo_hybrid", "rope_parameters", "rope_theta", **keys))
    assert getattr(config.blocks[1].mixer.rope, "theta", None) == theta
    assert decode(FAMILIES["olmo_hybrid"].encode(config)) == config


def test_minimax_has_softmax_in_every_other_layer_unless_its_types_are_given():
    """From the first on, which is the default of transformers; published files have a list."""
    config = decode(sample("minimax", "layer_types", num_hidden_layers=5))
    assert [isinstance(block.mixer, AttentionConfig) for block in config.blocks] == [True, False, True, False, True]
    weights = [(block.residual.keep, block.residual.add) for block in config.blocks[:2]]
    assert weights == [((1.3, 1.1), (0.8, 0.7)), ((1.2, 1.1), (0.9, 0.7))]


def test_tables_of_the_source_are_exported_while_it_is_there(tmp_path):
    """Powers of rates, which transformers reads, and makes where they are missing."""
    shutil.copytree(FIXTURES / "minimax", tmp_path / "model")
    model, names = ed.load_hf(tmp_path / "model"), load_file(tmp_path / "model" / "model.safetensors").keys()
    shutil.rmtree(tmp_path / "model")
    ed.save_hf(model, tmp_path / "new")
    left_out = names - load_file(tmp_path / "new" / "model.safetensors").keys()
    assert len(left_out) == 2 * 3 and all(name.endswith("_decay") for name in left_out)
