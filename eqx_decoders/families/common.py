"""Sizes, settings and tensors that most families share."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

from eqx_decoders.blocks.block import BlockConfig, MixerConfig
from eqx_decoders.errors import ConversionError
from eqx_decoders.families.config_reader import ACTIVATIONS, Fields, activation_name
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mask import Causal, Chunked, Mask, SlidingWindow
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.norm import NormConfig, RMSNormConfig
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

    def attention(self, **options: Any) -> AttentionConfig:
        """Return attention of these sizes."""
        heads = dict(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        bias = dict(qkv_bias=self.attention_bias, out_bias=self.attention_bias)
        return AttentionConfig(**{**heads, **bias, **options})

    def mlp(self, **options: Any) -> MLPConfig:
        """Return an MLP of these sizes."""
        return MLPConfig(mlp_dim=self.mlp_dim, activation=self.activation, **options)

    def experts(self, **options: Any) -> ExpertsConfig:
        """Return experts of these sizes, unless the options have an `mlp_dim`."""
        return ExpertsConfig(**{"mlp_dim": self.mlp_dim, "activation": self.activation, **options})

    def cycle_masks(self, size: int, period: int, kind: LocalMask = SlidingWindow) -> tuple[Mask, ...]:
        """Return the mask of each layer: causal in every `period`-th, and a window of `size` in the others."""
        return tuple(kind(size) if (index + 1) % period else Causal() for index in range(self.num_layers))

    def block(
        self,
        mixer: MixerConfig,
        mlp: MLPConfig | ExpertsConfig | None = None,
        norm: NormConfig | None = None,
        norms: NormPlaces = "pre",
    ) -> BlockConfig:
        """Return a layer with norms before attention and MLP, after them, or both.

        Its MLP is `self.mlp()` and its norms are `self.norm` where they are None.
        """
        before = None if norms == "post" else norm or self.norm
        after = None if norms == "pre" else norm or self.norm
        return BlockConfig(
            mixer=mixer,
            mlp=mlp or self.mlp(),
            pre_mixer_norm=before,
            post_mixer_norm=after,
            pre_mlp_norm=before,
            post_mlp_norm=after,
        )

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


def read_shape(
    fields: Fields,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    eps: float = 1e-6,
    tied: bool = False,
    activation: str = "silu",
    attention_bias: bool = False,
    keys: Mapping[str, str | None] = {},
) -> DecoderSizes:
    """Read the sizes of a `config.json`; the arguments are transformers' defaults.

    `num_kv_heads` and `head_dim` of None are the number of heads and `hidden_size / num_attention_heads`. `keys` maps
    Llama's keys to the family's; None where it has no such key.
    """

    def ask(read: Callable[..., T], key: str, *default: Any, **options: Any) -> T:
        family_key = keys.get(key, key)
        return default[0] if family_key is None else read(family_key, *default, **options)

    heads, embed = ask(fields.integer, "num_attention_heads"), ask(fields.integer, "hidden_size")
    kv_heads = ask(fields.integer, "num_key_value_heads", num_kv_heads or heads, null=heads)
    width = ask(fields.integer, "head_dim", head_dim)
    if width is None:
        if embed % heads:
            names = keys.get("hidden_size", "hidden_size"), keys.get("num_attention_heads", "num_attention_heads")
            more = ", or head_dim given" if "head_dim" not in keys else ""
            raise fields.error(f"{names[0]}={embed} must be a multiple of {names[1]}={heads}{more}.")
        width = embed // heads
    return DecoderSizes(
        vocab_size=ask(fields.integer, "vocab_size"),
        embed_dim=embed,
        num_layers=ask(fields.layers, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        mlp_dim=ask(fields.integer, "intermediate_size"),
        eps=ask(fields.number, "rms_norm_eps", eps),
        tied=ask(fields.flag, "tie_word_embeddings", tied),
        activation=fields.word(keys.get("hidden_act") or "hidden_act", ACTIVATIONS, activation),
        init_std=ask(fields.number, "initializer_range", 0.02),
        attention_bias=ask(fields.flag, "attention_bias", attention_bias),
    )


def write_shape(config: DecoderConfig, keys: Mapping[str, str | None] = {}) -> dict[str, Any]:
    """Return the keys that `read_shape` reads with these `keys`."""
    mlp = config.blocks[0].mlp
    if not isinstance(mlp, MLPConfig):
        raise ConversionError(f"DecoderConfig.blocks[0].mlp={mlp!r} must be an MLPConfig.")
    written = {"intermediate_size": mlp.mlp_dim, "hidden_act": activation_name(mlp.activation)}
    return write_sizes(config, keys) | _translated(written, keys)


def write_sizes(config: DecoderConfig, keys: Mapping[str, str | None] = {}) -> dict[str, Any]:
    """Return the keys that `read_shape` reads with these `keys`, without those of the MLP."""
    mixer = first_mixer(config, AttentionConfig)
    heads = {
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "attention_bias": mixer.qkv_bias,
    }
    return _translated(write_outer(config) | heads, keys)


def _translated(settings: Mapping[str, Any], keys: Mapping[str, str | None]) -> dict[str, Any]:
    named = ((keys.get(key, key), value) for key, value in settings.items())
    return {key: value for key, value in named if key is not None}


def write_outer(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys that are about no layer."""
    if config.final_norm is None:
        raise ConversionError("DecoderConfig.final_norm=None: there must be a final norm.")
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "num_hidden_layers": len(config.blocks),
        "rms_norm_eps": config.final_norm.eps,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
    }


def map_blocks(config: DecoderConfig, change: Callable[[BlockConfig], BlockConfig]) -> DecoderConfig:
    """Return the configuration with all blocks changed; equal blocks are changed once."""
    blocks = {block: change(block) for block in dict.fromkeys(config.blocks)}
    return dataclasses.replace(config, blocks=tuple(blocks[block] for block in config.blocks))


def first_mixer(config: DecoderConfig, kind: type[T]) -> T:
    """Return the first mixer of this class; ConversionError where there is none."""
    mixer = next((block.mixer for block in config.blocks if isinstance(block.mixer, kind)), None)
    if mixer is None:
        raise ConversionError(f"DecoderConfig.blocks: no layer has a mixer with an {kind.__name__}.")
    return mixer


def attentions(config: DecoderConfig) -> tuple[AttentionConfig, ...]:
    """Return the attention of every layer; ConversionError where there is another mixer."""
    mixers = tuple(block.mixer for block in config.blocks)
    for index, mixer in enumerate(mixers):
        if not isinstance(mixer, AttentionConfig):
            raise ConversionError(f"DecoderConfig.blocks[{index}].mixer={mixer!r} must be an AttentionConfig.")
    return mixers  # pyright: ignore[reportReturnType] - checked above


LAYER_TYPES = {Causal: "full_attention", SlidingWindow: "sliding_attention", Chunked: "chunked_attention"}


def read_cycle_masks(fields: Fields, layers: int, period: int, *, window: int = 4096) -> tuple[Mask, ...]:
    """Read the masks of `DecoderSizes.cycle_masks`, unless `layer_types` differs; `window` is the default size."""
    size = fields.integer("sliding_window", window, null=None)
    return read_masks(fields, size, [(index + 1) % period != 0 for index in range(layers)])


def read_masks(
    fields: Fields, size: int | None, local: list[bool], kind: LocalMask = SlidingWindow, key: str = "sliding_window"
) -> tuple[Mask, ...]:
    """Read the mask of each layer, causal or `kind` of a `size` (the value of `key`).

    `layer_types` or, where there is none, `local` says which layers are local.
    """
    word = LAYER_TYPES[kind]
    types = fields.words("layer_types", (LAYER_TYPES[Causal], word), len(local))
    local = local if types is None else [layer_type == word for layer_type in types]
    if any(local) and size is None:
        raise fields.error(f"layer_types has {word}, but {key} is null or off: give its size.")
    mask = Causal() if size is None else kind(size)
    return tuple(mask if flag else Causal() for flag in local)


HYBRID_TYPES = ("linear_attention", "full_attention")


def read_hybrid_layers(fields: Fields, layers: int, interval: int | None) -> tuple[bool, ...]:
    """Return True for layers with attention, not recurrence, by `layer_types` or every `interval`-th."""
    legacy = {"mamba": HYBRID_TYPES[0], "attention": HYBRID_TYPES[1]}
    types = fields.words("layer_types", (*HYBRID_TYPES, *legacy), layers)
    if types is None:
        types = [HYBRID_TYPES[interval is not None and (index + 1) % interval == 0] for index in range(layers)]
    full = tuple(legacy.get(kind, kind) == HYBRID_TYPES[1] for kind in types)
    if not any(full):
        raise fields.error("no layer has attention: check layer_types.")
    return full


def write_hybrid_layers(config: DecoderConfig, *attention: type) -> dict[str, Any]:
    """Return `layer_types`; the classes are those of attention."""
    return {"layer_types": [HYBRID_TYPES[isinstance(block.mixer, attention)] for block in config.blocks]}


def write_masks(
    config: DecoderConfig, kind: LocalMask = SlidingWindow, key: str = "sliding_window", *, default: int | None = None
) -> dict[str, Any]:
    """Return `layer_types`, and the one size that local masks share; `default` where there is none."""
    types = [LAYER_TYPES[type(mixer.mask)] for mixer in attentions(config)]
    return {"layer_types": types, key: find_window(config, kind) or default}


def find_window(config: DecoderConfig, kind: LocalMask = SlidingWindow) -> int | None:
    """Return the size of the windows, or of the chunks; None where no layer has one."""
    return max((mixer.mask.size for mixer in attentions(config) if isinstance(mixer.mask, kind)), default=None)


# The rows that most tables share.
ENDS = (
    Weight("model.embed_tokens.weight", "embedding.table", "vocab embed -> vocab embed"),
    Weight("model.norm.weight", "final_norm.scale", "norm -> norm"),
    Weight("lm_head.weight", "head.kernel", "vocab embed -> embed vocab"),
)
_LAYER = "model.layers.{layer}."


def self_attention(prefix: str, name: str = "self_attn.") -> tuple[Weight, ...]:
    """Return the rows of attention, which is called `name` in a layer."""
    attention = prefix + name
    into = {"q_proj": ("query", "heads"), "k_proj": ("key", "kv_heads"), "v_proj": ("value", "kv_heads")}
    rows: list[Weight] = []
    for tensor, (path, heads) in into.items():
        pattern = f"({heads} head_dim) embed -> embed {heads} head_dim"
        rows.append(Weight(f"{attention}{tensor}.weight", f"mixer.{path}", pattern))
        rows.append(
            Weight(f"{attention}{tensor}.bias", f"mixer.{path}_bias", f"({heads} head_dim) -> {heads} head_dim")
        )
    return (
        *rows,
        Weight(attention + "o_proj.weight", "mixer.out", "embed (heads head_dim) -> heads head_dim embed"),
        Weight(attention + "o_proj.bias", "mixer.out_bias", "embed -> embed"),
        Weight(attention + "q_norm.weight", "mixer.query_norm.scale", "norm -> norm"),
        Weight(attention + "k_norm.weight", "mixer.key_norm.scale", "norm -> norm"),
    )


def gated_mlp(prefix: str, path: str = "mlp.") -> tuple[Weight, ...]:
    """Return the rows of a gated MLP."""
    return (
        Weight(prefix + "gate_proj.weight", path + "gate", "mlp embed -> embed mlp"),
        Weight(prefix + "gate_proj.bias", path + "gate_bias", "mlp -> mlp"),
        Weight(prefix + "up_proj.weight", path + "up", "mlp embed -> embed mlp"),
        Weight(prefix + "up_proj.bias", path + "up_bias", "mlp -> mlp"),
        Weight(prefix + "down_proj.weight", path + "down", "embed mlp -> mlp embed"),
        Weight(prefix + "down_proj.bias", path + "down_bias", "embed -> embed"),
    )


GATED_MLP = gated_mlp(_LAYER + "mlp.")


def norm_weights(prefix: str, **names: str) -> tuple[Weight, ...]:
    """Return the rows of norms with these names: `pre_mixer_norm="input_layernorm"`."""
    return tuple(
        Weight(f"{prefix}{name}.{tensor}", f"{path}.{weight}", "norm -> norm")
        for path, name in names.items()
        for tensor, weight in (("weight", "scale"), ("bias", "bias"))
    )


PRE_NORMS = norm_weights(_LAYER, pre_mixer_norm="input_layernorm", pre_mlp_norm="post_attention_layernorm")
_POST_NORMS = norm_weights(
    _LAYER, post_mixer_norm="post_attention_layernorm", post_mlp_norm="post_feedforward_layernorm"
)
_NORMS: dict[NormPlaces, tuple[Weight, ...]] = {
    "pre": PRE_NORMS,
    "post": _POST_NORMS,
    "sandwich": _POST_NORMS
    + norm_weights(_LAYER, pre_mixer_norm="input_layernorm", pre_mlp_norm="pre_feedforward_layernorm"),
}


def llama_weights(norms: NormPlaces = "pre", mlp: tuple[Weight, ...] = GATED_MLP) -> tuple[Weight, ...]:
    """Return the rows of a Llama, with norms at these positions of a block, and these rows for MLP or experts."""
    return ENDS + self_attention(_LAYER) + _NORMS[norms] + mlp
