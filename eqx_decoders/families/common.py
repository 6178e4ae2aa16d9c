"""Model dimensions, and rows of the tables of settings and weights, that most families share."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.residual.residual import Parallel
from eqx_decoders.core.config_reader import REQUIRED, Fields, abbreviate
from eqx_decoders.errors import ConversionError
from eqx_decoders.families.config_keys import ACTIVATIONS
from eqx_decoders.families.setting_rows import Flag, Group, Integer, Layers, Number, Path, Rule, Values, Word
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
NO_BIAS: Mapping[str, str | None] = {"attention_bias": None}  # `keys` of `decoder_sizes` without the key of biases


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSizes:
    """Dimensions of a decoder whose layers all have the same dimensions.

    - `eps`: epsilon of the norms.
    - `attention_bias`: whether all four projections of attention have biases.
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
        """QK norm per head: an RMSNorm with this `eps`."""
        return QKNorm(norm=self.norm)

    def attention(self, **options: Any) -> AttentionConfig:
        """Return the configuration of attention. `options`: fields of `AttentionConfig`; they replace these sizes."""
        heads = dict(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        bias = dict(qkv_bias=self.attention_bias, out_bias=self.attention_bias)
        return AttentionConfig(**{**heads, **bias, **options})

    def attention_by_mask(
        self, masks: Iterable[Mask], rope: Rope | None, local_rope: Rope | None, **options: Any
    ) -> tuple[AttentionConfig, ...]:
        """Return the configuration of the attention of every layer.

        **Arguments:**

        - `masks`: mask of each layer. Empty: all layers have a causal mask.
        - `rope`: rotary embedding of layers with a causal mask.
        - `local_rope`: rotary embedding of layers with any other mask.
        - `options`: see `attention`.
        """
        return tuple(
            self.attention(mask=mask, rope=rope if mask == Causal() else local_rope, **options)
            for mask in tuple(masks) or (Causal(),) * self.num_layers
        )

    def mlp(self, **options: Any) -> MLPConfig:
        """Return the configuration of an MLP. `options`: other fields of `MLPConfig`."""
        return MLPConfig(mlp_dim=self.mlp_dim, activation=self.activation, **options)

    def experts(self, *, shared_dim: int | None = None, shared_bias: bool = False, **options: Any) -> ExpertsConfig:
        """Return the configuration of experts.

        **Arguments:**

        - `shared_dim`: MLP width of the shared expert. None: there is no shared expert.
        - `shared_bias`: whether the shared expert has biases.
        - `options`: fields of `ExpertsConfig`; they replace these sizes.
        """
        fields = {"mlp_dim": self.mlp_dim, "activation": self.activation, **options}
        if shared_dim is not None:
            fields["shared"] = MLPConfig(
                mlp_dim=shared_dim,
                activation=self.activation,
                gated=fields.get("gated", True),
                bias=shared_bias,
            )
        return ExpertsConfig(**fields)

    def cycle_masks(self, size: int, period: int, kind: LocalMask = SlidingWindow) -> tuple[Mask, ...]:
        """Return the mask of each layer: causal in every `period`-th layer, and `kind(size)` in all other layers."""
        return tuple(kind(size) if (index + 1) % period else Causal() for index in range(self.num_layers))

    def block(
        self,
        mixer: MixerConfig,
        mlp: MLPConfig | ExpertsConfig | None = None,
        norm: NormConfig | None = None,
        norms: NormPlaces = "pre",
        parallel_norms: int = 0,
        **options: Any,
    ) -> BlockConfig:
        """Return the configuration of a decoder block.

        **Arguments:**

        - `mlp`: the MLP or experts; None: `self.mlp()`.
        - `norm`: the norms; None: `self.norm`.
        - `norms`: `"pre"` for norms before the mixer and the MLP, `"post"` for norms after them, `"sandwich"` for both.
        - `parallel_norms`: 0 if the MLP follows the mixer. Otherwise mixer and MLP read the same residual stream,
            through one shared norm (1) or through separate norms (2).
        - `options`: other fields of `BlockConfig`.
        """
        pre_norm = None if norms == "post" else norm or self.norm
        post_norm = None if norms == "pre" else norm or self.norm
        fields: dict[str, Any] = {
            "pre_mixer_norm": pre_norm,
            "post_mixer_norm": post_norm,
            "pre_mlp_norm": None if parallel_norms == 1 else pre_norm,
            "post_mlp_norm": post_norm,
        }
        if parallel_norms:
            fields["residual"] = Parallel()
        return BlockConfig(mixer=mixer, mlp=mlp or self.mlp(), **{**fields, **options})

    def decoder(
        self, blocks: BlockConfig | Iterable[BlockConfig], final_norm: NormConfig | None = None, **options: Any
    ) -> DecoderConfig:
        """Return the configuration of a decoder.

        **Arguments:**

        - `blocks`: the block of each layer, or one block for all layers.
        - `final_norm`: None: `self.norm`.
        - `options`: other fields of `DecoderConfig`.
        """
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
    """Return the rows that read and write the value `shape`, a `DecoderSizes`.

    **Arguments:**

    - `num_kv_heads`, …, `attention_bias`: transformers' defaults for missing keys. `num_kv_heads=None` is the number of
        heads, and `head_dim=None` is `hidden_size / num_attention_heads`. By default the key of `mlp_dim` is required.
    - `keys`: the family's name of a key, by Llama's name; None for a key that the family does not have.
    - `paths`: path of the value in a configuration, by Llama's key, where it differs from Llama's path.
    - `words`: the family's names of activations.
    """

    def same_as_heads(values: Any) -> Any:
        return values["num_heads"]

    rows = (
        Integer("num_attention_heads", "attention.num_heads", name="num_heads"),
        Integer("hidden_size", "embed_dim"),
        Integer(
            "num_key_value_heads",
            "attention.num_kv_heads",
            num_kv_heads or same_as_heads,
            null=same_as_heads,
            name="num_kv_heads",
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
    family_rows = (
        dataclasses.replace(
            row, key=keys.get(row.key, row.key) or "", path=paths.get(row.key, row.path), name=row.keyword
        )
        for row in rows
    )
    return Group("shape", DecoderSizes, tuple(family_rows))


@dataclasses.dataclass(frozen=True)
class _HeadDim(Integer):
    """Number of features of a head, by default `hidden_size / num_attention_heads`.

    `keys`: the family's names of these two keys, for the error message.
    """

    _: dataclasses.KW_ONLY
    keys: Mapping[str, str | None]

    def read(self, fields: Fields, values: Any) -> None:
        super().read(fields, values)
        if values["head_dim"] is not None:
            return
        embed_dim, num_heads = values["embed_dim"], values["num_heads"]
        if embed_dim % num_heads:
            embed_key, heads_key = (self.keys.get(key, key) for key in ("hidden_size", "num_attention_heads"))
            if self.key:
                raise fields.error(
                    f"{embed_key}={embed_dim} must be a multiple of {heads_key}={num_heads}: correct one of them, or "
                    f"add {self.key}."
                )
            raise fields.error(
                f"{embed_key}={embed_dim} must be a multiple of {heads_key}={num_heads}: correct one of them."
            )
        values["head_dim"] = embed_dim // num_heads


def map_blocks(config: DecoderConfig, change: Callable[[BlockConfig], BlockConfig]) -> DecoderConfig:
    """Return the configuration with `change` applied to all blocks. Equal blocks are changed once."""
    blocks = {block: change(block) for block in dict.fromkeys(config.blocks)}
    return dataclasses.replace(config, blocks=tuple(blocks[block] for block in config.blocks))


def with_masks(config: DecoderConfig, masks: tuple[Mask, ...]) -> DecoderConfig:
    """Return the configuration with `masks[i]` as the mask of layer `i`; unchanged if `masks` is empty.

    Raises ConversionError if the mixer of a layer is not attention.
    """
    if not masks:
        return config
    mixers = (dataclasses.replace(mixer, mask=mask) for mixer, mask in zip(attentions(config), masks, strict=True))
    blocks = (dataclasses.replace(block, mixer=mixer) for block, mixer in zip(config.blocks, mixers, strict=True))
    return dataclasses.replace(config, blocks=tuple(blocks))


def attentions(config: DecoderConfig) -> tuple[AttentionConfig, ...]:
    """Return the attention of every layer. Raises ConversionError if the mixer of a layer is not attention."""
    mixers = tuple(block.mixer for block in config.blocks)
    for index, mixer in enumerate(mixers):
        if not isinstance(mixer, AttentionConfig):
            raise ConversionError(
                f"DecoderConfig.blocks[{index}].mixer={mixer!r} must be an AttentionConfig: this model type has no "
                "other mixers."
            )
    return mixers  # pyright: ignore[reportReturnType] - checked above


def read_layer_indices(fields: Fields, key: str, num_layers: int) -> tuple[int, ...]:
    """Read a list of indices of layers, by default an empty list. Raises ConversionError if a layer does not exist."""
    indices = fields.integers(key)
    if not all(0 <= index < num_layers for index in indices):
        raise fields.error(
            f"{key}={abbreviate(list(indices))} must be indices of layers from 0 to {num_layers - 1}: correct the list "
            "or the number of layers."
        )
    return tuple(indices)


# Types of layers in `layer_types`, by the class of the mask.
LAYER_TYPES = {Causal: "full_attention", SlidingWindow: "sliding_attention", Chunked: "chunked_attention"}


def layer_type(mask: Mask) -> str:
    """Return the type in `layer_types` of a layer with this mask. Raises ConversionError if the mask has no type."""
    if type(mask) not in LAYER_TYPES:
        supported = ", ".join(kind.__name__ for kind in LAYER_TYPES)
        raise ConversionError(f"AttentionConfig.mask={mask!r} is not supported in config.json. Supported: {supported}.")
    return LAYER_TYPES[type(mask)]


def cycle_mask_settings(period: int, *, key: str = "", window: int = 4096, default: int | None = None) -> Rule:
    """Return the row of the value `masks`: causal in every `period`-th layer, sliding windows in all other layers.

    A key `layer_types` overrides this cycle.

    **Arguments:**

    - `key`: key of `config.json` that overrides `period`; it is never written. Empty: there is no such key.
    - `window`: transformers' default for `sliding_window`.
    - `default`: value of `sliding_window` that is written if no layer has a window.
    """

    def read(fields: Fields, values: Values) -> tuple[Mask, ...]:
        cycle = fields.integer(key, period) if key else period
        size = fields.integer("sliding_window", window, null=None)
        return read_masks(fields, values, size, lambda layer: (layer + 1) % cycle != 0)

    return Rule("masks", read, functools.partial(write_masks, default=default))


def layer_masks(
    local: Callable[[int, Values], bool], *, window: int | None = 4096, default: int | None = None, switch: str = ""
) -> Rule:
    """Return the row of the value `masks`: sliding windows where `local` returns True, causal masks elsewhere.

    A key `layer_types` overrides `local`. No layer has a window if `sliding_window` is null.

    **Arguments:**

    - `local`: returns whether a layer has a window, from its index and the values of earlier rows.
    - `window`: transformers' default for `sliding_window`.
    - `default`: value of `sliding_window` that is written if no layer has a window.
    - `switch`: key of `config.json` that must be true for windows. Empty: there is no such key.
    """

    def read(fields: Fields, values: Values) -> tuple[Mask, ...]:
        has_windows = not switch or fields.flag(switch, False)
        size = fields.integer("sliding_window", window, null=None)
        if not has_windows:
            size = None
        return read_masks(fields, values, size, lambda layer: size is not None and local(layer, values))

    def write(config: DecoderConfig) -> dict[str, Any]:
        masks = write_masks(config, default=default)
        if switch:
            masks[switch] = masks["sliding_window"] is not None
        return masks

    return Rule("masks", read, write)


def read_masks(
    fields: Fields,
    values: Values,
    size: int | None,
    local: Callable[[int], bool] = lambda layer: False,
    kind: LocalMask = SlidingWindow,
    key: str = "sliding_window",
) -> tuple[Mask, ...]:
    """Read the mask of each layer: causal, or `kind(size)` for local layers.

    Raises ConversionError if `layer_types` has local layers and `size` is None.

    **Arguments:**

    - `values`: values of earlier rows; `shape` has the number of layers.
    - `size`: size of the windows or chunks, the value of `key`. None: no layer is local.
    - `local`: returns whether the layer with an index is local, if there is no `layer_types`.
    """
    num_layers = values["shape"].num_layers
    local_type = LAYER_TYPES[kind]
    types = fields.words("layer_types", (LAYER_TYPES[Causal], local_type), num_layers)
    is_local = [local(layer) if types is None else types[layer] == local_type for layer in range(num_layers)]
    if any(is_local) and size is None:
        raise fields.error(
            f"layers {[layer for layer, flag in enumerate(is_local) if flag]} are of type {local_type}, but {key} is "
            f"null or turned off: set {key} to the size of their windows, or use full attention only in layer_types."
        )
    local_mask = Causal() if size is None else kind(size)
    return tuple(local_mask if flag else Causal() for flag in is_local)


def write_masks(
    config: DecoderConfig, kind: LocalMask = SlidingWindow, key: str = "sliding_window", *, default: int | None = None
) -> dict[str, Any]:
    """Return `layer_types`, and under `key` the size of the local masks; `default` if no layer is local."""
    types = [layer_type(mixer.mask) for mixer in attentions(config)]
    return {"layer_types": types, key: find_window(config, kind) or default}


# Default types of recurrent layers and of attention layers in `layer_types`.
HYBRID_TYPES = ("linear_attention", "full_attention")


def hybrid_layers(*attention: type, other: str = HYBRID_TYPES[0], word: str = HYBRID_TYPES[1]) -> Rule:
    """Return the row of the value `full`: for each layer of a hybrid decoder, whether it is an attention layer.

    It is read from `layer_types`. If this key is missing, every `_interval`-th layer is an attention layer, where
    `_interval` is the value of an earlier row.

    **Arguments:**

    - `attention`: classes of the mixers of attention layers.
    - `other`: name of recurrent layers in `layer_types`.
    - `word`: name of attention layers in `layer_types`.
    """
    kinds = (other, word)
    aliases = {"mamba": other, "attention": word, HYBRID_TYPES[1]: word}

    def read(fields: Fields, values: Values) -> tuple[bool, ...]:
        num_layers = values["shape"].num_layers
        interval = values.get("_interval")
        types = fields.words("layer_types", (*kinds, *aliases), num_layers)
        if types is None:
            types = [kinds[interval is not None and (layer + 1) % interval == 0] for layer in range(num_layers)]
        full = tuple(aliases.get(kind, kind) == word for kind in types)
        if not any(full):
            raise fields.error(f"layer_types must have at least one attention layer: set an entry to {word!r}.")
        return full

    def write(config: DecoderConfig) -> dict[str, Any]:
        return {"layer_types": [kinds[isinstance(block.mixer, attention)] for block in config.blocks]}

    return Rule("full", read, write)


def same_window() -> Rule:
    """Return the row of the value `mask`: a window of `sliding_window` tokens; a causal mask if the key is missing."""

    def read(fields: Fields, values: Values) -> Mask:
        window = fields.integer("sliding_window", None)
        return Causal() if window is None else SlidingWindow(window)

    return Rule("mask", read, lambda config: {"sliding_window": find_window(config)})


def find_window(config: DecoderConfig, kind: LocalMask = SlidingWindow) -> int | None:
    """Return the size of the largest mask of this `kind` (windows or chunks); None if no layer has such a mask."""
    return max((mixer.mask.size for mixer in attentions(config) if isinstance(mixer.mask, kind)), default=None)


# --- rows of weights that most families share ---

LAYER = "model.layers.{layer}."


def ends(
    embedding: str = "model.embed_tokens", final_norm: str = "model.norm", head: str = "lm_head"
) -> tuple[Weight, ...]:
    """Return the rows of the embedding, the final norm and the output head. The arguments are names of modules."""
    return (
        Weight(f"{embedding}.weight", "embedding.table", "vocab embed -> vocab embed"),
        *norm(final_norm, "final_norm"),
        Weight(f"{head}.weight", "head.kernel", "vocab embed -> embed vocab"),
        Weight(f"{head}.bias", "head_bias", "vocab -> vocab"),
    )


ENDS = ends()


def renamed(rows: Iterable[Weight], names: Mapping[str, str]) -> tuple[Weight, ...]:
    """Return the rows with other tensor names. `names`: replacements of substrings, applied in order."""

    def new_name(row: Weight) -> str:
        name = row.name
        for old, new in names.items():
            name = name.replace(old, new)
        return name

    return tuple(dataclasses.replace(row, name=new_name(row)) for row in rows)


def fused_attention(prefix: str, qkv: str, out: str) -> tuple[Weight, ...]:
    """Return the rows of attention with a fused projection, stored as GPT-NeoX does.

    For each key head, the tensor `qkv` holds the queries of its group, its key and its value.
    """
    axes = {"query": "heads", "key": "kv_heads", "value": "kv_heads"}
    kernels = ((f"mixer.{path}", f"({heads} head_dim) embed -> embed {heads} head_dim") for path, heads in axes.items())
    biases = ((f"mixer.{path}_bias", f"({heads} head_dim) -> {heads} head_dim") for path, heads in axes.items())
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
    """Return the rows of a gated MLP without biases whose tensor `gate_up` holds the gate, then the up projection."""
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
    """Return the rows of a decoder with Llama's tensor names.

    **Arguments:**

    - `norms`: positions of the norms (see `DecoderSizes.block`), or the rows of norms with other names.
    - `mlp`, `experts`: rows of MLPs and of experts.
    """
    norm_rows = norms if isinstance(norms, tuple) else _NORMS[norms]
    return ENDS + self_attention(LAYER) + norm_rows + mlp + experts
