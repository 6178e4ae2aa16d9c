"""Decoders in vLLM on TPU, through its backend `tpu-inference`: vLLM schedules, samples and owns pages of caches.

vLLM runs what a package names under the entry point `vllm.general_plugins`, in every process. A package that is
installed with `vllm`, `tpu-inference` and `eqx_decoders` says so in its `pyproject.toml`:

    [project.entry-points."vllm.general_plugins"]
    eqx_decoders = "eqx_decoders.serving.vllm_tpu:register"

Checkpoints of the architectures that `register` has replaced then run here. Any other checkpoint does under the name
that is always registered, also where `tpu-inference` has its own model:

    vllm serve meta-llama/Llama-3.1-8B --hf-overrides '{"architectures": ["EqxDecodersForCausalLM"]}'

Attention with keys and values or with latents runs, with windows, soft caps, sinks and shared keys; recurrent layers,
chunked masks and sparse attention are refused. Quantized checkpoints are expanded. The engine's mesh axis `data` splits
tokens, `model` splits heads, MLPs and the vocabulary, `expert` splits experts; other axes must have one device.
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
from eqx_decoders.numerics.precision import Precision
from eqx_decoders.serving.external_engine import external_layers, external_logits, run_with_caches
from eqx_decoders.sharding.axes import axes, named_leaves
from eqx_decoders.sharding.layout import ACTIVATIONS, Layout


NAME = "EqxDecodersForCausalLM"

# Architectures in config.json that have no layers but those that run here.
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

# Architectures for which tpu-inference always uses its own models or vLLM's. All but Llama 4 run here, too.
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

_MESH_AXES = {"data": "data", "model": "tensor", "expert": "expert"}  # the engine's axes, and ours
_DRAFTS = ("ngram", "suffix")  # speculative methods that read only tokens


def register(*architectures: str) -> tuple[str, ...]:
    """Register these architectures with tpu-inference and vLLM. Must be called in every process.

    **Arguments:**

    - `architectures`: names in `config.json`. Default: `ARCHITECTURES`.

    **Returns:**

    The registered names: these and `EqxDecodersForCausalLM`, which `--hf-overrides` may give any checkpoint.

    Raises ConfigError for names that tpu-inference would not use, MissingPackage where packages are missing.
    """
    for name in architectures:
        remedy = f'Leave it out, and give vLLM --hf-overrides {{"architectures": ["{NAME}"]}}'
        check(name not in TAKEN, f"register: {name!r} is a name that tpu-inference keeps for its own. {remedy}.")
    registry, model = _module("tpu_inference.models.common.model_loader"), adapter()
    names = tuple(dict.fromkeys((*(architectures or ARCHITECTURES), NAME)))
    for name in names:
        registry.register_model(name, model)
    return names


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        needed = "This needs vLLM for TPU, which brings the packages 'tpu_inference' and 'flax'"
        raise MissingPackage(f"{needed} ({error}): pip install vllm-tpu.") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ModelPlan:
    """Checkpoint, layout and caches of an engine's model.

    **Arguments:**

    - `source`, `revision`, `dtype`: arguments of `load_hf`.
    - `mesh`: the engine's mesh.
    - `layout`: our layout of the same devices.
    - `names`: the engine's names of the layers with caches.
    - `latents`: by layer the sizes of its latents and of their rotary part; None for keys and values.
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

    def init_random(self, key: Array) -> Decoder:
        """Create the model with random weights."""
        config, _ = read_config(resolve(self.source, self.revision).path)
        return init(config, key=key, layout=self.layout, precision=self.precision).without_mtp()


def _plan(engine: Any, mesh: Mesh) -> _ModelPlan:
    """Read an engine's settings. Raises ConfigError for what does not run here, before any weight is loaded."""
    _check_engine(engine)
    settings = engine.model_config
    source, revision, dtype = str(settings.model), getattr(settings, "revision", None), np.dtype(settings.dtype)
    config, _ = read_config(resolve(source, revision).path)
    model = abstract(config, precision=Precision(params=dtype, compute=dtype)).without_mtp()
    check(config.media is None, f"{source} has encoders of images or audio: in this engine models take text alone.")
    external_layers(model)
    layers = [(index, name) for index, block in enumerate(config.blocks) for name in block.cache_shape(1 << 30)]
    unsupported = sorted({name for _, name in layers} - {"mixer"})
    check(
        not unsupported,
        f"{source} has caches beside those of mixers ({', '.join(unsupported)}): engines have one for each layer.",
    )
    mixers = [config.blocks[index].mixer for index, _ in layers]
    latents = tuple((m.kv_rank, m.rope_dim) if isinstance(m, LatentAttentionConfig) else None for m in mixers)
    use_mla = bool(getattr(settings, "use_mla", False))
    rule = (
        f"must be {not use_mla} for {source}: all its caches are for latents, or none is. Leave VLLM_MLA_DISABLE alone"
    )
    check(all((latent is not None) == use_mla for latent in latents), f"model_config.use_mla={use_mla} {rule}.")
    plan = _ModelPlan(
        source=source,
        revision=revision,
        dtype=dtype,
        mesh=mesh,
        layout=_divisible_layout(engine_layout(mesh), model),
        names=tuple(f"layer.{index}" for index, _ in layers),
        latents=latents,
    )
    tokens = jax.ShapeDtypeStruct((8,), jnp.int32)
    eqx.filter_eval_shape(_run, model, plan, tokens, tokens, lambda layer, query, *_: (layer, query))
    return plan


def _check_engine(engine: Any) -> None:
    """Raise ConfigError for engine options that these models do not support."""
    stages = getattr(getattr(engine, "parallel_config", None), "pipeline_parallel_size", 1)
    check(stages == 1, f"pipeline_parallel_size={stages} must be 1: these models run whole on one mesh.")
    check(getattr(engine, "lora_config", None) is None, "enable_lora=True: merge the adapter into the weights instead.")
    rules = (getattr(engine, "additional_config", None) or {}).get("quantization")
    remedy = """--additional-config '{"skip_quantization": true}'"""
    check(not rules, f"Qwix can't quantize these models, whose weights are arrays of the engine's dtype: {remedy}.")
    drafts = getattr(getattr(engine, "speculative_config", None), "method", None)
    rule = f"must be one of {', '.join(_DRAFTS)}: others read what layers have made of the tokens"
    check(drafts is None or drafts in _DRAFTS, f"speculative_config.method={drafts!r} {rule}.")


def engine_layout(mesh: Mesh) -> Layout:
    """Return the layout of an engine's mesh: the same devices in the same order, by our names of its axes.

    All tokens are one row, so that `data` splits the length. Raises ConfigError for axes without such a name.
    """
    for name, size in mesh.shape.items():
        rule = f"must have one device: models split over {', '.join(_MESH_AXES)} alone"
        check(name in _MESH_AXES or size == 1, f"The mesh's axis {name}={size} {rule}.")
    named = [str(name) for name in mesh.axis_names if name in _MESH_AXES]
    devices = mesh.devices.reshape([mesh.shape[name] for name in named])
    axis_types = (AxisType.Auto,) * len(named)
    our_mesh = Mesh(devices, tuple(_MESH_AXES[name] for name in named), axis_types=axis_types)
    return Layout(mesh=our_mesh, activations=ACTIVATIONS | {"batch": (), "length": ("data",)})


def _divisible_layout(layout: Layout, model: Decoder) -> Layout:
    """Return the layout without rules for axes of weights that its mesh does not divide, such as few KV heads."""
    rules, uneven, axis_names = dict(layout.weights), set(), axes(model)
    for name, leaf in named_leaves(eqx.filter(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))).items():
        for word, size in zip(axis_names[name], leaf.shape, strict=True):
            parts = math.prod(layout.sizes.get(axis, 1) for axis in rules.get(word, ()))
            uneven |= {word} if size % parts else set()
    return dataclasses.replace(layout, weights={word: names for word, names in rules.items() if word not in uneven})


def _run(model: Decoder, plan: _ModelPlan, tokens: Array, positions: Array, attention: Any) -> Array:
    """Run all layers. Caches are passed as numbers: `attention` has the engine's list."""
    _, hidden = run_with_caches(model, range(len(plan.names)), tokens, positions, None, attention)
    return hidden.astype(plan.dtype)


class _Caches:
    """The engine's caches during one call, which layers may share, and its attention over them."""

    def __init__(self, plan: _ModelPlan, caches: list[Array], metadata: Any, cache_indices: Mapping[str, int]):
        self.plan, self.caches, self.metadata, self.cache_indices = plan, list(caches), metadata, cache_indices
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
        """Run the engine's attention on the cache of `layer`; layers that share keys pass the layer that owns them."""
        name = self.plan.names[layer]
        cache_index = self.cache_indices.get(name, layer)
        layer_metadata = self.metadata[name] if isinstance(self.metadata, Mapping) else self.metadata
        # Their kernels are mapped over their mesh, which names the same devices otherwise.
        with jax.sharding.use_abstract_mesh(self.plan.mesh.abstract_mesh):
            if self.plan.latents[layer] is None:
                result = self._attend(cache_index, query, key, value, layer_metadata, sinks, call)
            else:
                result = self._attend_mla(cache_index, query, key, layer_metadata, self.plan.latents[layer])
        self.caches[cache_index], out = result
        return layer, out

    def _attend(self, cache_index, query, key, value, metadata, sinks, call) -> tuple[Array, Array]:
        cache, options = self.caches[cache_index], dict[str, Any](sm_scale=1.0, attention_chunk_size=call.window)
        value = key if value is None else value
        if cache.dtype.itemsize == 1:
            quantization = _module("tpu_inference.layers.common.quantization")
            key, value = quantization.quantize_kv(cache.dtype, key, value, 1.0, 1.0)
            options |= dict(k_scale=1.0, v_scale=1.0)
        if sinks is not None:
            options["sinks"] = sinks.astype(jnp.float32)
        if call.soft_cap is not None:
            options["attn_logits_soft_cap"] = call.soft_cap
        if (
            not call.writes and query.shape[-1] != 64
        ):  # the kernel for 64 features always writes, here the same values again
            options["update_kv_cache"] = False
        return self.interface.attention(cache, query, key, value, metadata, self.plan.mesh, query.shape[-1], **options)

    def _attend_mla(self, cache_index, query, key, metadata, sizes) -> tuple[Array, Array]:
        """Run attention over latents. Tokens are split among devices, heads are not: each token has one latent for all
        heads.
        """
        rank, rope = sizes
        cache, tokens = (
            self.caches[cache_index],
            _module("tpu_inference.layers.common.sharding").ShardingAxisName.ATTN_DATA,
        )
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
    """Return the class that `register` gives to tpu-inference: a decoder as a flax module. Raises MissingPackage."""
    nnx = _module("flax.nnx")

    class EqxDecodersForCausalLM(nnx.Module):
        """Decoder with tpu-inference's interface: `load_weights`, `__call__` over many sequences, `compute_logits`."""

        _self_manages_sharding = True  # with load_format="dummy" the weights are there at once, each on its devices

        def __init__(self, vllm_config: Any, rng_key: Any, mesh: Mesh) -> None:
            self.plan = _plan(vllm_config, mesh)
            if getattr(getattr(vllm_config, "load_config", None), "load_format", None) == "dummy":
                self._set_model(self.plan.init_random(rng_key))

        def load_weights(self, rng_key: Any) -> None:
            self._set_model(self.plan.load())

        def _set_model(self, model: Decoder) -> None:
            """Store the arrays as parameters by path, and the static part of the model."""
            arrays, static = eqx.partition(model, eqx.is_array)
            leaves = named_leaves(arrays)
            self.order, self.static_model = tuple(leaves), _StaticModel(jax.tree.structure(arrays), static)
            self.weights = nnx.Dict({name: nnx.Param(leaf) for name, leaf in leaves.items()})

        def _model(self) -> Decoder:
            return self.static_model.with_arrays([self.weights[name][...] for name in self.order])

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
            with _mesh_context(self.plan.layout):
                hidden = _run(self._model(), self.plan, input_ids, positions, caches.attend)
            return caches.caches, hidden, [], None

        def compute_logits(self, hidden_states: Array) -> Array:
            with _mesh_context(self.plan.layout):
                return external_logits(self._model(), hidden_states).astype(hidden_states.dtype)

    return EqxDecodersForCausalLM


@dataclasses.dataclass(frozen=True, eq=False)
class _StaticModel:
    """Model without its arrays, hidden from flax, which searches trees for parameters."""

    structure: Any
    static: Any

    def with_arrays(self, leaves: list[Array]) -> Decoder:
        return eqx.combine(jax.tree.unflatten(self.structure, leaves), self.static)


def _mesh_context(layout: Layout) -> Any:
    """Enter our mesh for sharding constraints: the engine traces calls with its own mesh."""
    if layout.mesh is None:
        raise ConfigError("Layout.mesh=None: models of an engine are on its mesh.")
    return jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh)
