"""Layers of multi-token prediction (depths), which transformers ignores: read, written, and run as in vLLM and SGLang.

The formula is computed in NumPy from the tensors of the file. The blocks, whose type also exists in the decoder, are
computed by the library.
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
from eqx_decoders.families.registry import FAMILIES
from eqx_decoders.io.huggingface.verify import compare_tensors
from eqx_decoders.model.init import abstract, with_mtp
from eqx_decoders.sharding.axes import named_leaves
from tests.compare import assert_allclose, assert_array_equal, assert_close
from tests.errors import refused
from tests.families.samples import FIXTURES, decode, sample
from tests.models import filled


@dataclasses.dataclass(frozen=True)
class Stored:
    """Tensor names of the depths of a family. A depth projects a token and the stream, and has a block.

    **Arguments:**

    - `fixture`: checkpoint without depths.
    - `prefixes`: of the tensor names of each depth.
    - `sources`: layers of the fixture from which the block's tensors are copied, and their new prefixes.
    - `norms`: of the embedding, of the stream, and before the head.
    - `kernels`: one matrix for both inputs (embedding first), or one matrix per input.
    - `copies`: tensors of a depth that repeat tensors of the model.
    - `count_key`: the key with the number of depths, or None.
    - `ends`: the model's table, final norm and head.
    - `offset`: 1 if norms are stored as w - 1.
    - `streams`: number of residual streams; a depth reads all of them.
    - `normed_depths`: a later depth reads the output of the previous depth after its final norm.
    """

    fixture: str
    prefixes: tuple[str, ...]
    sources: dict[str, str]
    norms: tuple[str | None, ...] = ("enorm", "hnorm", "final_layernorm")
    kernels: tuple[str, ...] = ("eh_proj",)
    copies: dict[str, str] = dataclasses.field(default_factory=dict)
    count_key: str | None = "num_nextn_predict_layers"
    ends: tuple[str, str, str] = ("model.embed_tokens", "model.norm", "lm_head")
    offset: int = 0
    streams: int = 1
    normed_depths: bool = True


DEEPSEEK_COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
QWEN = dict(
    norms=("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"), kernels=("mtp.fc",), count_key=None,
    offset=1,
)  # fmt: skip
KINDS = {
    "deepseek_v3": Stored(
        "deepseek3_groups", ("model.layers.2.", "model.layers.3."), {"model.layers.1.": ""},
        norms=("enorm", "hnorm", "shared_head.norm"), copies=DEEPSEEK_COPIES, normed_depths=False,
    ),
    "deepseek_v4": Stored(
        "deepseek_v4", ("mtp.0.", "mtp.1."),
        {"layers.0.attn.": "attn.", "layers.2.ffn": "ffn", "layers.0.hc_": "hc_", "layers.0.attn_norm": "attn_norm"},
        norms=("enorm", "hnorm", "norm"), kernels=("e_proj", "h_proj"), ends=("embed", "norm", "head"), streams=2,
    ),
    "ernie4_5_moe": Stored(
        "ernie4_5_moe", ("model.mtp_block.0.",), {"model.layers.0.": ""}, kernels=("model.mtp_linear_proj.0",),
        norms=("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.norm"),
    ),
    "glm4_moe": Stored(
        "glm4_moe", ("model.layers.2.",), {"model.layers.1.": ""}, norms=("enorm", "hnorm", "shared_head.norm"),
        copies=DEEPSEEK_COPIES,
    ),
    "hy_v3": Stored("hy_v3", ("model.layers.2.", "model.layers.3."), {"model.layers.1.": ""}),
    "longcat_flash": Stored(
        "longcat_flash", ("model.mtp.layers.0.",),
        {
            "model.layers.0.self_attn.1.": "self_attn.", "model.layers.0.mlps.1.": "transformer_layer.mlp.",
            "model.layers.0.input_layernorm.1.": "input_layernorm.",
            "model.layers.0.post_attention_layernorm.1.": "post_attention_layernorm.",
        },
        norms=("enorm.m", "hnorm.m", "model.mtp.norm"), count_key=None,
        copies={"model.mtp.embed_tokens.weight": "model.embed_tokens.weight"},
    ),
    "mimo": Stored(
        "qwen2_mixed", ("model.mtp_layers.0.",), {"model.layers.2.": ""}, kernels=("input_proj",),
        norms=("token_layernorm", "hidden_layernorm", "final_layernorm"),
    ),
    "mimo_v2_flash": Stored(
        "mimo_v2_flash", tuple(f"model.mtp.layers.{depth}." for depth in range(3)), {"model.layers.1.": ""},
        count_key=None,
    ),
    "nemotron_h": Stored(
        "nemotron_h_latent", ("mtp.layers.0.",), {"backbone.layers.2.": "", "backbone.layers.3.": "mtp.layers.1."},
        norms=("enorm", "hnorm", "mtp.layers.1.final_layernorm"),
        ends=("backbone.embeddings", "backbone.norm_f", "lm_head"),
    ),
    "qwen3_5_moe_text": Stored("qwen3_5_moe", ("mtp.layers.0.",), {"model.layers.3.": ""}, **QWEN),
    "qwen3_5_text": Stored("qwen3_5_dense", ("mtp.layers.0.",), {"model.layers.1.": ""}, **QWEN),
    "qwen3_next": Stored("qwen3_next", ("mtp.layers.0.",), {"model.layers.3.": ""}, **QWEN),
    "qwen4_exp_text": Stored(
        "qwen4_exp", ("mtp.layers.0.",), {"model.layers.1.": ""}, kernels=("mtp.fc_embedding", "mtp.fc_hidden"),
        norms=("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", None), count_key="mtp_num_hidden_layers",
        offset=1, streams=2,
    ),
}  # fmt: skip
WEIGHTS = "model.safetensors"
MIXER = "mtp.hyper_connection_mixer"


def ends(kind: str, tensors) -> list[np.ndarray | None]:
    return [tensors.get(f"{name}.weight") for name in KINDS[kind].ends]


def own_shapes(kind: str, size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a depth, without the tensors of its block."""
    stored = KINDS[kind]
    shapes = {f"{name}.weight": (size,) for name in stored.norms if name}
    shapes |= {f"{name}.weight": (size, 2 * size // len(stored.kernels)) for name in stored.kernels}
    if kind == "deepseek_v4":
        shapes |= {"hc_head_fn": (2, 2 * size), "hc_head_base": (2,), "hc_head_scale": (1,)}
    if kind == "qwen4_exp_text":
        norms = dict.fromkeys((f"{stored.norms[1]}.weight", f"{MIXER}.hc_norm.weight"), (2 * size,))
        mix = f"{MIXER}.input_mix_weight_"
        shapes |= norms | {f"{mix}down.weight": (3, 2 * size), f"{mix}up.weight": (2 * size, 3)}
    return shapes


def full_name(prefix: str, name: str) -> str:
    """Return the full name of a tensor of a depth; some names do not have the prefix of the depth."""
    return name if name.startswith(("model.", "mtp.")) else prefix + name


def written(kind: str, folder, depths: int | None = None, **others) -> dict[str, np.ndarray]:
    """Write a fixture with depths (default: all) and changed tensors into `folder`; None removes a tensor."""
    stored = KINDS[kind]
    prefixes = stored.prefixes[:depths]
    shutil.copytree(FIXTURES / stored.fixture, folder)
    content = json.loads((folder / "config.json").read_text()) | {"model_type": kind}
    if kind == "mimo":
        content |= {"architectures": ["MiMoForCausalLM"]}
    if stored.count_key is not None:
        content |= {stored.count_key: len(prefixes)}
    (folder / "config.json").write_text(json.dumps(content))
    found, generator = load_file(folder / WEIGHTS), np.random.default_rng(0)
    size = ends(kind, found)[0].shape[1]
    for prefix in prefixes:
        shapes = own_shapes(kind, size)
        for source, part in stored.sources.items():
            same = {part + name.removeprefix(source): x.shape for name, x in found.items() if name.startswith(source)}
            shapes |= {
                name.replace("post_attention", "pre_mlp") if kind == "mimo_v2_flash" else name: shape
                for name, shape in same.items()
            }
        for name, shape in shapes.items():
            if full_name(prefix, name) not in found:
                found[full_name(prefix, name)] = generator.normal(0.3, 0.3, shape).astype(np.float32)
        for name, original in stored.copies.items():
            found[full_name(prefix, name)] = found[original]
    found = {name: x for name, x in (found | others).items() if x is not None}
    save_file(found, folder / WEIGHTS, metadata={"format": "pt"})
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
    """Return the logits of all depths."""
    stored = KINDS[kind]
    table, last_norm, head = ends(kind, tensors)
    head, table = table if head is None else head, table.astype(np.float64)
    hidden = np.asarray(hidden, np.float64)
    # all streams; with one stream, the input of the head
    if stored.streams > 1:
        stream = hidden.reshape(*tokens.shape, stored.streams, -1)
    else:
        stream = rms(hidden, stored.offset + last_norm, eps)
    found = []
    for depth, prefix in enumerate(stored.prefixes):
        own = {name.removeprefix(prefix): x for name, x in tensors.items()}
        norms = (own.get(f"{name}.weight") for name in stored.norms)
        embed_norm, stream_norm, final_norm = (None if x is None else stored.offset + x for x in norms)
        later = rms(table[np.roll(tokens, -depth - 1, axis=1)], embed_norm, eps)
        if kind == "qwen4_exp_text":  # all streams
            before = rms(stream.reshape(*tokens.shape, -1), stream_norm, eps).reshape(stream.shape)
        else:
            before = rms(stream, stream_norm, eps)
        if stored.streams > 1:
            into, on = (own[f"{name}.weight"].T for name in stored.kernels)
            x = (later @ into)[:, :, None] + before @ on
        else:
            parts = [before, later] if kind == "mimo" else [later, before]
            x = np.concatenate(parts, axis=-1) @ own[f"{stored.kernels[0]}.weight"].T
        places = jnp.where(jnp.arange(tokens.shape[1]) < tokens.shape[1] - depth - 1, jnp.arange(tokens.shape[1]), -1)
        ctx = ed.ForwardContext(positions=jnp.broadcast_to(places, tokens.shape))
        x = np.asarray(run_block(model.mtp.unstacked()[depth].block, jnp.asarray(x, jnp.float32), ctx), np.float64)
        stream = rms(x, final_norm, eps) if stored.streams == 1 and stored.normed_depths else x
        if kind == "qwen4_exp_text":
            found.append(gated_mean(x, tensors, eps) @ head.T)
            continue
        if kind == "deepseek_v4":
            flat = rms(x.reshape(*tokens.shape, -1)) @ own["hc_head_fn"].T
            weights = sigmoid(flat * own["hc_head_scale"] + own["hc_head_base"]) + 1e-6
            x = np.sum(weights[..., None] * x, axis=2)
        found.append(rms(x, final_norm, eps) @ head.T)
    return found


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gated_mean(x: np.ndarray, tensors, eps: float) -> np.ndarray:
    """Return the gated mean of both streams, each normalized separately."""
    mix, norm = f"{MIXER}.input_mix_weight_", 1 + tensors[f"{MIXER}.hc_norm.weight"]
    normed = rms(x, norm.reshape(2, -1), eps)
    down = normed.reshape(*x.shape[:2], -1) @ tensors[f"{mix}down.weight"].T / 2
    gates = sigmoid(down * sigmoid(down) @ tensors[f"{mix}up.weight"].T).reshape(x.shape)
    return np.mean(gates * normed, axis=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_stored_depths_are_read_written_and_run_by_the_formula(kind, tmp_path):
    tensors, stored = written(kind, tmp_path / "model"), KINDS[kind]
    depths = len(stored.prefixes)
    model = ed.load_hf(tmp_path / "model")
    assert model.config.mtp is not None and model.config.mtp.num_depths == depths
    expected = np.load(FIXTURES / stored.fixture / "expected.npz")
    tokens = np.asarray(expected["input_ids"][:2, :12], np.int32)
    output, ahead = run_ahead(model, tokens)
    assert_close(output.logits, expected["logits"][:2, :12], units=256)
    content = json.loads((tmp_path / "model" / "config.json").read_text())
    eps = content.get("rms_norm_eps") or content["layer_norm_epsilon"]
    for depth, want in enumerate(by_hand(kind, model, output.hidden, tensors, tokens, eps), 1):
        assert_allclose(ahead[depth - 1][:, :-depth], want[:, :-depth], rtol=2e-4, atol=2e-4)
    prompt = jnp.asarray(expected["prompt_ids"], jnp.int32)
    count = expected["generated_ids"].shape[1]
    for drafts in {1, depths}:
        new = ed.generate(model, prompt, max_new_tokens=count, num_draft_tokens=drafts, stop_ids=())
        assert_array_equal(new, expected["generated_ids"])
    ed.save_hf(model, tmp_path / "again")
    again = load_file(tmp_path / "again" / WEIGHTS)
    assert again.keys() == tensors.keys() and all(np.array_equal(again[name], x) for name, x in tensors.items())
    assert ed.abstract_hf(tmp_path / "again").config == model.config
    if kind == "deepseek_v3":
        assert json.loads((tmp_path / "again" / "config.json").read_text())[stored.count_key] == depths
        count, different = compare_tensors(tmp_path / "again")
        assert count > 0 and not different


OTHER_NAMES = ("deepseek_v4", "longcat_flash", "mimo", "mimo_v2_flash")  # than the settings of their layers


@pytest.mark.slow(fast=("ernie4_5_moe", "qwen3_5_text"))
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in OTHER_NAMES])
def test_tensors_of_depths_have_the_layout_of_layer_tensors(kind):
    stored = KINDS[kind]
    content = json.loads((FIXTURES / stored.fixture / "config.json").read_text())
    if stored.count_key is None:
        config = FAMILIES[kind].with_depths(decode(content), 1)
    else:
        config = decode(content | {stored.count_key: 1})
    meanings: dict[str, set] = {}
    for path, mapping in FAMILIES[kind].bind(abstract(config)).items():
        inner = re.sub(r"^(mtp\.depth\.block|scanned_layers\.\d+\.unit\.\d+)\.", "", path)
        for name in mapping.names:
            meanings.setdefault(name, set()).add((inner, mapping.pattern, mapping.section))
    for source, part in stored.sources.items():
        layer, depth = (
            {name.removeprefix(begin): meaning for name, meaning in meanings.items() if name.startswith(begin)}
            for begin in (source, part or stored.prefixes[0])
        )
        assert layer and layer.items() <= depth.items()


@pytest.mark.slow(fast=("mimo_v2_flash",))
@pytest.mark.parametrize(
    "kind, attributes",
    [
        ("deepseek_v3", dict(num_depths=2, normed_stream=True)),
        ("glm4_moe", dict(num_depths=1)),
        ("mimo_v2_flash", dict(num_depths=3)),
    ],
    ids=["deepseek_v3", "glm4_moe", "mimo_v2_flash"],
)
def test_depths_are_counted_by_the_tensors_of_the_files(kind, attributes, tmp_path):
    written(kind, tmp_path / "model")
    config = ed.abstract_hf(tmp_path / "model").config
    assert {name: getattr(config.mtp, name) for name in attributes} == attributes
    if kind != "mimo_v2_flash":  # its depths have windows and no experts
        assert config.mtp.block == config.blocks[-1]


@pytest.mark.slow
def test_depths_without_tensors_are_not_loaded(tmp_path):
    """transformers writes the number of depths into the config, but not their tensors."""
    names = [name for name in written("deepseek_v3", tmp_path / "all", 1) if name.startswith("model.layers.2.")]
    written("deepseek_v3", tmp_path / "none", 1, **dict.fromkeys(names))
    assert ed.load_hf(tmp_path / "none").mtp is None
    assert ed.abstract_hf(tmp_path / "none").config == ed.abstract_hf(FIXTURES / "deepseek3_groups").config
    written("deepseek_v3", tmp_path / "bare", 1, **{f"model.layers.2.{name}": None for name in DEEPSEEK_COPIES})
    assert ed.abstract_hf(tmp_path / "bare").mtp is not None


def test_count_key_without_tensors_gives_no_depths(tmp_path):
    shutil.copytree(FIXTURES / "qwen3_5_dense", tmp_path / "none")
    content = json.loads((tmp_path / "none" / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (tmp_path / "none" / "config.json").write_text(json.dumps(content))
    assert ed.abstract_hf(tmp_path / "none").config.mtp is None and decode(content).mtp is not None


@pytest.mark.slow(fast=("mimo_v2_flash",))
@pytest.mark.parametrize(
    "kind, tensor",
    [
        ("deepseek_v3", "model.layers.2.eh_proj.weight"),
        ("mimo_v2_flash", "model.mtp.layers.1.eh_proj.weight"),
        ("qwen3_next", "mtp.fc.weight"),
    ],
    ids=["deepseek_v3", "mimo_v2_flash", "qwen3_next"],
)
def test_missing_tensors_of_a_depth_are_refused(kind, tensor, tmp_path):
    written(kind, tmp_path / "model", **{tensor: None})
    with refused(ed.ConversionError, tensor):
        ed.abstract_hf(tmp_path / "model")


def test_different_embedding_of_a_depth_is_refused(tmp_path):
    table = "model.layers.2.embed_tokens.weight"
    written("deepseek_v3", tmp_path / "model", 1, **{table: np.ones((64, 24), np.float32)})
    with refused(ed.ConversionError, table):
        ed.load_hf(tmp_path / "model")


def test_families_without_depths_do_not_write_them(tmp_path):
    model = filled(with_mtp(ed.abstract_hf(FIXTURES / "llama_rope").config, 1))
    with refused(ed.ConversionError, "mtp"):
        ed.save_hf(model, tmp_path / "model", family="llama")
    ed.save_hf(model.without_mtp(), tmp_path / "model", family="llama")


def test_depths_of_mimo_v2_flash_need_matching_layers():
    with refused(ed.ConversionError, "experts"):
        decode(sample("mimo_v2_flash", num_nextn_predict_layers=1, mlp_layer_types=["sparse"] * 3))


@pytest.mark.parametrize("kind, field", [("longcat_flash", "final_norm"), ("qwen3_next", "blocks")])
def test_unsupported_norm_or_attention_of_depths_is_refused(kind, field):
    config = decode(sample(kind))
    # the first layer of Qwen3-Next has no softmax attention
    value = None if field == "final_norm" else config.blocks[:1]
    with refused(ed.ConversionError, f"DecoderConfig.{field}"):
        FAMILIES[kind].with_depths(dataclasses.replace(config, **{field: value}), 1)


def test_depths_without_a_count_key_are_ignored():
    """As all depths are in transformers."""
    for kind, name in (
        ("ernie4_5_moe", "model.mtp_block.0.mlp.up_proj.weight"), ("nemotron_h", "mtp.layers.0.enorm.weight"),
        ("qwen4_exp_text", "mtp.fc_hidden.weight"),
    ):  # fmt: skip
        key = KINDS[kind].count_key
        without, counted = decode(sample(kind, key)), decode(sample(kind, **{key: 1}))
        assert without == dataclasses.replace(counted, mtp=None)
        assert [FAMILIES[kind].is_ignored(name, config) for config in (without, counted)] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "tensors", "numbers"), [
    # besides 333 tensors of the encoder and 3 of the n-gram hashes, of 1,658 tensors
    ("qwen4_exp_text", "qwen4-exp", 1322, 179_551_050_368),
    ("nemotron_h", "nemotron3-nano-30b-a3b", 6513, 32_913_266_240),  # Nemotron 3.5 Lightning: with one depth
])  # fmt: skip
def test_tensor_and_parameter_counts_of_published_files(kind, name, tensors, numbers):
    family = FAMILIES[kind]
    model = abstract(family.decode(family.encode(ed.get_config(name)) | {KINDS[kind].count_key: 1})[0])
    stored = family.for_tensors(["model.layers.0.mlp.experts.gate_up_proj"] if family.fused else [])
    assert len({name for mapping in stored.bind(model).values() for name in mapping.names}) == tensors
    assert sum(leaf.size for leaf in named_leaves(model).values()) == numbers


def test_tensor_and_parameter_counts_of_published_hy3_files():
    family = FAMILIES["hy_v3"]
    settings = family.encode(ed.get_config("hy3-295b-a21b")) | {"num_nextn_predict_layers": 1}
    model = abstract(family.decode(settings)[0])
    names = {name for mapping in family.bind(model).values() for name in mapping.names}
    assert len(names) == 47_138 and "model.layers.80.final_layernorm.weight" in names
    assert sum(leaf.size for leaf in named_leaves(model).values()) == 298_786_155_776


def test_depth_of_longcat_has_no_experts_and_shares_the_embedding():
    config = decode(sample("longcat_flash", num_nextn_predict_layers=1))
    assert config.mtp.block == dataclasses.replace(config.blocks[1], shortcut_from=None)
    table = "model.mtp.embed_tokens.weight"
    assert FAMILIES["longcat_flash"].copied(config) == {table: "model.embed_tokens.weight"}
    assert FAMILIES["longcat_flash"].is_ignored(table, config)
    two = abstract(decode(sample("longcat_flash", num_nextn_predict_layers=2)))
    with refused(ed.ConversionError, "model.mtp.norm.weight"):
        FAMILIES["longcat_flash"].bind(two)


def test_depth_with_stream_weights_reads_all_streams():
    config = decode(sample("deepseek_v4", num_nextn_predict_layers=1))
    assert config.hidden_features == 2 * config.embed_dim
    for changes, name in (
        (dict(all_streams=False), "all_streams=True"),
        (dict(normed_stream=True), "normed_stream"),
    ):
        with refused(ed.ConfigError, name):
            dataclasses.replace(config, mtp=dataclasses.replace(config.mtp, **changes))
    block = dataclasses.replace(config.mtp.block, residual=Sequential())
    with refused(ed.ConfigError, "HyperConnections", "GatedStreams"):
        dataclasses.replace(config, mtp=dataclasses.replace(config.mtp, block=block))
