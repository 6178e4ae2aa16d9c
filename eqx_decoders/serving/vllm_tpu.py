"""vLLM plugin for TPUs (backend `tpu-inference` 0.32): vLLM schedules, samples and owns the paged cache.

vLLM calls the functions that packages register as the entry point `vllm.general_plugins`, in every process. Install
`vllm`, `tpu-inference`, `eqx_decoders`, and a package with these lines in its `pyproject.toml`:

    [project.entry-points."vllm.general_plugins"]
    eqx_decoders = "eqx_decoders.serving.vllm_tpu:register"

Checkpoints of the architectures in `ARCHITECTURES` then run with the decoders of this library. For any other
checkpoint, override the architecture:

    vllm serve meta-llama/Llama-3.1-8B --hf-overrides '{"architectures": ["EqxDecodersForCausalLM"]}'

Supported: attention with keys and values or with latents (MLA), windows, soft caps, sinks, and shared keys. Not
supported: recurrent layers, chunked masks and sparse attention. Quantized checkpoints are dequantized. The mesh axis
`data` of the engine splits tokens, `model` splits heads, MLPs and the vocabulary, and `expert` splits experts. Other
axes must have size 1.
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

# Architectures in config.json that are registered by default: all of their layers are supported.
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

# Architectures for which tpu-inference ignores registered models. All except Llama 4 run with NAME.
NOT_REPLACEABLE = (
    "DeepseekV3ForCausalLM",
    "Gemma4ForCausalLM",
    "GptOssForCausalLM",
    "Llama4ForCausalLM",
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)

_MESH_AXES = {"data": "data", "model": "tensor", "expert": "expert"}  # axis of the engine -> axis of `Layout`
_DRAFTERS = ("ngram", "suffix")  # methods of speculative decoding that read only tokens


def register(*architectures: str) -> tuple[str, ...]:
    """Register architectures with tpu-inference and vLLM. Must be called in every process.

    **Arguments:**

    - `architectures`: names in `config.json`. Default: `ARCHITECTURES`.

    **Returns:**

    The registered names: `architectures` and `EqxDecodersForCausalLM`.

    Raises ConfigError for architectures that tpu-inference does not let plugins replace, MissingPackage for missing
    packages.
    """
    for name in architectures:
        check(
            name not in NOT_REPLACEABLE,
            f"register: tpu-inference does not let plugins replace the architecture {name!r}. Leave it out, and run "
            f'vLLM with --hf-overrides {{"architectures": ["{NAME}"]}}.',
        )
    registry, model = _module("tpu_inference.models.common.model_loader"), adapter()
    names = tuple(dict.fromkeys((*(architectures or ARCHITECTURES), NAME)))
    for name in names:
        registry.register_model(name, model)
    return names


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackage(
            f"eqx_decoders.serving.vllm_tpu needs vLLM for TPU with the packages 'tpu_inference' and 'flax' ({error}): "
            f"pip install vllm-tpu."
        ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ModelPlan:
    """Checkpoint, layout and caches of a model in vLLM.

    **Arguments:**

    - `source`, `revision`, `dtype`: arguments of `load_hf`.
    - `mesh`: the engine's mesh.
    - `layout`: layout with the same devices.
    - `names`: the engine's names of the layers with caches.
    - `latents`: for each of these layers, sizes of the latent and of its rotary part. None: keys and values.
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
        """Return the model with random weights."""
        config, _ = read_config(resolve(self.source, self.revision).path)
        return init(config, key=key, layout=self.layout, precision=self.precision).without_mtp()


def _plan(engine: Any, mesh: Mesh) -> _ModelPlan:
    """Plan the model from vLLM's settings. Raises ConfigError for unsupported settings, before weights are loaded."""
    _check_engine(engine)
    settings = engine.model_config
    source, revision, dtype = str(settings.model), getattr(settings, "revision", None), np.dtype(settings.dtype)
    config, _ = read_config(resolve(source, revision).path)
    model = abstract(config, precision=Precision(params=dtype, compute=dtype)).without_mtp()
    check(
        config.media is None,
        f"{source} has encoders of images or audio, but the vLLM plugin supports text-only models.",
    )
    external_layers(model)
    layers = [(index, name) for index, block in enumerate(config.blocks) for name in block.cache_shape(1 << 30)]
    unsupported = sorted({name for _, name in layers} - {"mixer"})
    check(
        not unsupported,
        f"{source} has caches besides those of its attention layers ({', '.join(unsupported)}), but vLLM has one cache "
        f"per layer.",
    )
    mixers = [config.blocks[index].mixer for index, _ in layers]
    latents = tuple(
        (mixer.kv_rank, mixer.rope_dim) if isinstance(mixer, LatentAttentionConfig) else None for mixer in mixers
    )
    use_mla = bool(getattr(settings, "use_mla", False))
    check(
        all((latent is not None) == use_mla for latent in latents),
        f"model_config.use_mla={use_mla} must be {not use_mla} for {source}, because all layers must cache latents, or "
        f"all layers keys and values. Do not set VLLM_MLA_DISABLE.",
    )
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
    """Raise ConfigError for vLLM settings that are not supported."""
    stages = getattr(getattr(engine, "parallel_config", None), "pipeline_parallel_size", 1)
    check(stages == 1, f"pipeline_parallel_size={stages} must be 1: pipeline parallelism is not supported.")
    check(
        getattr(engine, "lora_config", None) is None,
        "enable_lora=True is not supported: merge the adapter into the weights instead.",
    )
    quantization = (getattr(engine, "additional_config", None) or {}).get("quantization")
    check(
        not quantization,
        f"additional_config.quantization={quantization!r}: Qwix cannot quantize the models of this library. Pass "
        """--additional-config '{"skip_quantization": true}'.""",
    )
    method = getattr(getattr(engine, "speculative_config", None), "method", None)
    check(
        method is None or method in _DRAFTERS,
        f"speculative_config.method={method!r} must be one of {', '.join(_DRAFTERS)}: other methods read hidden "
        f"states, "
        f"which are not available.",
    )


def engine_layout(mesh: Mesh) -> Layout:
    """Return the layout for a mesh of vLLM: the same devices in the same order, with the axis names of `Layout`.

    All tokens are in one row, so `data` splits the length. Raises ConfigError for unsupported axes of size > 1.
    """
    for name, size in mesh.shape.items():
        check(
            name in _MESH_AXES or size == 1,
            f"the mesh axis {name}={size} must have size 1: only the axes {', '.join(_MESH_AXES)} can be larger.",
        )
    named = [str(name) for name in mesh.axis_names if name in _MESH_AXES]
    devices = mesh.devices.reshape([mesh.shape[name] for name in named])
    axis_types = (AxisType.Auto,) * len(named)
    our_mesh = Mesh(devices, tuple(_MESH_AXES[name] for name in named), axis_types=axis_types)
    return Layout(mesh=our_mesh, activations=ACTIVATIONS | {"batch": (), "length": ("data",)})


def _divisible_layout(layout: Layout, model: Decoder) -> Layout:
    """Return the layout without sharding of weight axes that the mesh does not divide, such as few KV heads."""
    rules = dict(layout.weights)
    not_divisible = set()
    axis_names = axes(model)
    for name, leaf in named_leaves(eqx.filter(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))).items():
        for axis_name, size in zip(axis_names[name], leaf.shape, strict=True):
            degree = math.prod(layout.sizes.get(axis, 1) for axis in rules.get(axis_name, ()))
            if size % degree:
                not_divisible.add(axis_name)
    divisible = {axis_name: mesh_axes for axis_name, mesh_axes in rules.items() if axis_name not in not_divisible}
    return dataclasses.replace(layout, weights=divisible)


def _run(model: Decoder, plan: _ModelPlan, tokens: Array, positions: Array, attention: Any) -> Array:
    """Run all layers. `attention` gets the index of a layer's cache and has access to the engine's caches."""
    _, hidden = run_with_caches(model, range(len(plan.names)), tokens, positions, None, attention)
    return hidden.astype(plan.dtype)


class _Caches:
    """The engine's caches during one call, and its attention. Layers can share a cache."""

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
        """Run the engine's attention on the cache of `layer`. Layers that share keys pass the layer that owns them."""
        name = self.plan.names[layer]
        cache_index = self.cache_indices.get(name, layer)
        layer_metadata = self.metadata[name] if isinstance(self.metadata, Mapping) else self.metadata
        # the engine's kernels use shard_map over the engine's mesh, whose axes have other names
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
        if not call.writes and query.shape[-1] != 64:  # the kernel for 64 features has no such option; it rewrites
            options["update_kv_cache"] = False
        return self.interface.attention(cache, query, key, value, metadata, self.plan.mesh, query.shape[-1], **options)

    def _attend_mla(self, cache_index, query, key, metadata, sizes) -> tuple[Array, Array]:
        """Run attention over latents. Tokens are sharded; heads are not, because they share one latent per token."""
        rank, rope = sizes
        cache = self.caches[cache_index]
        tokens = _module("tpu_inference.layers.common.sharding").ShardingAxisName.ATTN_DATA
        check(
            cache.dtype.itemsize > 1,
            f"kv_cache_dtype={cache.dtype.name} must be 'auto' for latents: 8-bit latents with the fixed scale 1 "
            f"lose too "
            f"much precision.",
        )
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
        padding = ((0, 0), (0, 0), (0, query.shape[-1] - rank))  # callers expect as many features as queries have
        return new, jnp.pad(jnp.swapaxes(out, 0, 1), padding)


@functools.cache
def adapter() -> Any:
    """Return the model class for tpu-inference, a flax module. Raises MissingPackage."""
    nnx = _module("flax.nnx")

    class EqxDecodersForCausalLM(nnx.Module):
        """Decoder with the interface of tpu-inference: `load_weights`, `__call__`, `compute_logits`."""

        _self_manages_sharding = True  # with load_format="dummy", __init__ creates sharded weights

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
            check(inputs_embeds is None, "prompts of embeddings are not supported: send token ids.")
            by_layer = isinstance(attention_metadata, Mapping)
            metadata = next(iter(attention_metadata.values())) if by_layer else attention_metadata
            positions = metadata.input_positions
            caches = _Caches(self.plan, kv_caches, attention_metadata, dict(layer_name_to_kv_cache or ()))
            with _mesh_context(self.plan.layout):
                hidden = _run(self._model(), self.plan, input_ids, positions, caches.attend)
            return caches.caches, hidden, [], None

        def compute_logits(self, hidden_states: Array) -> Array:
            with _mesh_context(self.plan.layout):
                return external_logits(self._model(), hidden_states).astype(hidden_states.dtype)

    return EqxDecodersForCausalLM


@dataclasses.dataclass(frozen=True, eq=False)
class _StaticModel:
    """Model without its arrays. The class hides the model from flax, which would search it for parameters."""

    structure: Any
    static: Any

    def with_arrays(self, leaves: list[Array]) -> Decoder:
        return eqx.combine(jax.tree.unflatten(self.structure, leaves), self.static)


def _mesh_context(layout: Layout) -> Any:
    """Use the mesh of `layout` for sharding constraints, because the engine traces calls with its own mesh."""
    if layout.mesh is None:
        raise ConfigError("Layout.mesh=None: create the layout with engine_layout.")
    return jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh)
