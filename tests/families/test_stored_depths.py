"""Layers of multi-token prediction that transformers leaves out: read, written, and run as vLLM and SGLang do.

No reference runs them here, so the formula is written out in NumPy from the tensors of the file; only their blocks,
which are of a kind that the model's own layers have, are the library's.
"""

import dataclasses
import json
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
}  # fmt: skip
NORMS = {
    "mimo": ("token_layernorm", "hidden_layernorm", "final_layernorm"),
    "mimo_v2_flash": ("enorm", "hnorm", "final_layernorm"),
    "hy_v3": ("enorm", "hnorm", "final_layernorm"),
    "longcat_flash": ("enorm.m", "hnorm.m", "model.mtp.norm"),  # the last one stands outside
    "deepseek_v4": ("enorm", "hnorm", "norm"),
}


def own_shapes(kind: str, size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a depth beside its block's."""
    shapes = {f"{name}.weight": (size,) for name in NORMS[kind]}
    if kind == "deepseek_v4":
        return shapes | {
            "e_proj.weight": (size, size), "h_proj.weight": (size, size),
            "hc_head_fn": (2, 2 * size), "hc_head_base": (2,), "hc_head_scale": (1,),
        }  # fmt: skip
    return shapes | {f"{'input_proj' if kind == 'mimo' else 'eh_proj'}.weight": (size, 2 * size)}


def written(kind: str, folder) -> dict[str, np.ndarray]:
    """A fixture with depths in `folder`."""
    fixture, prefixes, sources = KINDS[kind]
    shutil.copytree(FIXTURES / fixture, folder)
    content = json.loads((folder / "config.json").read_text()) | {"model_type": kind}
    if kind == "mimo":
        content |= {"architectures": ["MiMoForCausalLM"]}
    if kind not in ("mimo_v2_flash", "longcat_flash"):  # whose files do not say it
        content |= {"num_nextn_predict_layers": len(prefixes)}
    (folder / "config.json").write_text(json.dumps(content))
    found, draws = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    size = found["norm.weight" if kind == "deepseek_v4" else "model.norm.weight"].shape[0]
    for prefix in prefixes:
        shapes = own_shapes(kind, size)
        for source, part in sources.items():
            same = {part + name.removeprefix(source): x.shape for name, x in found.items() if name.startswith(source)}
            shapes |= {name.replace("post_attention", "pre_mlp") if kind == "mimo_v2_flash" else name: shape
                       for name, shape in same.items()}  # fmt: skip
        for name, shape in shapes.items():
            name = name if name.startswith("model.") else prefix + name
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
    streams = kind == "deepseek_v4"
    stem = "" if streams else "model."
    table = tensors["embed.weight" if streams else "model.embed_tokens.weight"].astype(np.float64)
    head = tensors["head.weight"] if streams else tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    hidden = np.asarray(hidden, np.float64)
    # all streams as they are, or the only one as the head reads it
    stream = hidden.reshape(*tokens.shape, 2, -1) if streams else rms(hidden, tensors[f"{stem}norm.weight"], eps)
    found = []
    for depth, prefix in enumerate(KINDS[kind][1]):
        own = {name.removeprefix(prefix): x for name, x in tensors.items()}
        embed_norm, stream_norm, final_norm = (own[f"{name}.weight"] for name in NORMS[kind])
        later = rms(table[np.roll(tokens, -depth - 1, axis=1)], embed_norm, eps)
        before = rms(stream, stream_norm, eps)
        if streams:
            x = (later @ own["e_proj.weight"].T)[:, :, None] + before @ own["h_proj.weight"].T
        elif kind == "mimo":
            x = np.concatenate([before, later], axis=-1) @ own["input_proj.weight"].T
        else:
            x = np.concatenate([later, before], axis=-1) @ own["eh_proj.weight"].T
        places = jnp.where(jnp.arange(tokens.shape[1]) < tokens.shape[1] - depth - 1, jnp.arange(tokens.shape[1]), -1)
        ctx = ed.Context(positions=jnp.broadcast_to(places, tokens.shape))
        x = np.asarray(run_block(model.mtp.unstacked()[depth].block, jnp.asarray(x, jnp.float32), ctx), np.float64)
        stream = x if streams else rms(x, final_norm, eps)
        if streams:
            flat = rms(x.reshape(*tokens.shape, -1)) @ own["hc_head_fn"].T
            weights = 1 / (1 + np.exp(-(flat * own["hc_head_scale"] + own["hc_head_base"]))) + 1e-6
            x = np.sum(weights[..., None] * x, axis=2)
        found.append(rms(x, final_norm, eps) @ head.T)
    return found


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
    np.testing.assert_allclose(output.logits, expected["logits"][:2, :12], rtol=1e-4, atol=1e-4)
    eps = json.loads((tmp_path / "model" / "config.json").read_text())["rms_norm_eps"]
    for depth, want in enumerate(by_hand(kind, model, output.hidden, tensors, tokens, eps), 1):
        np.testing.assert_allclose(ahead[depth - 1][:, :-depth], want[:, :-depth], rtol=2e-4, atol=2e-4)
    prompt = jnp.asarray(expected["prompt_ids"], jnp.int32)
    count = expected["generated_ids"].shape[1]
    new = ed.generate(model, prompt, max_new_tokens=count, num_draft_tokens=depths, stop_ids=())
    np.testing.assert_array_equal(new, expected["generated_ids"])
    ed.save_hf(model, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys() and all(np.array_equal(again[name], x) for name, x in tensors.items())
    assert ed.abstract_hf(tmp_path / "again").config == model.config


def test_what_depths_need_is_refused_where_it_is_not_there(tmp_path):
    with pytest.raises(ed.ConversionError, match="compress_ratios of layers of multi-token prediction must be 0"):
        decode(sample("deepseek_v4", "layer_types", compress_ratios=[0, 4, 128, 4]))
    with pytest.raises(ed.ConversionError, match="one without experts"):
        decode(sample("mimo_v2_flash", num_nextn_predict_layers=1, mlp_layer_types=["sparse"] * 3))
    tensors = written("mimo_v2_flash", tmp_path / "model")
    assert ed.abstract_hf(tmp_path / "model").config.mtp.num_depths == 3
    del tensors["model.mtp.layers.1.eh_proj.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ed.ConversionError, match=r"model\.mtp\.layers\.1\.eh_proj\.weight is missing"):
        ed.abstract_hf(tmp_path / "model")


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
