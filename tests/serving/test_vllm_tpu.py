"""Models in vLLM on TPU, with stubs of its modules (same names and signatures) and plain attention kernels."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import eqx_decoders as ed
from eqx_decoders.errors import MissingPackage
from eqx_decoders.serving.vllm_tpu import ARCHITECTURES, NAME, NOT_REPLACEABLE, adapter, engine_layout, register
from tests.compare import assert_allclose
from tests.errors import refused
from tests.serving.engines import FIXTURES


PAGE, PAGES, PLACES, ROWS, TOKENS = 4, 40, 8, 3, 16
PACKAGE = "tpu_inference"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["input_positions", "block_tables", "seq_lens", "query_start_loc", "request_distribution"],
    meta_fields=["padded_num_reqs"],
)
@dataclasses.dataclass
class AttentionMetadata:
    """Concatenated, padded tokens of all sequences: the start of each sequence, and the concatenated pages."""

    input_positions: jax.Array
    block_tables: jax.Array
    seq_lens: jax.Array
    query_start_loc: jax.Array
    request_distribution: jax.Array
    padded_num_reqs: int = -1


def places_of(count, md):
    """Return, for each token, its sequence, its position in it, and whether it is real."""
    tokens, begins = jnp.arange(count), md.query_start_loc
    row = jnp.clip(jnp.searchsorted(begins[1:], tokens, side="right"), 0, ROWS - 1)
    return row, md.seq_lens[row] - begins[row + 1] + tokens, tokens < begins[md.request_distribution[-1]]


def softmax_over(scores, seen, sinks):
    """Return attention weights of shape [heads, tokens, slots]; a sink takes part in the normalization."""
    scores = jnp.where(seen, scores, -1e30)
    if sinks is not None:
        extra = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        scores = jnp.concatenate([scores, extra], axis=-1)
    return jax.nn.softmax(scores, axis=-1)[..., : seen.shape[-1]]


def over_pages(flat, pages, place, row, position, real, new, md):
    """Write new entries into a cache of shape `[page * slot, ...]`.

    Returns it, and the slots of each token's sequence.
    """
    flat = flat.at[jnp.where(real, place, flat.shape[0])].set(new.astype(flat.dtype), mode="drop")
    slots = (pages[:, :, None] * PAGE + jnp.arange(PAGE)[None, None]).reshape(ROWS, -1)[row]
    ahead = position[:, None] - jnp.arange(slots.shape[1])[None]
    return flat, flat[slots], ahead


def attention(
    kv_cache,
    q,
    k,
    v,
    attention_metadata,
    mesh,
    head_dim_original=None,
    sm_scale: Any = None,
    attention_chunk_size=None,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    sinks=None,
    update_kv_cache=True,
    use_causal_mask=None,
    shared_attention_metadata=None,
    attn_logits_soft_cap=None,
):
    """Attention over pages of shape `[slots, interleaved keys and values of heads, 1, features padded to 128]`."""
    assert kv_cache.shape[1:] == (PAGE, 2 * k.shape[1], 1, 128) and mesh.axis_names == ("data", "model")

    def local(q, k, v, cache):
        md, kv_heads, size = attention_metadata, k.shape[1], q.shape[-1]
        row, position, real = places_of(len(q), md)
        pages = md.block_tables.reshape(ROWS, -1)
        place = pages[row, position // PAGE] * PAGE + position % PAGE
        both = jnp.stack([k, v], axis=2).reshape(len(k), 2 * kv_heads, 1, size)
        both = jnp.pad(both, ((0, 0), (0, 0), (0, 0), (0, 128 - size)))
        flat = cache.reshape(-1, *cache.shape[2:])
        real_here = real if update_kv_cache else jnp.zeros_like(real)
        flat, found, ahead = over_pages(flat, pages, place, row, position, real_here, both, md)
        found = found[:, :, :, 0, :size].reshape(*found.shape[:2], kv_heads, 2, size)
        keys, values = (jnp.repeat(found[:, :, :, i], q.shape[1] // kv_heads, axis=2) for i in (0, 1))
        scores = jnp.einsum("thd,tshd->hts", q, keys.astype(q.dtype) * (k_scale or 1)) * sm_scale
        cap = attn_logits_soft_cap
        scores = scores if cap is None else cap * jnp.tanh(scores / cap)
        seen = (ahead >= 0) & (ahead < (attention_chunk_size or 1 << 30))
        weights = softmax_over(scores, seen[None], sinks)
        return flat.reshape(cache.shape), jnp.einsum("hts,tshd->thd", weights, values.astype(q.dtype) * (v_scale or 1))

    heads = P(None, "model")
    taken, given = (heads, heads, heads, P(None, None, "model")), (P(None, None, "model"), heads)
    return jax.shard_map(local, mesh=mesh, check_vma=False, in_specs=taken, out_specs=given)(q, k, v, kv_cache)


def mla_attention(
    q_NTA,
    q_rope_TNH,
    k_SA,
    k_rope_SH,
    kv_cache,
    md,
    mesh,
    num_attention_heads,
    qk_nope_head_dim,
    query_nth_sharding=None,
    query_tnh_sharding=None,
    keyvalue_skh_sharding=None,
    attn_o_nth_sharding=None,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    sm_scale: Any = None,
):
    """Attention over pages of shape `[slots, 1, latent padded to 128 | rotary padded to 128]`."""
    row, position, real = places_of(len(k_SA), md)
    pages = md.block_tables.reshape(ROWS, -1)
    place = pages[row, position // PAGE] * PAGE + position % PAGE
    latent, rope = (jnp.pad(x, ((0, 0), (0, 128 - x.shape[-1]))) for x in (k_SA, k_rope_SH))
    flat = kv_cache.reshape(-1, 256)
    new = jnp.concatenate([latent, rope], axis=-1)
    flat, found, ahead = over_pages(flat, pages, place, row, position, real, new, md)
    latents, ropes = found[..., : k_SA.shape[-1]], found[..., 128 : 128 + k_rope_SH.shape[-1]]
    scores = jnp.einsum("nta,tsa->nts", q_NTA, latents) + jnp.einsum("tnh,tsh->nts", q_rope_TNH, ropes)
    weights = softmax_over(scores * sm_scale, (ahead >= 0)[None], None)
    return flat.reshape(kv_cache.shape), jnp.einsum("nts,tsa->nta", weights, latents)


def stub_modules():
    """Return stubs of the modules of tpu-inference that are imported, and the registered names."""
    registered = {}
    contents = {
        "models.common.model_loader": dict(register_model=registered.__setitem__),
        "layers.common.attention_interface": dict(attention=attention, mla_attention=mla_attention),
        "layers.common.quantization": dict(quantize_kv=lambda dtype, k, v, *_: (k.astype(dtype), v.astype(dtype))),
        "layers.common.sharding": dict(ShardingAxisName=types.SimpleNamespace(ATTN_DATA="data")),
    }
    found = {}
    for path, content in contents.items():
        name = PACKAGE
        for part in ["", *path.split(".")]:
            name = f"{name}.{part}" if part else name
            found.setdefault(name, types.ModuleType(name))
        vars(found[name]).update(content)
    return found, registered


@pytest.fixture
def package(monkeypatch):
    """Install the stubs of tpu-inference. Returns the registered models."""
    pytest.importorskip("flax")
    found, registered = stub_modules()
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    return registered


def vllm_config(fixture, **settings):
    """Return the settings of vLLM that are read."""
    model = dict(model=str(FIXTURES / fixture), revision=None, dtype=jnp.dtype("float32"), use_mla=False)
    model |= {key: settings.pop(key) for key in tuple(settings) if key in model}
    loading = types.SimpleNamespace(load_format=settings.pop("load_format", "auto"))
    return types.SimpleNamespace(model_config=types.SimpleNamespace(**model), load_config=loading, **settings)


def one_mesh(data=1, model=1):
    return Mesh(np.asarray(jax.devices()[: data * model]).reshape(data, model), ("data", "model"))


def loaded(config, mesh):
    """Return the functions of `get_flax_model` for a step and for logits, and the arrays that both take first."""
    from flax import nnx

    with jax.set_mesh(mesh):
        if config.load_config.load_format == "dummy":
            module = adapter()(config, jax.random.key(0), mesh)
        else:
            module = nnx.eval_shape(lambda: adapter()(config, jax.random.key(0), mesh))
            module.load_weights(jax.random.key(0))
            module = nnx.jit(lambda module: module, donate_argnums=0)(module)
    graph, state = nnx.split(module)
    leaves, form = jax.tree.flatten(state)

    def step(leaves, *args):
        return nnx.merge(graph, jax.tree.unflatten(form, leaves))(*args)

    def logits(leaves, hidden):
        return nnx.merge(graph, jax.tree.unflatten(form, leaves)).compute_logits(hidden)

    return jax.jit(step, donate_argnums=1, static_argnums=(6, 9, 10)), jax.jit(logits), leaves


def caches_for(model, use_mla, dtype=jnp.float32):
    if use_mla:
        return [jnp.zeros((PAGES, PAGE, 1, 256), dtype) for _ in model.config.blocks]
    own = [block.mixer for block in model.config.blocks if getattr(block.mixer, "kv_shared_from", None) is None]
    return [jnp.zeros((PAGES, PAGE, 2 * mixer.num_kv_heads, 1, 128), dtype) for mixer in own]


def run_in_pieces(fixture, sequences, cuts, *, caches=None, places=None, mesh=None, **settings):
    """Return the logits of sequences that are computed together, in pieces, in calls of one shape.

    With `places`, each layer has its own numbered cache with separate pages.
    """
    mesh = one_mesh() if mesh is None else mesh
    step, logits_of, leaves = loaded(vllm_config(fixture, **settings), mesh)
    model = ed.abstract_hf(FIXTURES / fixture)
    caches = caches_for(model, settings.get("use_mla", False)) if caches is None else caches
    groups = 1 if places is None else len(places)
    tables = np.random.default_rng(0).permutation(PAGES)[: groups * 2 * PLACES].reshape(groups, 2, PLACES)
    found, done = [[] for _ in sequences], [0] * len(sequences)
    for cut in cuts:
        pieces = [text[begin : begin + count] for text, begin, count in zip(sequences, done, cut, strict=True)]
        ids, positions = np.zeros((2, TOKENS), np.int32)
        ids[: sum(cut)] = np.concatenate(pieces)
        positions[: sum(cut)] = np.concatenate([np.arange(b, b + n) for b, n in zip(done, cut, strict=True)])
        done = [begin + count for begin, count in zip(done, cut, strict=True)]
        starts = np.cumsum([0, *cut, 0]).astype(np.int32)
        metadata = [
            AttentionMetadata(
                input_positions=jnp.asarray(positions),
                block_tables=jnp.asarray(np.concatenate([table, table[:1] * 0]).reshape(-1), jnp.int32),
                seq_lens=jnp.asarray([*done, 0], jnp.int32),
                query_start_loc=jnp.asarray(starts),
                request_distribution=jnp.asarray([0, 0, len(cut)], jnp.int32),
            )
            for table in tables
        ]
        known = metadata[0] if places is None else dict(zip(places, metadata, strict=True))
        numbers = None if places is None else tuple(places.items())
        with jax.set_mesh(mesh):
            ids = jnp.asarray(ids)
            caches, hidden, aux, _ = step(leaves, caches, ids, known, None, None, numbers, None, None, True, True)
            logits = logits_of(leaves, hidden)
        assert aux == [] and hidden.shape == (TOKENS, model.config.embed_dim)
        for each, piece in zip(found, np.split(np.asarray(logits)[: sum(cut)], np.cumsum(cut)[:-1]), strict=True):
            each.append(piece)
    return [np.concatenate(each) for each in found]


def random_texts(fixture, lengths=(13, 7)):
    vocab = ed.abstract_hf(FIXTURES / fixture).config.vocab_size
    generator = np.random.default_rng(1)
    return [generator.integers(3, vocab, length) for length in lengths]


CUTS = [(6, 1), (6, 5), (1, 1)]


def check_same(fixture, found, sequences, atol=2e-4):
    model = ed.load_hf(FIXTURES / fixture, dtype="float32")
    longest = max(map(len, sequences))
    padded = np.stack([np.pad(text, (0, longest - len(text))) for text in sequences])
    alone = np.asarray(jax.jit(lambda model, tokens: model(tokens).logits)(model, padded))
    for row, (text, logits) in enumerate(zip(sequences, found, strict=True)):
        assert_allclose(logits, alone[row, : len(text)], atol=atol)


FIXTURES_OF_SEQUENCES = [
    "llama_rope",
    "gemma2_odd",
    "gpt_oss_yarn",
    "gemma4_small",
    "qwen3_moe_mixed",
    "mistral_window",
]


@pytest.mark.slow(fast=("llama_rope",))
@pytest.mark.parametrize("fixture", FIXTURES_OF_SEQUENCES)
def test_logits_of_batched_pieces_equal_separate_sequences(package, fixture):
    sequences = random_texts(fixture)
    check_same(fixture, run_in_pieces(fixture, sequences, CUTS), sequences)


@pytest.mark.slow
def test_latent_layers_use_the_mla_kernel(package):
    sequences = random_texts("deepseek2_groups")
    check_same("deepseek2_groups", run_in_pieces("deepseek2_groups", sequences, CUTS, use_mla=True), sequences)


@pytest.mark.slow
def test_layers_that_share_a_cache_use_separate_pages(package):
    model, sequences = ed.abstract_hf(FIXTURES / "llama_rope"), random_texts("llama_rope")
    one = caches_for(model, False)[:1]
    found = run_in_pieces("llama_rope", sequences, CUTS, caches=one, places={"layer.0": 0, "layer.1": 0})
    check_same("llama_rope", found, sequences)


@pytest.mark.slow
def test_8_bit_caches_are_close_to_exact(package):
    model, sequences = ed.abstract_hf(FIXTURES / "llama_rope"), random_texts("llama_rope")
    caches = caches_for(model, False, jnp.float8_e4m3fn)
    found, exact = (
        np.concatenate(run_in_pieces("llama_rope", sequences, CUTS, caches=each)) for each in (caches, None)
    )
    assert 0 < np.abs(found - exact).mean() < 0.15 * np.abs(exact).mean()


@pytest.mark.slow
def test_random_weights_are_initialized_without_files(package):
    logits = run_in_pieces("llama_rope", random_texts("llama_rope"), CUTS, load_format="dummy")
    assert all(np.isfinite(each).all() for each in logits)


@pytest.mark.slow
@pytest.mark.parametrize("fixture", ["llama_rope", "qwen3_moe_mixed"])
def test_mesh_shards_tokens_and_heads(fixture):
    """In a separate process with four devices."""
    pytest.importorskip("flax")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    code = f"import tests.serving.test_vllm_tpu as t; t.on_four_devices({fixture!r})"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | flags, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def on_four_devices(fixture):
    sys.modules.update(stub_modules()[0])
    sequences = random_texts(fixture)
    mesh = one_mesh(2, 2)
    weights = loaded(vllm_config(fixture), mesh)[2]
    assert any(leaf.addressable_shards[0].data.size * 2 == leaf.size for leaf in weights)
    check_same(fixture, run_in_pieces(fixture, sequences, CUTS, mesh=mesh), sequences)


def test_registers_each_name_once_and_refuses_reserved_names(package):
    assert register() == (*ARCHITECTURES, NAME) == tuple(package)
    assert register("MistralForCausalLM", "MistralForCausalLM") == ("MistralForCausalLM", NAME)
    assert {*package.values()} == {adapter()}
    with refused(ed.ConfigError, repr(NOT_REPLACEABLE[0]), "--hf-overrides", NAME):
        register(NOT_REPLACEABLE[0])


REFUSED = {
    "states": ("qwen3_next", {}, ["layer 0"]),
    "pipeline": (
        "llama_rope",
        dict(parallel_config=types.SimpleNamespace(pipeline_parallel_size=2)),
        ["pipeline_parallel_size=2"],
    ),
    "qwix": ("llama_rope", dict(additional_config={"quantization": {"qwix": {}}}), ["Qwix", "skip_quantization"]),
    "adapters": ("llama_rope", dict(lora_config=types.SimpleNamespace()), ["enable_lora=True"]),
    "drafts": (
        "llama_rope",
        dict(speculative_config=types.SimpleNamespace(method="eagle3")),
        ["speculative_config.method='eagle3'", "ngram", "suffix"],
    ),
    "latents": ("deepseek2_groups", {}, ["model_config.use_mla=False", "VLLM_MLA_DISABLE"]),
    "no latents": ("llama_rope", dict(use_mla=True), ["model_config.use_mla=True"]),
    "chunks": ("llama4_mixed", {}, ["Chunked"]),
    "images": ("qwen2_5_vl", {}, ["qwen2_5_vl", "images"]),
}


@pytest.mark.slow(fast=("states", "pipeline", "qwix", "adapters", "drafts", "chunks"))
@pytest.mark.parametrize("case", REFUSED)
def test_refuses_unsupported_models_before_loading_weights(package, case):
    fixture, settings, names = REFUSED[case]
    with refused(ed.ConfigError, *names):
        adapter()(vllm_config(fixture, **settings), jax.random.key(0), one_mesh())


@pytest.mark.slow
def test_models_of_the_listed_architectures_run(package):
    listed = {*ARCHITECTURES, *NOT_REPLACEABLE} - {"Llama4ForCausalLM"}
    runs = {}
    for path in sorted(FIXTURES.glob("*/config.json")):
        content = json.loads(path.read_text())
        if content["architectures"][0] not in listed:
            continue
        engine = vllm_config(path.parent.name, use_mla="kv_lora_rank" in content)
        try:
            adapter()(engine, jax.random.key(0), one_mesh())
        except ed.ConfigError:
            engine = None
        runs.setdefault(content["architectures"][0], set()).add(engine is not None)
    assert {name for name, found in runs.items() if True in found} == listed


def test_unsupported_mesh_axes_are_refused():
    names = ("data", "attn_dp", "model")
    layout = engine_layout(Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1, 1), names))
    assert layout.sizes == {"data": 1, "tensor": 1}
    with refused(ed.ConfigError, "attn_dp=2"):
        engine_layout(Mesh(np.asarray([jax.devices()[0]] * 2).reshape(1, 2, 1), names))


def test_error_names_missing_packages(monkeypatch):
    adapter.cache_clear()
    monkeypatch.setitem(sys.modules, "flax", None)
    monkeypatch.setitem(sys.modules, "flax.nnx", None)
    with refused(MissingPackage, "vllm-tpu"):
        adapter()
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    with refused(MissingPackage, "'tpu_inference'", "'flax'"):
        register()
