"""Layers of multi-token prediction that transformers leaves out: read, written, and run as vLLM and SGLang do.

No reference runs them here, so the formula is written out in NumPy from the tensors of the file; only their blocks,
which are of a kind that the model's own layers have, are the library's.
"""

import dataclasses
import json
import re
import shutil

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqx_decoders as ed
from eqx_decoders.blocks.residual.residual import Sequential
from eqx_decoders.families import FAMILIES
from eqx_decoders.model.init import abstract
from eqx_decoders.sharding.axes import named_leaves
from tests.compare import assert_allclose, assert_array_equal
from tests.families.samples import FIXTURES, decode, sample


# of each family: a fixture with its blocks, prefixes of depths, and prefixes of the layers whose tensors' names and
# shapes theirs are, each with a part of the names
KINDS = {
    "mimo": ("qwen2_mixed", ("model.mtp_layers.0.",), {"model.layers.2.": ""}),
    "mimo_v2_flash": (
        "mimo_v2_flash", tuple(f"model.mtp.layers.{depth}." for depth in range(3)), {"model.layers.1.": ""}
    ),
    "hy_v3": ("hy_v3", ("model.layers.2.", "model.layers.3."), {"model.layers.1.": ""}),
    "longcat_flash": ("longcat_flash", ("model.mtp.layers.0.",), {
        "model.layers.0.self_attn.1.": "self_attn.", "model.layers.0.mlps.1.": "transformer_layer.mlp.",
        "model.layers.0.input_layernorm.1.": "input_layernorm.",
        "model.layers.0.post_attention_layernorm.1.": "post_attention_layernorm.",
    }),
    "deepseek_v4": ("deepseek_v4", ("mtp.0.", "mtp.1."), {
        "layers.0.attn.": "attn.", "layers.2.ffn": "ffn", "layers.0.hc_": "hc_", "layers.0.attn_norm": "attn_norm",
    }),
    "ernie4_5_moe": ("ernie4_5_moe", ("model.mtp_block.0.",), {"model.layers.0.": ""}),
    "nemotron_h": (
        "nemotron_h_latent", ("mtp.layers.0.",), {"backbone.layers.2.": "", "backbone.layers.3.": "mtp.layers.1."}
    ),
    "qwen4_exp_text": ("qwen4_exp", ("mtp.layers.0.",), {"model.layers.1.": ""}),
}  # fmt: skip
# norms of a depth: of the embedding, of the stream, and before the head, which may be the model's
NORMS = {
    "mimo": ("token_layernorm", "hidden_layernorm", "final_layernorm"),
    "mimo_v2_flash": ("enorm", "hnorm", "final_layernorm"),
    "hy_v3": ("enorm", "hnorm", "final_layernorm"),
    "longcat_flash": ("enorm.m", "hnorm.m", "model.mtp.norm"),  # the last one stands outside
    "deepseek_v4": ("enorm", "hnorm", "norm"),
    "ernie4_5_moe": ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.norm"),
    "nemotron_h": ("enorm", "hnorm", "mtp.layers.1.final_layernorm"),
    "qwen4_exp_text": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", None),
}
# matrices of a depth: one for both, the embedding's part first, or one for each
KERNELS = {
    "mimo": ("input_proj",),
    "deepseek_v4": ("e_proj", "h_proj"),
    "ernie4_5_moe": ("model.mtp_linear_proj.0",),
    "qwen4_exp_text": ("mtp.fc_embedding", "mtp.fc_hidden"),
}
# the model's table, final norm and head
ENDS = {
    "deepseek_v4": ("embed", "norm", "head"),
    "nemotron_h": ("backbone.embeddings", "backbone.norm_f", "lm_head"),
}
STREAMS = {"deepseek_v4", "qwen4_exp_text"}  # depths of these read all residual streams, two
MIXER = "mtp.hyper_connection_mixer"


def count_key(kind: str) -> str:
    return "mtp_num_hidden_layers" if kind == "qwen4_exp_text" else "num_nextn_predict_layers"


def ends(kind: str, tensors) -> list[np.ndarray | None]:
    names = ENDS.get(kind, ("model.embed_tokens", "model.norm", "lm_head"))
    return [tensors.get(f"{name}.weight") for name in names]


def own_shapes(kind: str, size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a depth beside its block's."""
    shapes, kernels = {f"{name}.weight": (size,) for name in NORMS[kind] if name}, KERNELS.get(kind, ("eh_proj",))
    shapes |= {f"{name}.weight": (size, 2 * size // len(kernels)) for name in kernels}
    if kind == "deepseek_v4":
        shapes |= {"hc_head_fn": (2, 2 * size), "hc_head_base": (2,), "hc_head_scale": (1,)}
    if kind == "qwen4_exp_text":
        norms = dict.fromkeys((f"{NORMS[kind][1]}.weight", f"{MIXER}.hc_norm.weight"), (2 * size,))
        mix = f"{MIXER}.input_mix_weight_"
        shapes |= norms | {f"{mix}down.weight": (3, 2 * size), f"{mix}up.weight": (2 * size, 3)}
    return shapes


def written(kind: str, folder) -> dict[str, np.ndarray]:
    """A fixture with depths in `folder`."""
    fixture, prefixes, sources = KINDS[kind]
    shutil.copytree(FIXTURES / fixture, folder)
    content = json.loads((folder / "config.json").read_text()) | {"model_type": kind}
    if kind == "mimo":
        content |= {"architectures": ["MiMoForCausalLM"]}
    if kind not in ("mimo_v2_flash", "longcat_flash"):  # whose files do not say it
        content |= {count_key(kind): len(prefixes)}
    (folder / "config.json").write_text(json.dumps(content))
    found, draws = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    size = ends(kind, found)[0].shape[1]
    for prefix in prefixes:
        shapes = own_shapes(kind, size)
        for source, part in sources.items():
            same = {part + name.removeprefix(source): x.shape for name, x in found.items() if name.startswith(source)}
            shapes |= {name.replace("post_attention", "pre_mlp") if kind == "mimo_v2_flash" else name: shape
                       for name, shape in same.items()}  # fmt: skip
        for name, shape in shapes.items():
            name = name if name.startswith(("model.", "mtp.")) else prefix + name
            if name not in found:  # what is a depth's own
                found[name] = draws.normal(0.3, 0.3, shape).astype(np.float32)
    if kind == "longcat_flash":
        found["model.mtp.embed_tokens.weight"] = found["model.embed_tokens.weight"]
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return found


def rms(x, scale=1.0, eps=1e-6):
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps) * scale


@eqx.filter_jit
def run_block(block, x, ctx):
    return block(x, ctx)[0]


@eqx.filter_jit
def run_ahead(model, tokens):
    output = model(tokens)
    ahead = model.predict_mtp(output.hidden, tokens)
    return output, [model.logits(x, depth=depth) for depth, x in enumerate(ahead.hidden, 1)]


def by_hand(kind: str, model, hidden, tensors, tokens, eps: float) -> list[np.ndarray]:
    """The logits of all depths."""
    streams, kernels, gemma = kind in STREAMS, KERNELS.get(kind, ("eh_proj",)), kind == "qwen4_exp_text"
    table, last_norm, head = ends(kind, tensors)
    head, table = table if head is None else head, table.astype(np.float64)
    hidden = np.asarray(hidden, np.float64)
    # all streams as they are, or the only one as the head reads it
    stream = hidden.reshape(*tokens.shape, 2, -1) if streams else rms(hidden, last_norm, eps)
    found = []
    for depth, prefix in enumerate(KINDS[kind][1]):
        own = {name.removeprefix(prefix): x for name, x in tensors.items()}
        norms = (own.get(f"{name}.weight") for name in NORMS[kind])
        embed_norm, stream_norm, final_norm = (1 + x if gemma and x is not None else x for x in norms)
        later = rms(table[np.roll(tokens, -depth - 1, axis=1)], embed_norm, eps)
        if gemma:  # all streams together
            before = rms(stream.reshape(*tokens.shape, -1), stream_norm, eps).reshape(stream.shape)
        else:
            before = rms(stream, stream_norm, eps)
        if streams:
            into, on = (own[f"{name}.weight"].T for name in kernels)
            x = (later @ into)[:, :, None] + before @ on
        else:
            parts = [before, later] if kind == "mimo" else [later, before]
            x = np.concatenate(parts, axis=-1) @ own[f"{kernels[0]}.weight"].T
        places = jnp.where(jnp.arange(tokens.shape[1]) < tokens.shape[1] - depth - 1, jnp.arange(tokens.shape[1]), -1)
        ctx = ed.Context(positions=jnp.broadcast_to(places, tokens.shape))
        x = np.asarray(run_block(model.mtp.unstacked()[depth].block, jnp.asarray(x, jnp.float32), ctx), np.float64)
        stream = x if streams else rms(x, final_norm, eps)
        if gemma:
            found.append(gated_mean(x, tensors, eps) @ head.T)
            continue
        if streams:
            flat = rms(x.reshape(*tokens.shape, -1)) @ own["hc_head_fn"].T
            weights = sigmoid(flat * own["hc_head_scale"] + own["hc_head_base"]) + 1e-6
            x = np.sum(weights[..., None] * x, axis=2)
        found.append(rms(x, final_norm, eps) @ head.T)
    return found


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gated_mean(x: np.ndarray, tensors, eps: float) -> np.ndarray:
    """The mean of both streams, each normalized by itself, each feature times a gate."""
    mix, norm = f"{MIXER}.input_mix_weight_", 1 + tensors[f"{MIXER}.hc_norm.weight"]
    normed = rms(x, norm.reshape(2, -1), eps)
    down = normed.reshape(*x.shape[:2], -1) @ tensors[f"{mix}down.weight"].T / 2
    gates = sigmoid(down * sigmoid(down) @ tensors[f"{mix}up.weight"].T).reshape(x.shape)
    return np.mean(gates * normed, axis=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_stored_depths_are_read_written_and_run_by_the_formula(kind, tmp_path):
    tensors, (fixture, prefixes, _) = written(kind, tmp_path / "model"), KINDS[kind]
    depths = len(prefixes)
    model = ed.load_hf(tmp_path / "model")
    assert model.config.mtp is not None and model.config.mtp.num_depths == depths
    expected = np.load(FIXTURES / fixture / "expected.npz")
    tokens = np.asarray(expected["input_ids"][:2, :12], np.int32)
    output, ahead = run_ahead(model, tokens)
    assert_allclose(output.logits, expected["logits"][:2, :12], rtol=1e-4, atol=1e-4)
    content = json.loads((tmp_path / "model" / "config.json").read_text())
    eps = content.get("rms_norm_eps") or content["layer_norm_epsilon"]
    for depth, want in enumerate(by_hand(kind, model, output.hidden, tensors, tokens, eps), 1):
        assert_allclose(ahead[depth - 1][:, :-depth], want[:, :-depth], rtol=2e-4, atol=2e-4)
    prompt = jnp.asarray(expected["prompt_ids"], jnp.int32)
    count = expected["generated_ids"].shape[1]
    new = ed.generate(model, prompt, max_new_tokens=count, num_draft_tokens=depths, stop_ids=())
    assert_array_equal(new, expected["generated_ids"])
    ed.save_hf(model, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys() and all(np.array_equal(again[name], x) for name, x in tensors.items())
    assert ed.abstract_hf(tmp_path / "again").config == model.config


def test_what_depths_need_is_refused_where_it_is_not_there(tmp_path):
    with pytest.raises(ed.ConversionError, match="compress_ratios of layers of multi-token prediction must be 0"):
        decode(sample("deepseek_v4", "layer_types", compress_ratios=[0, 4, 128, 4]))
    with pytest.raises(ed.ConversionError, match="one without experts"):
        decode(sample("mimo_v2_flash", num_nextn_predict_layers=1, mlp_layer_types=["sparse"] * 3))
    for kind, keys, sentence in (
        (
            "nemotron_h",
            dict(num_nextn_predict_layers=1, mtp_layers_block_type=["moe"]),
            r"only \*E is",
        ),
        ("nemotron_h", dict(num_nextn_predict_layers=1, layers_block_type=["mlp", "attention"]), "whose sizes its are"),
        ("nemotron_h", dict(num_nextn_predict_layers=2), "one layer is"),
        ("ernie4_5_moe", dict(num_nextn_predict_layers=1, use_bias=True), "a bias of mtp_linear_proj"),
        ("qwen4_exp_text", dict(mtp_num_hidden_layers=1, mtp={"rope_theta": 5}), "mtp: rope_theta=5 is not supported"),
    ):
        with pytest.raises(ed.ConversionError, match=sentence):
            decode(sample(kind, **keys))
    tensors = written("mimo_v2_flash", tmp_path / "model")
    assert ed.abstract_hf(tmp_path / "model").config.mtp.num_depths == 3
    del tensors["model.mtp.layers.1.eh_proj.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ed.ConversionError, match=r"model\.mtp\.layers\.1\.eh_proj\.weight is missing"):
        ed.abstract_hf(tmp_path / "model")


@pytest.mark.parametrize(
    "kind", ["ernie4_5_moe", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("nemotron_h", "qwen4_exp_text"))]
)
def test_tensors_of_a_depth_mean_what_those_of_layers_do(kind):
    fixture, (prefix,), sources = KINDS[kind]
    content = json.loads((FIXTURES / fixture / "config.json").read_text()) | {count_key(kind): 1}
    meanings: dict[str, set] = {}
    for path, mapping in FAMILIES[kind].bind(abstract(decode(content))).items():
        inner = re.sub(r"^(mtp\.depth\.block|segments\.\d+\.unit\.\d+)\.", "", path)
        for name in mapping.names:
            meanings.setdefault(name, set()).add((inner, mapping.pattern, mapping.section))
    for source, part in sources.items():
        layer, depth = (
            {name.removeprefix(begin): meaning for name, meaning in meanings.items() if name.startswith(begin)}
            for begin in (source, part or prefix)
        )
        assert layer and layer.items() <= depth.items()


def test_depths_that_no_setting_counts_are_left_out():
    """As transformers leaves out all."""
    for kind, name in (
        ("ernie4_5_moe", "model.mtp_block.0.mlp.up_proj.weight"), ("nemotron_h", "mtp.layers.0.enorm.weight"),
        ("qwen4_exp_text", "mtp.fc_hidden.weight"),
    ):  # fmt: skip
        key = count_key(kind)
        without, counted = decode(sample(kind, key)), decode(sample(kind, **{key: 1}))
        assert without == dataclasses.replace(counted, mtp=None)
        assert [FAMILIES[kind].is_ignored(name, config) for config in (without, counted)] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "tensors", "numbers"), [
    # besides 333 tensors of the encoder, and 3 of the numbers of hashes, of 1,658
    ("qwen4_exp_text", "qwen4-exp", 1322, 179_551_050_368),
    ("nemotron_h", "nemotron3-nano-30b-a3b", 6513, 32_913_266_240),  # Nemotron 3.5 Lightning: the same with a depth
])  # fmt: skip
def test_published_files_have_these_tensors_and_numbers(kind, name, tensors, numbers):
    family = FAMILIES[kind]
    model = abstract(family.decode(family.encode(ed.get_config(name)) | {count_key(kind): 1})[0])
    stored = family.stored_as(["model.layers.0.mlp.experts.gate_up_proj"] if family.fused else [])
    assert len({name for mapping in stored.bind(model).values() for name in mapping.names}) == tensors
    assert sum(leaf.size for leaf in named_leaves(model).values()) == numbers


def test_published_files_of_hy3_have_these_tensors_and_numbers():
    family = FAMILIES["hy_v3"]
    settings = family.encode(ed.get_config("hy3-295b-a21b")) | {"num_nextn_predict_layers": 1}
    model = abstract(family.decode(settings)[0])
    names = {name for mapping in family.bind(model).values() for name in mapping.names}
    assert len(names) == 47_138 and "model.layers.80.final_layernorm.weight" in names
    assert sum(leaf.size for leaf in named_leaves(model).values()) == 298_786_155_776


def test_a_depth_of_longcat_is_a_block_without_experts_with_the_models_table():
    config = decode(sample("longcat_flash", num_nextn_predict_layers=1))
    assert config.mtp.block == dataclasses.replace(config.blocks[1], shortcut_from=None)
    table = "model.mtp.embed_tokens.weight"
    assert FAMILIES["longcat_flash"].copied(config) == {table: "model.embed_tokens.weight"}
    assert FAMILIES["longcat_flash"].is_ignored(table, config)
    two = abstract(decode(sample("longcat_flash", num_nextn_predict_layers=2)))
    with pytest.raises(ed.ConversionError, match=r"model\.mtp\.norm\.weight has room for one layer"):
        FAMILIES["longcat_flash"].bind(two)


def test_all_streams_are_read_where_they_have_weights():
    config = decode(sample("deepseek_v4", num_nextn_predict_layers=1))
    assert config.hidden_features == 2 * config.embed_dim
    for changes, sentence in (
        (dict(all_streams=False), "must have all_streams=True where HyperConnections.weighted_sum is"),
        (dict(normed_stream=True), "excludes normed_stream"),
    ):
        with pytest.raises(ed.ConfigError, match=sentence):
            dataclasses.replace(config, mtp=dataclasses.replace(config.mtp, **changes))
    block = dataclasses.replace(config.mtp.block, residual=Sequential())
    with pytest.raises(ed.ConfigError, match="needs HyperConnections or GatedStreams, the same"):
        dataclasses.replace(config, mtp=dataclasses.replace(config.mtp, block=block))
