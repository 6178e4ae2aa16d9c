"""Blocks, settings and weights of routers and experts."""

from collections.abc import Collection, Iterable
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError, check
from eqx_decoders.families.common import DecoderSizes, NormPlaces
from eqx_decoders.families.setting_rows import Integer, Rule, Values, value_at
from eqx_decoders.families.weight_rows import Weight, gated_mlp, sharing
from eqx_decoders.layers.base import MixerConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.model.decoder_config import DecoderConfig


IGNORED_ROUTER_KEYS: dict[str, str] = dict.fromkeys(
    ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha", "seq_aux"),
    "it is only used to train routers",
)

# `paths` of `decoder_sizes` for families whose layers all have experts.
EXPERT_PATHS = {"intermediate_size": "experts.mlp_dim", "hidden_act": "experts.activation"}


def need_experts(config: DecoderConfig) -> DecoderConfig:
    """Return the configuration. Raises ConfigError if no layer has experts."""
    check(
        bool(sparse_layer_indices(config)),
        "DecoderConfig.blocks must have at least one layer with experts, but all layers are dense: use a model type "
        "without experts.",
    )
    return config


def sparse_decoder(
    shape: DecoderSizes,
    mixers: Iterable[MixerConfig],
    experts: ExpertsConfig,
    dense_layers: Collection[int],
    mlp: MLPConfig | None = None,
    norms: NormPlaces = "pre",
    **options: Any,
) -> DecoderConfig:
    """Return the configuration of a decoder with experts in all layers except `dense_layers`.

    Raises ConfigError if no layer has experts.

    **Arguments:**

    - `mixers`: the mixer of each layer.
    - `dense_layers`: indices of the layers with an MLP.
    - `mlp`: the MLP of dense layers; None: `shape.mlp()`.
    - `norms`: see `DecoderSizes.block`.
    - `options`: arguments of `DecoderSizes.decoder`.
    """
    blocks = [
        shape.block(mixer, mlp if layer in dense_layers else experts, norms=norms)
        for layer, mixer in zip(range(shape.num_layers), mixers, strict=True)
    ]
    return need_experts(shape.decoder(blocks, **options))


def sparse_layer_indices(config: DecoderConfig) -> list[int]:
    """Return the indices of the layers with experts."""
    return [layer for layer, block in enumerate(config.blocks) if isinstance(block.mlp, ExpertsConfig)]


def first_sparse_layer(config: DecoderConfig) -> int:
    """Return the index of the first layer with experts. Raises ConversionError if no layer has experts."""
    layers = sparse_layer_indices(config)
    if not layers:
        raise ConversionError(
            "DecoderConfig.blocks must have at least one layer with experts, which config.json of this model type "
            "describes: use a model type without experts."
        )
    return layers[0]


def mlp_like_experts(default: int) -> Rule:
    """Return a row that sets `intermediate_size` to the width of experts, for families without dense layers.

    `default`: transformers' default of `moe_intermediate_size`.
    """

    def read(fields: Fields, values: Values) -> None:
        fields.content["intermediate_size"] = fields.integer("moe_intermediate_size", default)

    return Rule("", read)


def router_weights(prefix: str, router: str, bias: str = "") -> tuple[Weight, ...]:
    """Return the rows of a router. `bias`: name of the tensor of the selection bias; empty: there is no bias."""
    kernel = Weight(f"{prefix}{router}.weight", "mlp.router.kernel", "experts embed -> embed experts")
    return (kernel, Weight(prefix + bias, "mlp.router.selection_bias", "experts -> experts")) if bias else (kernel,)


def separate_experts(
    prefix: str,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    router: str = "gate",
    bias: str = "",
    shared: str = "",
) -> tuple[Weight, ...]:
    """Return the rows of a router and of experts with separate tensors for each expert, stored as `[out, in]`.

    **Arguments:**

    - `prefix`: prefix of the tensors in a layer.
    - `gate`, `up`, `down`, `router`: names of modules.
    - `bias`: name of the tensor of the selection bias; empty: there is no bias.
    - `shared`: name of the module of the shared expert; empty: there is no shared expert.
    """
    expert = prefix + "experts.{expert}."
    return (
        *router_weights(prefix, router, bias),
        Weight(expert + f"{gate}.weight", "mlp.gate", "mlp embed -> embed mlp"),
        Weight(expert + f"{up}.weight", "mlp.up", "mlp embed -> embed mlp"),
        Weight(expert + f"{down}.weight", "mlp.down", "embed mlp -> mlp embed"),
        *(gated_mlp(f"{prefix}{shared}.", "mlp.shared.") if shared else ()),
    )


def fused_experts(
    prefix: str,
    router: str = "gate",
    gate_up: str = "experts mlp embed",
    down: str = "experts embed mlp",
    within: str | None = None,
    bias: str = "",
) -> tuple[Weight, ...]:
    """Return the rows of a router and of experts with a tensor `gate_up_proj` and a tensor `down_proj` per layer.

    **Arguments:**

    - `prefix`: prefix of the tensors in a layer.
    - `router`: name of the module of the router.
    - `gate_up`, `down`: axis names of the dimensions of the tensors. In `gate_up`, the axis `mlp` concatenates the
        gates and the up projections.
    - `within`: `"mlp"` if gates and up projections alternate instead; see `Part`.
    - `bias`: name of the tensor of the selection bias; empty: there is no bias.
    """
    pattern = f"{gate_up} -> experts embed mlp"
    axis = gate_up.split().index("mlp")
    return (
        *router_weights(prefix, router, bias),
        *sharing(prefix + "experts.gate_up_proj", ("mlp.gate", pattern), ("mlp.up", pattern), axis=axis, within=within),
        Weight(prefix + "experts.down_proj", "mlp.down", f"{down} -> experts mlp embed"),
    )


def expert_counts(
    count: str, per_token: str = "num_experts_per_tok", *, num: int, chosen: int, width: int | None = None
) -> tuple[Integer, ...]:
    """Return the rows of the number of experts, and of the number of experts per token.

    **Arguments:**

    - `count`, `per_token`: keys of the two numbers.
    - `num`, `chosen`: transformers' defaults of the two numbers.
    - `width`: default of `moe_intermediate_size`; adds the row of the value `expert_dim`. None: there is no such row.
    """
    rows = (
        Integer(count, "experts.num_experts", num),
        Integer(per_token, "experts.num_experts_per_token", chosen),
    )
    if width is None:
        return rows
    return (*rows, Integer("moe_intermediate_size", "experts.mlp_dim", width, name="expert_dim"))


_KINDS = ("dense", "sparse")


def dense_layers_setting(first: int, *, listed: bool = False) -> Rule:
    """Return the row of the value `dense_layers`: indices of the layers without experts.

    **Arguments:**

    - `first`: transformers' default of `first_k_dense_replace`, the number of dense layers at the start.
    - `listed`: whether `mlp_layer_types`, a list with the type of each layer, overrides `first_k_dense_replace`.
    """

    def read(fields: Fields, values: Values) -> frozenset[int]:
        num_layers = values["shape"].num_layers
        num_dense = fields.integer("first_k_dense_replace", first, least=0)
        kinds = fields.words("mlp_layer_types", _KINDS, num_layers) if listed else None
        if kinds is None:
            return frozenset(range(min(num_dense, num_layers)))
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")

    def write(config: DecoderConfig) -> dict[str, Any]:
        if not listed:
            return {"first_k_dense_replace": first_sparse_layer(config)}
        sparse = sparse_layer_indices(config)
        return {"mlp_layer_types": [_KINDS[layer in sparse] for layer in range(len(config.blocks))]}

    return Rule("dense_layers", read, write)


def num_shared(key: str, default: int, *, least: int = 1, twin: str = "") -> Integer:
    """Return the row of the value `num_shared`: number of shared experts, which are built as one wide MLP.

    `default`: transformers' default. `least`: the minimum. `twin`: see `Key`.
    """

    def count(config: DecoderConfig) -> int:
        experts = value_at(config, "experts")
        return 0 if experts.shared is None else max(1, experts.shared.mlp_dim // experts.mlp_dim)

    return Integer(key, count, default, least=least, name="num_shared", twin=twin)


def num_dense_layers(key: str, default: int) -> Integer:
    """Return the row of the value `num_dense_layers`: number of layers before the first layer with experts."""
    return Integer(key, first_sparse_layer, default, least=0, name="num_dense_layers")


def experts_with_shared(shape: DecoderSizes, *, expert_dim: int, num_shared: int, **options: Any) -> ExpertsConfig:
    """Return the configuration of experts with `num_shared` shared experts, which are built as one wide MLP.

    `expert_dim`: MLP width of an expert. `options`: see `DecoderSizes.experts`.
    """
    return shape.experts(mlp_dim=expert_dim, shared_dim=expert_dim * num_shared or None, **options)


def sparse_steps() -> Rule:
    """Return the row of the value `dense_layers`: indices of the layers without experts.

    Every `decoder_sparse_step`-th layer has experts, except the layers in `mlp_only_layers`.
    """

    def read(fields: Fields, values: Values) -> frozenset[int]:
        step = fields.integer("decoder_sparse_step", 1)
        dense = fields.integers("mlp_only_layers")
        return frozenset(layer for layer in range(values["shape"].num_layers) if layer in dense or (layer + 1) % step)

    def write(config: DecoderConfig) -> dict[str, Any]:
        sparse = sparse_layer_indices(config)
        dense = [layer for layer in range(len(config.blocks)) if layer not in sparse]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}

    return Rule("dense_layers", read, write)
