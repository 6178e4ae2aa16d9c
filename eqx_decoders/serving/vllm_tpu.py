"""Decoders in vLLM on TPU, through its backend `tpu-inference`: vLLM schedules, samples and owns pages of caches.

vLLM runs what a package names under the entry point `vllm.general_plugins`, in every process. A package that is
installed beside `vllm`, `tpu-inference` and `eqx_decoders` says so in its `pyproject.toml`:

    [project.entry-points."vllm.general_plugins"]
    eqx_decoders = "eqx_decoders.serving.vllm_tpu:register"

Checkpoints whose architecture `register` has replaced then run here, and any other does by the name that is always
registered, also those that `tpu-inference` has models of its own for:

    vllm serve meta-llama/Llama-3.1-8B --hf-overrides '{"architectures": ["EqxDecodersForCausalLM"]}'

Layers with keys and values or with latents run, with windows, soft caps, sinks and borrowed keys; recurrent ones,
chunked masks and selected tokens are refused. Quantised checkpoints are expanded. Of the engine's mesh, `data` splits
tokens, `model` heads, MLPs and the vocabulary, and `expert` experts; of the others it must have one device each.
Written for `tpu-inference` 0.32.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array

from eqx_decoders.errors import ConfigError, MissingPackage, check
from eqx_decoders.io.huggingface.hub import resolve
from eqx_decoders.io.huggingface.load import load_hf, read_config
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.cache.engine_owned import ExternalCall
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.init import abstract, init
from eqx_decoders.numerics.matmul import Precision
from eqx_decoders.serving.external_engine import external_layers, external_logits, run_with_caches
from eqx_decoders.sharding.axes import axes, named_leaves
from eqx_decoders.sharding.layout import ACTIVATIONS, Layout


NAME = "EqxDecodersForCausalLM"

# What config.json may name, for models that have no other layers than those that run here.
ARCHITECTURES = (
    "DeepseekV2ForCausalLM",
    "GPT2LMHeadModel",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Olmo3ForCausalLM",
)

# For these tpu-inference takes its own models, or vLLM's, whatever is registered. All but Llama 4 run here, too.
TAKEN = (
    "DeepseekV3ForCausalLM",
    "Gemma4ForCausalLM",
    "GptOssForCausalLM",
    "Llama4ForCausalLM",
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)

_MESH_AXES = {"data": "data", "model": "tensor", "expert": "expert"}  # theirs, and ours
_DRAFTS = ("ngram", "suffix")  # that read tokens alone


def register(*architectures: str) -> tuple[str, ...]:
    """Tell tpu-inference and vLLM that checkpoints of these architectures run here. To be called in every process.

    **Arguments:**

    - `architectures`: names in `config.json`. Default: `ARCHITECTURES`.

    **Returns:**

    The names that are registered: these and `EqxDecodersForCausalLM`, which `--hf-overrides` may give any checkpoint.

    Raises ConfigError for names that tpu-inference would not ask for, MissingPackage where packages are missing.
    """
    for name in architectures:
        remedy = f'Leave it out, and give vLLM --hf-overrides {{"architectures": ["{NAME}"]}}'
        check(name not in TAKEN, f"register: {name!r} is a name that tpu-inference keeps for its own. {remedy}.")
    loader, model = _module("tpu_inference.models.common.model_loader"), adapter()
    names = tuple(dict.fromkeys((*(architectures or ARCHITECTURES), NAME)))
    for name in names:
        loader.register_model(name, model)
    return names


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        needed = "This needs vLLM for TPU, which brings the packages 'tpu_inference' and 'flax'"
        raise MissingPackage(f"{needed} ({error}): pip install vllm-tpu.") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CachePlan:
    """What a model of an engine is made of, and which of the engine's caches are its layers'.

    **Arguments:**

    - `source`, `revision`, `dtype`: of the checkpoint, as `load_hf` has them.
    - `mesh`: the engine's.
    - `layout`: the same devices.
    - `names`: what the engine calls the layers that have caches.
    - `latents`: of each the features of its latents and of their rotary part; None for keys and values.
    """

    source: str
    revision: str | None
    dtype: np.dtype
    mesh: Mesh
    layout: Layout
    names: tuple[str, ...]
    latents: tuple[tuple[int, int] | None, ...]

    @property
    def precision(self) -> Precision:
        return Precision(params=self.dtype, compute=self.dtype)

    def load(self) -> Decoder:
        return load_hf(self.source, self.dtype, self.layout, revision=self.revision).without_mtp()

    def draw(self, key: Array) -> Decoder:
        """The model with random weights."""
        config, _ = read_config(resolve(self.source, self.revision).path)
        return init(config, key=key, layout=self.layout, precision=self.precision).without_mtp()


def _plan(engine: Any, mesh: Mesh) -> _CachePlan:
    """What an engine's settings ask for. Raises ConfigError for what does not run here, before any weight is loaded."""
    _check_engine(engine)
    asked = engine.model_config
    source, revision, dtype = str(asked.model), getattr(asked, "revision", None), np.dtype(asked.dtype)
    config, _ = read_config(resolve(source, revision).path)
    model = abstract(config, precision=Precision(params=dtype, compute=dtype)).without_mtp()
    check(config.media is None, f"{source} has encoders of images or audio: in this engine models take text alone.")
    external_layers(model)
    places = [(index, name) for index, block in enumerate(config.blocks) for name in block.memory(1 << 30)]
    odd = sorted({name for _, name in places} - {"mixer"})
    check(not odd, f"{source} has caches beside those of mixers ({', '.join(odd)}): engines have one for each layer.")
    mixers = [config.blocks[index].mixer for index, _ in places]
    latents = tuple((m.kv_rank, m.rope_dim) if isinstance(m, LatentAttentionConfig) else None for m in mixers)
    use_mla = bool(getattr(asked, "use_mla", False))
    rule = (
        f"must be {not use_mla} for {source}: all its caches are for latents, or none is. Leave VLLM_MLA_DISABLE alone"
    )
    check(all((latent is not None) == use_mla for latent in latents), f"model_config.use_mla={use_mla} {rule}.")
    plan = _CachePlan(
        source=source,
        revision=revision,
        dtype=dtype,
        mesh=mesh,
        layout=_fitting(engine_layout(mesh), model),
        names=tuple(f"layer.{index}" for index, _ in places),
        latents=latents,
    )
    tokens = jax.ShapeDtypeStruct((8,), jnp.int32)
    eqx.filter_eval_shape(_run, model, plan, tokens, tokens, lambda place, query, *_: (place, query))
    return plan


def _check_engine(engine: Any) -> None:
    """Refuse what an engine can do with its own models, and not with these."""
    stages = getattr(getattr(engine, "parallel_config", None), "pipeline_parallel_size", 1)
    check(stages == 1, f"pipeline_parallel_size={stages} must be 1: these models run whole on one mesh.")
    check(getattr(engine, "lora_config", None) is None, "enable_lora=True: merge the adapter into the weights instead.")
    rules = (getattr(engine, "additional_config", None) or {}).get("quantization")
    remedy = """--additional-config '{"skip_quantization": true}'"""
    check(not rules, f"Qwix can't quantise these models, whose weights are arrays of the engine's dtype: {remedy}.")
    drafts = getattr(getattr(engine, "speculative_config", None), "method", None)
    rule = f"must be one of {', '.join(_DRAFTS)}: others read what layers have made of the tokens"
    check(drafts is None or drafts in _DRAFTS, f"speculative_config.method={drafts!r} {rule}.")


def engine_layout(mesh: Mesh) -> Layout:
    """The layout of an engine's mesh: the same devices in the same order, by our names of its axes.

    All tokens are one row, so that `data` splits the length. Raises ConfigError for axes that have no such name.
    """
    for name, size in mesh.shape.items():
        rule = f"must have one device: models split over {', '.join(_MESH_AXES)} alone"
        check(name in _MESH_AXES or size == 1, f"The mesh's axis {name}={size} {rule}.")
    kept = [str(name) for name in mesh.axis_names if name in _MESH_AXES]
    devices = mesh.devices.reshape([mesh.shape[name] for name in kept])
    kinds = (AxisType.Auto,) * len(kept)
    ours = Mesh(devices, tuple(_MESH_AXES[name] for name in kept), axis_types=kinds)
    return Layout(mesh=ours, activations=ACTIVATIONS | {"batch": (), "length": ("data",)})


def _fitting(layout: Layout, model: Decoder) -> Layout:
    """The layout without the rows of weights that its mesh does not divide, such as few heads of keys."""
    rows, uneven, words = dict(layout.weights), set(), axes(model)
    for name, leaf in named_leaves(eqx.filter(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))).items():
        for word, size in zip(words[name], leaf.shape, strict=True):
            parts = math.prod(layout.sizes.get(axis, 1) for axis in rows.get(word, ()))
            uneven |= {word} if size % parts else set()
    return dataclasses.replace(layout, weights={word: names for word, names in rows.items() if word not in uneven})


def _run(model: Decoder, plan: _CachePlan, tokens: Array, positions: Array, attention: Any) -> Array:
    """The stream after the last layer. Of caches only the numbers go round: `attention` has the engine's list."""
    _, hidden = run_with_caches(model, range(len(plan.names)), tokens, positions, None, attention)
    return hidden.astype(plan.dtype)


class _Caches:
    """An engine's caches during one call, of which layers may share one, and its attention over them."""

    def __init__(self, plan: _CachePlan, caches: list[Array], metadata: Any, places: Mapping[str, int]):
        self.plan, self.caches, self.metadata, self.places = plan, list(caches), metadata, places
        self.interface = _module("tpu_inference.layers.common.attention_interface")

    def attend(
        self,
        layer: int,
        query: Array,
        key: Array,
        value: Array | None,
        metadata: None,
        sinks: Array | None,
        call: ExternalCall,
    ) -> tuple[int, Array]:
        """Its attention in the cache of `layer`: for layers that borrow, the one that lends."""
        name = self.plan.names[layer]
        place = self.places.get(name, layer)
        known = self.metadata[name] if isinstance(self.metadata, Mapping) else self.metadata
        # Their kernels are mapped over their mesh, which names the same devices otherwise.
        with jax.sharding.use_abstract_mesh(self.plan.mesh.abstract_mesh):
            if self.plan.latents[layer] is None:
                result = self._attend(place, query, key, value, known, sinks, call)
            else:
                result = self._attend_latents(place, query, key, known, self.plan.latents[layer])
        self.caches[place], out = result
        return layer, out

    def _attend(self, place, query, key, value, metadata, sinks, call) -> tuple[Array, Array]:
        cache, options = self.caches[place], dict[str, Any](sm_scale=1.0, attention_chunk_size=call.window)
        value = key if value is None else value
        if cache.dtype.itemsize == 1:
            quantization = _module("tpu_inference.layers.common.quantization")
            key, value = quantization.quantize_kv(cache.dtype, key, value, 1.0, 1.0)
            options |= dict(k_scale=1.0, v_scale=1.0)
        if sinks is not None:
            options["sinks"] = sinks.astype(jnp.float32)
        if call.soft_cap is not None:
            options["attn_logits_soft_cap"] = call.soft_cap
        if not call.writes and query.shape[-1] != 64:  # the kernel for 64 features always writes: the same once more
            options["update_kv_cache"] = False
        return self.interface.attention(cache, query, key, value, metadata, self.plan.mesh, query.shape[-1], **options)

    def _attend_latents(self, place, query, key, metadata, sizes) -> tuple[Array, Array]:
        """Tokens are split among devices, heads are not: each token has one latent for all of them."""
        rank, rope = sizes
        cache, tokens = self.caches[place], _module("tpu_inference.layers.common.sharding").ShardingAxisName.ATTN_DATA
        rule = "must be 'auto' for latents: with a scale of 1 too little is left of them in 8 bits"
        check(cache.dtype.itemsize > 1, f"kv_cache_dtype={cache.dtype.name} {rule}.")
        new, out = self.interface.mla_attention(
            jnp.swapaxes(query[..., :rank], 0, 1),
            query[..., rank : rank + rope],
            key[:, 0, :rank],
            key[:, 0, rank : rank + rope],
            cache,
            metadata,
            self.plan.mesh,
            query.shape[1],
            rank,
            query_nth_sharding=PartitionSpec(None, tokens, None),
            query_tnh_sharding=PartitionSpec(tokens, None, None),
            keyvalue_skh_sharding=PartitionSpec(tokens, None),
            attn_o_nth_sharding=PartitionSpec(None, tokens, None),
            sm_scale=1.0,
        )
        unread = ((0, 0), (0, 0), (0, query.shape[-1] - rank))  # as wide as queries
        return new, jnp.pad(jnp.swapaxes(out, 0, 1), unread)


@functools.cache
def adapter() -> Any:
    """The class that `register` gives to tpu-inference: a decoder as a module of flax. Raises MissingPackage."""
    nnx = _module("flax.nnx")

    class EqxDecodersForCausalLM(nnx.Module):
        """`(vllm_config, rng_key, mesh)`, `load_weights`, calls over the tokens of many sequences, `compute_logits`."""

        _self_manages_sharding = True  # with load_format="dummy" the weights are there at once, each on its devices

        def __init__(self, vllm_config: Any, rng_key: Any, mesh: Mesh) -> None:
            self.plan = _plan(vllm_config, mesh)
            if getattr(getattr(vllm_config, "load_config", None), "load_format", None) == "dummy":
                self._hold(self.plan.draw(rng_key))

        def load_weights(self, rng_key: Any) -> None:
            self._hold(self.plan.load())

        def _hold(self, model: Decoder) -> None:
            """The arrays as parameters, by their paths, and how a model is made of them."""
            arrays, static = eqx.partition(model, eqx.is_array)
            leaves = named_leaves(arrays)
            self.order, self.form = tuple(leaves), _Form(jax.tree.structure(arrays), static)
            self.weights = nnx.Dict({name: nnx.Param(leaf) for name, leaf in leaves.items()})

        def _model(self) -> Decoder:
            return self.form.filled([self.weights[name][...] for name in self.order])

        def __call__(
            self,
            kv_caches: list[Array],
            input_ids: Array,
            attention_metadata: Any,
            inputs_embeds: Array | None = None,
            input_positions: Array | None = None,
            layer_name_to_kv_cache: Any = None,
            lora_metadata: Any = None,
            intermediate_tensors: Any = None,
            is_first_rank: bool | None = None,
            is_last_rank: bool | None = None,
            *_: Any,
        ) -> tuple[list[Array], Array, list[Array], None]:
            check(inputs_embeds is None, "Prompts of embeddings: these models take tokens alone.")
            metadata, several = attention_metadata, isinstance(attention_metadata, Mapping)
            positions = next(iter(metadata.values())).input_positions if several else metadata.input_positions
            caches = _Caches(self.plan, kv_caches, metadata, dict(layer_name_to_kv_cache or ()))
            with _on(self.plan.layout):
                hidden = _run(self._model(), self.plan, input_ids, positions, caches.attend)
            return caches.caches, hidden, [], None

        def compute_logits(self, hidden_states: Array) -> Array:
            with _on(self.plan.layout):
                return external_logits(self._model(), hidden_states).astype(hidden_states.dtype)

    return EqxDecodersForCausalLM


@dataclasses.dataclass(frozen=True, eq=False)
class _Form:
    """A model without its arrays: kept as one thing, for flax looks into trees for what may change."""

    structure: Any
    static: Any

    def filled(self, leaves: list[Array]) -> Decoder:
        return eqx.combine(jax.tree.unflatten(self.structure, leaves), self.static)


def _on(layout: Layout) -> Any:
    """Where our constraints and maps belong: the engine traces calls with its own mesh."""
    if layout.mesh is None:
        raise ConfigError("Layout.mesh=None: models of an engine are on its mesh.")
    return jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh)
