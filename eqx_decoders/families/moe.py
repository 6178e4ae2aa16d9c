"""Blocks, settings and tensors of routers and experts."""

from collections.abc import Collection, Iterable
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import check
from eqx_decoders.families.common import DecoderSizes, NormPlaces
from eqx_decoders.families.settings_table import Integer, Rule, Setting, Values, value_at
from eqx_decoders.families.weight_rows import Weight, gated_mlp, sharing
from eqx_decoders.layers.base import MixerConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.model.decoder_config import DecoderConfig


IGNORED_ROUTER_KEYS: dict[str, str] = dict.fromkeys(
    ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha", "seq_aux"),
    "routers are trained with it; it changes no output",
)


EXPERT_PATHS = {"intermediate_size": "experts.mlp_dim", "hidden_act": "experts.activation"}


def need_experts(config: DecoderConfig) -> DecoderConfig:
    """Return the configuration; raise ConfigError where no layer has experts."""
    check(
        bool(sparse_layers(config)),
        "DecoderConfig.blocks must have at least one layer with experts, but all layers are dense.",
    )
    return config


def sparse_decoder(
    shape: DecoderSizes, mixers: Iterable[MixerConfig], experts: ExpertsConfig, dense_layers: Collection[int],
    mlp: MLPConfig | None = None, norms: NormPlaces = "pre", **options: Any,
) -> DecoderConfig:  # fmt: skip
    """Return a decoder with experts in all layers but the `dense_layers`, counted from 0, which have `mlp`.

    That is `shape.mlp()` where it is None; the options are those of `shape.decoder`. Raises ConfigError where no layer
    has experts.
    """
    mlps = (mlp if index in dense_layers else experts for index in range(shape.num_layers))
    blocks = (shape.block(mixer, each, norms=norms) for mixer, each in zip(mixers, mlps, strict=True))
    return need_experts(shape.decoder(blocks, **options))


def sparse_layers(config: DecoderConfig) -> list[int]:
    """Return the layers that have experts, counted from 0."""
    return [index for index, block in enumerate(config.blocks) if isinstance(block.mlp, ExpertsConfig)]


def mlp_like_experts(default: int) -> Rule:
    """Return the row that takes the width of experts as that of an MLP, where no layer has one."""

    def read(fields: Fields, values: Values) -> None:
        fields.content["intermediate_size"] = fields.integer("moe_intermediate_size", default)

    return Rule("", read)


def router_weights(prefix: str, router: str, bias: str = "") -> tuple[Weight, ...]:
    """Return the rows of a router, and of its selection bias unless that has no name."""
    kernel = Weight(f"{prefix}{router}.weight", "mlp.router.kernel", "experts embed -> embed experts")
    return (kernel, Weight(prefix + bias, "mlp.router.selection_bias", "experts -> experts")) if bias else (kernel,)


def separate_experts(
    prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj", router: str = "gate",
    bias: str = "", shared: str = "",
) -> tuple[Weight, ...]:  # fmt: skip
    """Return the rows of a router, and of experts that are stored one by one as matrices `[out, in]`.

    `bias` is the name of the selection bias, and `shared` that of the shared MLP; empty for none.
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
    """Return the rows of a router, and of experts that share tensors with these dimensions.

    Gates and up projections are halves of `mlp` or, with `within="mlp"`, alternate. `bias` is the name of the
    selection bias; empty for none.
    """
    pattern, axis = f"{gate_up} -> experts embed mlp", gate_up.split().index("mlp")
    return (
        *router_weights(prefix, router, bias),
        *sharing(prefix + "experts.gate_up_proj", ("mlp.gate", pattern), ("mlp.up", pattern), axis=axis, within=within),
        Weight(prefix + "experts.down_proj", "mlp.down", f"{down} -> experts mlp embed"),
    )


def expert_counts(
    count: str, per_token: str = "num_experts_per_tok", *, num: int, chosen: int, width: int | None = None
) -> tuple[Setting, ...]:
    """Return the rows of the number of experts, under the key `count`, and of how many a token uses; with defaults.

    With a `width`, that of `moe_intermediate_size`, also the row of their width, `expert_dim`.
    """
    rows = (
        Integer(count, "experts.num_experts", num),
        Integer(per_token, "experts.num_experts_per_token", chosen),
    )
    size = Integer("moe_intermediate_size", "experts.mlp_dim", width, name="expert_dim")
    return rows if width is None else (*rows, size)


_KINDS = ("dense", "sparse")


def dense_layers(first: int, *, listed: bool = False) -> Rule:
    """Return the row of the layers without experts: the first `first_k_dense_replace`, by default `first`.

    Where they may be `listed`, `mlp_layer_types` says it of each layer.
    """

    def read(fields: Fields, values: Values) -> frozenset[int]:
        layers, count = values["shape"].num_layers, fields.integer("first_k_dense_replace", first, least=0)
        kinds = fields.words("mlp_layer_types", _KINDS, layers) if listed else None
        return frozenset(i for i in range(layers) if (i < count if kinds is None else kinds[i] == "dense"))

    def write(config: DecoderConfig) -> dict[str, Any]:
        sparse = sparse_layers(config)
        if not listed:
            return {"first_k_dense_replace": sparse[0]}
        return {"mlp_layer_types": [_KINDS[index in sparse] for index in range(len(config.blocks))]}

    return Rule("dense_layers", read, write)


def num_shared(key: str, default: int, *, least: int = 1, twin: str = "") -> Integer:
    """Return the row of the number of shared experts, one MLP that is so many times as wide as an expert."""

    def count(config: DecoderConfig) -> int:
        experts = value_at(config, "experts")
        return 0 if experts.shared is None else max(1, experts.shared.mlp_dim // experts.mlp_dim)

    return Integer(key, count, default, least=least, name="num_shared", twin=twin)


def num_dense_layers(key: str, default: int) -> Integer:
    """Return the row of the number of layers before the first one that has experts."""
    return Integer(key, lambda config: sparse_layers(config)[0], default, least=0, name="num_dense_layers")


def with_shared(shape: DecoderSizes, *, expert_dim: int, num_shared: int, **options: Any) -> ExpertsConfig:
    """Return experts of `expert_dim`, and a shared MLP as wide as `num_shared` of them; none for 0."""
    return shape.experts(mlp_dim=expert_dim, shared_dim=expert_dim * num_shared or None, **options)


def sparse_steps() -> Rule:
    """Return the row of the layers without experts: those of a list, and all but every `decoder_sparse_step`-th."""

    def read(fields: Fields, values: Values) -> frozenset[int]:
        step, only = fields.integer("decoder_sparse_step", 1), fields.numbers("mlp_only_layers")
        return frozenset(i for i in range(values["shape"].num_layers) if i in only or (i + 1) % step)

    def write(config: DecoderConfig) -> dict[str, Any]:
        sparse = sparse_layers(config)
        return {"decoder_sparse_step": 1, "mlp_only_layers": [i for i in range(len(config.blocks)) if i not in sparse]}

    return Rule("dense_layers", read, write)
