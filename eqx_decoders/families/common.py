"""Sizes, settings and tensors that most families share."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.residual.residual import Parallel
from eqx_decoders.core.config_reader import REQUIRED, Fields
from eqx_decoders.errors import ConversionError
from eqx_decoders.families.config_keys import ACTIVATIONS
from eqx_decoders.families.settings_table import Flag, Group, Integer, Layers, Number, Path, Rule, Values, Word
from eqx_decoders.families.weight_rows import Weight, gated_mlp, norm, norm_weights, self_attention, sharing
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.base import MixerConfig
from eqx_decoders.layers.mask import Causal, Chunked, Mask, SlidingWindow
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.norm import NormConfig, RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


T = TypeVar("T")
NormPlaces = Literal["pre", "post", "sandwich"]
LocalMask = type[SlidingWindow] | type[Chunked]
NO_BIAS: Mapping[str, str | None] = {"attention_bias": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSizes:
    """Sizes of a decoder whose layers all have the same.

    `eps` is that of the norms; `attention_bias` adds a bias to all four projections of attention.
    """

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    eps: float = 1e-6
    tied: bool = False
    activation: str = "silu"
    init_std: float = 0.02
    attention_bias: bool = False

    @property
    def norm(self) -> RMSNormConfig:
        """RMSNorm with this `eps`."""
        return RMSNormConfig(eps=self.eps)

    @property
    def qk_norm(self) -> QKNorm:
        """The same for queries and keys, each head for itself."""
        return QKNorm(norm=self.norm)

    def attention(self, **options: Any) -> AttentionConfig:
        """Return attention of these sizes."""
        heads = dict(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        bias = dict(qkv_bias=self.attention_bias, out_bias=self.attention_bias)
        return AttentionConfig(**{**heads, **bias, **options})

    def attention_by_mask(
        self, masks: Iterable[Mask], rope: Rope | None, local_rope: Rope | None, **options: Any
    ) -> tuple[AttentionConfig, ...]:
        """Return the attention of all layers with these masks, or causal ones for none; see `attention`.

        Layers that see the whole past have the rotary embedding `rope`, the others `local_rope`.
        """
        return tuple(
            self.attention(mask=mask, rope=rope if mask == Causal() else local_rope, **options)
            for mask in tuple(masks) or (Causal(),) * self.num_layers
        )

    def mlp(self, **options: Any) -> MLPConfig:
        """Return an MLP of these sizes."""
        return MLPConfig(mlp_dim=self.mlp_dim, activation=self.activation, **options)

    def experts(self, *, shared_dim: int | None = None, shared_bias: bool = False, **options: Any) -> ExpertsConfig:
        """Return experts of these sizes, unless the options have an `mlp_dim`, with a shared one of `shared_dim`."""
        sizes = {"mlp_dim": self.mlp_dim, "activation": self.activation, **options}
        if shared_dim is not None:
            kind: dict[str, Any] = dict(activation=self.activation, gated=sizes.get("gated", True), bias=shared_bias)
            sizes["shared"] = MLPConfig(mlp_dim=shared_dim, **kind)
        return ExpertsConfig(**sizes)

    def cycle_masks(self, size: int, period: int, kind: LocalMask = SlidingWindow) -> tuple[Mask, ...]:
        """Return the mask of each layer: causal in every `period`-th, and a window of `size` in the others."""
        return tuple(kind(size) if (index + 1) % period else Causal() for index in range(self.num_layers))

    def block(
        self,
        mixer: MixerConfig,
        mlp: MLPConfig | ExpertsConfig | None = None,
        norm: NormConfig | None = None,
        norms: NormPlaces = "pre",
        parallel: int = 0,
        **options: Any,
    ) -> BlockConfig:
        """Return a layer with norms before attention and MLP, after them, or both.

        Its MLP is `self.mlp()` and its norms are `self.norm` where they are None. If `parallel` is 1 or 2, attention
        and MLP read the same stream, through one norm or two of their own.
        """
        before = None if norms == "post" else norm or self.norm
        after = None if norms == "pre" else norm or self.norm
        around = dict(pre_mixer_norm=before, post_mixer_norm=after, post_mlp_norm=after)
        around["pre_mlp_norm"] = None if parallel == 1 else before
        residual = {"residual": Parallel()} if parallel else {}
        return BlockConfig(mixer=mixer, mlp=mlp or self.mlp(), **{**around, **residual, **options})

    def decoder(
        self, blocks: BlockConfig | Iterable[BlockConfig], final_norm: NormConfig | None = None, **options: Any
    ) -> DecoderConfig:
        """Return a decoder with these layers, or the same in all; its final norm is `self.norm` by default."""
        return DecoderConfig(
            vocab_size=self.vocab_size,
            embed_dim=self.embed_dim,
            blocks=(blocks,) * self.num_layers if isinstance(blocks, BlockConfig) else tuple(blocks),
            final_norm=final_norm or self.norm,
            tied=self.tied,
            init_std=self.init_std,
            **options,
        )


def decoder_sizes(
    *,
    num_kv_heads: Any = None,
    head_dim: Any = None,
    mlp_dim: Any = REQUIRED,
    eps: float = 1e-6,
    tied: bool = False,
    activation: str = "silu",
    attention_bias: bool = False,
    keys: Mapping[str, str | None] = {},
    paths: Mapping[str, Path] = {},
    words: Mapping[str, str] = ACTIVATIONS,
) -> Group:
    """Return the rows of `DecoderSizes`, called `shape`; the arguments are transformers' defaults.

    `num_kv_heads` and `head_dim` of None are the number of heads and `hidden_size / num_attention_heads`. Without an
    `mlp_dim` its key must be there. `keys` maps
    Llama's keys to the family's; None where it has no such key. `paths` has paths of Llama's keys where they
    differ, and `words` the names of activations.
    """

    def heads(values: Any) -> Any:
        return values["num_heads"]

    rows = (
        Integer("num_attention_heads", "attention.num_heads", name="num_heads"),
        Integer("hidden_size", "embed_dim"),
        Integer(
            "num_key_value_heads", "attention.num_kv_heads", num_kv_heads or heads, null=heads, name="num_kv_heads"
        ),
        _HeadDim("head_dim", "attention.head_dim", head_dim, keys=keys),
        Integer("vocab_size", "vocab_size"),
        Layers("num_hidden_layers", "blocks", name="num_layers"),
        Integer("intermediate_size", "mlp.mlp_dim", mlp_dim),
        Number("rms_norm_eps", "final_norm.eps", eps),
        Flag("tie_word_embeddings", "tied", tied),
        Word("hidden_act", "mlp.activation", activation, known=words),
        Number("initializer_range", "init_std", 0.02),
        Flag("attention_bias", "attention.qkv_bias", attention_bias, name="attention_bias"),
    )
    named = (
        dataclasses.replace(
            row, key=keys.get(row.key, row.key) or "", path=paths.get(row.key, row.path), name=row.keyword
        )
        for row in rows
    )
    return Group("shape", DecoderSizes, tuple(named))


@dataclasses.dataclass(frozen=True)
class _HeadDim(Integer):
    """Features of a head, by default `hidden_size / num_attention_heads`; `keys` has the family's names of the two."""

    _: dataclasses.KW_ONLY
    keys: Mapping[str, str | None]

    def read(self, fields: Fields, values: Any) -> None:
        super().read(fields, values)
        if values["head_dim"] is not None:
            return
        embed, heads = values["embed_dim"], values["num_heads"]
        if embed % heads:
            size, count = (self.keys.get(key, key) for key in ("hidden_size", "num_attention_heads"))
            more = ", or head_dim given" if self.key else ""
            raise fields.error(f"{size}={embed} must be a multiple of {count}={heads}{more}.")
        values["head_dim"] = embed // heads


def map_blocks(config: DecoderConfig, change: Callable[[BlockConfig], BlockConfig]) -> DecoderConfig:
    """Return the configuration with all blocks changed; equal blocks are changed once."""
    blocks = {block: change(block) for block in dict.fromkeys(config.blocks)}
    return dataclasses.replace(config, blocks=tuple(blocks[block] for block in config.blocks))


def with_masks(config: DecoderConfig, masks: tuple[Mask, ...]) -> DecoderConfig:
    """Return the configuration with these masks of its layers, all of which have attention; as it is without masks."""
    if not masks:
        return config
    mixers = (dataclasses.replace(mixer, mask=mask) for mixer, mask in zip(attentions(config), masks, strict=True))
    blocks = (dataclasses.replace(block, mixer=mixer) for block, mixer in zip(config.blocks, mixers, strict=True))
    return dataclasses.replace(config, blocks=tuple(blocks))


def attentions(config: DecoderConfig) -> tuple[AttentionConfig, ...]:
    """Return the attention of every layer; ConversionError where there is another mixer."""
    mixers = tuple(block.mixer for block in config.blocks)
    for index, mixer in enumerate(mixers):
        if not isinstance(mixer, AttentionConfig):
            raise ConversionError(f"DecoderConfig.blocks[{index}].mixer={mixer!r} must be an AttentionConfig.")
    return mixers  # pyright: ignore[reportReturnType] - checked above


LAYER_TYPES = {Causal: "full_attention", SlidingWindow: "sliding_attention", Chunked: "chunked_attention"}


def cycle_masks(period: int, *, key: str = "", window: int = 4096, default: int | None = None) -> Rule:
    """Return the row of the masks of `DecoderSizes.cycle_masks`, unless `layer_types` differs.

    `window` is transformers' default for their size, and `default` what is written where no layer has one. With a `key`
    that may say another `period`, which is not written.
    """

    def read(fields: Fields, values: Values) -> tuple[Mask, ...]:
        cycle = fields.integer(key, period) if key else period
        size = fields.integer("sliding_window", window, null=None)
        return read_masks(fields, values, size, lambda index: (index + 1) % cycle != 0)

    return Rule("masks", read, functools.partial(write_masks, default=default))


def layer_masks(
    local: Callable[[int, Values], bool], *, window: int | None = 4096, default: int | None = None, switch: str = ""
) -> Rule:
    """Return the row of the masks of layers with windows where `local` says so, unless `layer_types` differs.

    It takes the number of a layer and the values before. `window` is transformers' default for their size, and
    `default` what is written where no layer has one. Where the size is null, or the flag `switch` false, none has.
    """

    def read(fields: Fields, values: Values) -> tuple[Mask, ...]:
        on, size = not switch or fields.flag(switch, False), fields.integer("sliding_window", window, null=None)
        size = size if on else None
        return read_masks(fields, values, size, lambda index: size is not None and local(index, values))

    def write(config: DecoderConfig) -> dict[str, Any]:
        masks = write_masks(config, default=default)
        return masks | ({switch: masks["sliding_window"] is not None} if switch else {})

    return Rule("masks", read, write)


def read_masks(
    fields: Fields, values: Values, size: int | None, local: Callable[[int], bool] = lambda index: False,
    kind: LocalMask = SlidingWindow, key: str = "sliding_window",
) -> tuple[Mask, ...]:  # fmt: skip
    """Read the mask of each layer of the value `shape`, causal or `kind` of a `size` (the value of `key`).

    `layer_types` or, where there is none, `local` says of each layer, by its number, whether it is local.
    """
    layers, word = range(values["shape"].num_layers), LAYER_TYPES[kind]
    types = fields.words("layer_types", (LAYER_TYPES[Causal], word), len(layers))
    flags = [local(index) if types is None else types[index] == word for index in layers]
    if any(flags) and size is None:
        raise fields.error(f"layer_types has {word}, but {key} is null or off: give its size.")
    mask = Causal() if size is None else kind(size)
    return tuple(mask if flag else Causal() for flag in flags)


def write_masks(
    config: DecoderConfig, kind: LocalMask = SlidingWindow, key: str = "sliding_window", *, default: int | None = None
) -> dict[str, Any]:
    """Return `layer_types`, and the one size that local masks share; `default` where there is none."""
    types = [LAYER_TYPES[type(mixer.mask)] for mixer in attentions(config)]
    return {"layer_types": types, key: find_window(config, kind) or default}


HYBRID_TYPES = ("linear_attention", "full_attention")


def hybrid_layers(*attention: type, other: str = HYBRID_TYPES[0], word: str = HYBRID_TYPES[1]) -> Rule:
    """Return the row of flags for layers with attention, of these classes and the type `word`, not recurrence, `other`.

    `layer_types` says it or, where there is none, the value `_interval`: every such layer has attention.
    """
    kinds = other, word
    legacy = {"mamba": other, "attention": word, HYBRID_TYPES[1]: word}

    def read(fields: Fields, values: Values) -> tuple[bool, ...]:
        layers, interval = values["shape"].num_layers, values.get("_interval")
        types = fields.words("layer_types", (*kinds, *legacy), layers)
        if types is None:
            types = [kinds[interval is not None and (index + 1) % interval == 0] for index in range(layers)]
        full = tuple(legacy.get(kind, kind) == word for kind in types)
        if not any(full):
            raise fields.error(f"layer_types must have at least one attention layer, {word!r}.")
        return full

    def write(config: DecoderConfig) -> dict[str, Any]:
        return {"layer_types": [kinds[isinstance(block.mixer, attention)] for block in config.blocks]}

    return Rule("full", read, write)


def same_window(default: int | None) -> Rule:
    """Return the row of the mask of all layers: a window of `sliding_window` tokens, or causal where it is null."""

    def read(fields: Fields, values: Values) -> Mask:
        window = fields.integer("sliding_window", default, null=None)
        return Causal() if window is None else SlidingWindow(window)

    return Rule("mask", read, lambda config: {"sliding_window": find_window(config)})


def find_window(config: DecoderConfig, kind: LocalMask = SlidingWindow) -> int | None:
    """Return the size of the windows, or of the chunks; None where no layer has one."""
    return max((mixer.mask.size for mixer in attentions(config) if isinstance(mixer.mask, kind)), default=None)


# --- the rows of weights that most tables share ---

LAYER = "model.layers.{layer}."


def ends(
    embedding: str = "model.embed_tokens", final_norm: str = "model.norm", head: str = "lm_head"
) -> tuple[Weight, ...]:
    """Return the rows of the embedding, the final norm and the output head, whose modules have these names."""
    return (
        Weight(f"{embedding}.weight", "embedding.table", "vocab embed -> vocab embed"),
        *norm(final_norm, "final_norm"),
        Weight(f"{head}.weight", "head.kernel", "vocab embed -> embed vocab"),
        Weight(f"{head}.bias", "head_bias", "vocab -> vocab"),
    )


ENDS = ends()


def renamed(rows: Iterable[Weight], names: Mapping[str, str]) -> tuple[Weight, ...]:
    """Return the rows with other words in the names of their tensors: the family's for Llama's."""

    def name(row: Weight) -> str:
        return functools.reduce(lambda name, words: name.replace(*words), names.items(), row.name)

    return tuple(dataclasses.replace(row, name=name(row)) for row in rows)


def fused_attention(prefix: str, qkv: str, out: str) -> tuple[Weight, ...]:
    """Return the rows of attention whose tensor `qkv` has, for each key head, its queries, its key and its value."""
    into = {"query": "heads", "key": "kv_heads", "value": "kv_heads"}
    kernels = ((f"mixer.{path}", f"({heads} head_dim) embed -> embed {heads} head_dim") for path, heads in into.items())
    biases = ((f"mixer.{path}_bias", f"({heads} head_dim) -> {heads} head_dim") for path, heads in into.items())
    return (
        *sharing(f"{prefix}{qkv}.weight", *kernels, within="kv_heads"),
        *sharing(f"{prefix}{qkv}.bias", *biases, within="kv_heads"),
        Weight(f"{prefix}{out}.weight", "mixer.out", "embed (heads head_dim) -> heads head_dim embed"),
        Weight(f"{prefix}{out}.bias", "mixer.out_bias", "embed -> embed"),
    )


GATED_MLP = gated_mlp(LAYER + "mlp.")


def fused_mlp(
    prefix: str, path: str = "mlp.", gate_up: str = "gate_up_proj", down: str = "down_proj"
) -> tuple[Weight, ...]:
    """Return the rows of a gated MLP that is `fused`, without biases: gates are the first rows of one matrix."""
    return (
        Weight(f"{prefix}{gate_up}.weight", path + "gate_up", "(inputs mlp) embed -> embed inputs mlp"),
        Weight(f"{prefix}{down}.weight", path + "down", "embed mlp -> mlp embed"),
    )


def plain_mlp(prefix: str, path: str = "mlp.", up: str = "up_proj", down: str = "down_proj") -> tuple[Weight, ...]:
    """Return the rows of an MLP without a gate."""
    return (
        Weight(f"{prefix}{up}.weight", path + "up", "mlp embed -> embed mlp"),
        Weight(f"{prefix}{up}.bias", path + "up_bias", "mlp -> mlp"),
        Weight(f"{prefix}{down}.weight", path + "down", "embed mlp -> mlp embed"),
        Weight(f"{prefix}{down}.bias", path + "down_bias", "embed -> embed"),
    )


PRE_NORMS = norm_weights(LAYER, pre_mixer_norm="input_layernorm", pre_mlp_norm="post_attention_layernorm")
_POST_NORMS = norm_weights(
    LAYER, post_mixer_norm="post_attention_layernorm", post_mlp_norm="post_feedforward_layernorm"
)
_NORMS: dict[NormPlaces, tuple[Weight, ...]] = {
    "pre": PRE_NORMS,
    "post": _POST_NORMS,
    "sandwich": _POST_NORMS
    + norm_weights(LAYER, pre_mixer_norm="input_layernorm", pre_mlp_norm="pre_feedforward_layernorm"),
}


def llama_weights(
    norms: NormPlaces | tuple[Weight, ...] = "pre",
    mlp: tuple[Weight, ...] = GATED_MLP,
    experts: tuple[Weight, ...] = (),
) -> tuple[Weight, ...]:
    """Return the rows of a Llama, with norms at these positions of a block, and these rows for MLPs and experts.

    Rows in the place of positions are those of norms with other names.
    """
    return ENDS + self_attention(LAYER) + (norms if isinstance(norms, tuple) else _NORMS[norms]) + mlp + experts
