"""Zamba 2 (Zyphra 2024): Mamba-2 in each layer, and transformer blocks whose weights several layers share."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError
from eqx_decoders.families.common import ENDS, LAYER, fused_mlp, renamed
from eqx_decoders.families.config_keys import ACTIVATIONS
from eqx_decoders.families.family import Family
from eqx_decoders.families.mamba.blocks import MambaSizes, mamba_settings, mamba_weights
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.families.setting_rows import Flag, Group, Integer, Layers, Number, Only, Rule, Values, Word
from eqx_decoders.families.weight_rows import Weight, norm_weights, self_attention
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.recurrent.mamba2 import Mamba2Config
from eqx_decoders.layers.rope import Rope
from eqx_decoders.layers.shared_transformer import AidedMixerConfig, SharedTransformerConfig
from eqx_decoders.model.decoder_config import DecoderConfig


def zamba2(
    shape: MambaSizes,
    *,
    mamba: Mamba2Config,
    transformer: SharedTransformerConfig,
    hybrid: tuple[bool, ...],
    rank: int,
    attention_adapters: bool = False,
) -> DecoderConfig:
    """Return a decoder with Mamba-2 in each layer and shared transformer blocks in hybrid layers.

    **Arguments:**

    - `shape`, `mamba`: sizes of the decoder, and its Mamba-2 mixer.
    - `transformer`: the shared transformer blocks. Hybrid layers use them in turn.
    - `hybrid`: for each layer, whether it also has a shared block.
    - `rank`: rank of the LoRA updates of the shared weights. Each hybrid layer has separate updates.
    - `attention_adapters`: whether queries, keys and values have LoRA updates, too; else only the MLP.
    """
    norm = RMSNormConfig(eps=shape.eps)
    blocks = []
    num_hybrid = 0
    for is_hybrid in hybrid:
        if is_hybrid:
            mixer = AidedMixerConfig(
                mixer=mamba, transformer=transformer, norm=norm, number=num_hybrid % transformer.count, mlp_rank=rank,
                attention_rank=rank if attention_adapters else None,
            )  # fmt: skip
            num_hybrid += 1
            blocks.append(BlockConfig(mixer=mixer, mlp=None))
        else:
            blocks.append(BlockConfig(mixer=mamba, mlp=None, pre_mixer_norm=norm))
    return DecoderConfig(
        vocab_size=shape.vocab_size, embed_dim=shape.embed_dim, blocks=tuple(blocks), final_norm=norm, tied=shape.tied,
        init_std=shape.init_std,
    )  # fmt: skip


def shared_transformer(
    shape: MambaSizes,
    *,
    num_heads: int,
    num_kv_heads: int,
    mlp_dim: int,
    count: int,
    rope: Rope | None,
    activation: str = "gelu",
) -> SharedTransformerConfig:
    """Return the shared transformer blocks.

    Attention reads the concatenation of the stream and the embeddings, so its heads have twice the usual size. Scores
    are scaled as for heads of the usual size.
    """
    head_dim = 2 * shape.embed_dim // num_heads
    attention = AttentionConfig(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rope=rope, query_scale=(head_dim / 2) ** -0.5
    )
    mlp = MLPConfig(mlp_dim=mlp_dim, activation=activation, fused=True)
    return SharedTransformerConfig(attention=attention, mlp=mlp, norm=RMSNormConfig(eps=shape.eps), count=count)


# --- config.json ---


def _hybrid_mixer(config: DecoderConfig) -> AidedMixerConfig:
    for block in config.blocks:
        if isinstance(block.mixer, AidedMixerConfig):
            return block.mixer
    raise ConversionError("DecoderConfig.blocks must have at least one layer with an AidedMixerConfig.")


_LAYER_TYPES = ("linear_attention", "hybrid")
# transformers' default: 1 for hybrid layers
_DEFAULT_HYBRID = (0,) + (0, 0, 0, 0, 0, 1) * 7 + (0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0)


def _read_hybrid(fields: Fields, values: Values) -> tuple[bool, ...]:
    num_layers = values["shape"].num_layers
    types = fields.words("layers_block_type", (*_LAYER_TYPES, "mamba"), num_layers)
    if types is not None:
        hybrid = tuple(layer_type == "hybrid" for layer_type in types)
    elif num_layers == len(_DEFAULT_HYBRID):
        hybrid = tuple(map(bool, _DEFAULT_HYBRID))
    else:
        raise fields.error(
            f"layers_block_type is missing, and its default needs num_hidden_layers={len(_DEFAULT_HYBRID)}: add it."
        )
    count = values["transformer"].count
    if sum(hybrid) < count:
        raise fields.error(
            f"num_mem_blocks={count} must be at most {sum(hybrid)}, the number of hybrid layers in layers_block_type."
        )
    return hybrid


def _write_hybrid(config: DecoderConfig) -> dict[str, Any]:
    hybrid = [isinstance(block.mixer, AidedMixerConfig) for block in config.blocks]
    return {
        "layers_block_type": [_LAYER_TYPES[is_hybrid] for is_hybrid in hybrid],
        "hybrid_layer_ids": [index for index, is_hybrid in enumerate(hybrid) if is_hybrid],
    }


def _read_rope(fields: Fields, values: Values) -> Rope | None:
    rope = read_rope(fields)
    return rope if fields.flag("use_mem_rope", False) else None


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    rope = _hybrid_mixer(config).transformer.attention.rope
    if rope is None:
        return {"use_mem_rope": False}
    return {"use_mem_rope": True, **write_rope(config)}


def _in_mixer(path: str) -> Any:
    return lambda config: functools.reduce(getattr, path.split("."), _hybrid_mixer(config))


_KEY_NAMES = {
    "mamba_n_heads": "n_mamba_heads", "mamba_d_head": "mamba_headdim", "mamba_n_groups": "mamba_ngroups",
    "mamba_conv_bias": "", "mamba_proj_bias": "add_bias_linear",
}  # fmt: skip
_SHAPE = (
    Integer("vocab_size", "vocab_size", 32_000),
    Integer("hidden_size", "embed_dim", 2560),
    Layers("num_hidden_layers", "blocks", 54, name="num_layers"),
    Number("rms_norm_eps", "final_norm.eps", 1e-5),
    Flag("tie_word_embeddings", "tied", True),
    Number("initializer_range", "init_std", 0.02),
)
_TRANSFORMER = (
    Integer("num_attention_heads", _in_mixer("transformer.attention.num_heads"), 32, name="num_heads"),
    Integer(
        "num_key_value_heads", _in_mixer("transformer.attention.num_kv_heads"), lambda values: values["num_heads"],
        name="num_kv_heads",
    ),
    Integer(
        "intermediate_size", _in_mixer("transformer.mlp.mlp_dim"), lambda values: 4 * values["shape"].embed_dim,
        name="mlp_dim",
    ),
    Integer("num_mem_blocks", _in_mixer("transformer.count"), 1, name="count"),
    Word("hidden_act", _in_mixer("transformer.mlp.activation"), "gelu", known=ACTIVATIONS, name="activation"),
    Rule("rope", _read_rope, _write_rope),
)  # fmt: skip
# transformers does not use `rms_norm_eps` in the norms of Mamba-2
_EPS = Rule("eps", lambda fields, values: 1e-5)


# --- tensors ---


def _with_path_prefix(rows: Iterable[Weight], old: str, new: str) -> tuple[Weight, ...]:
    """Return the rows with the prefix `old` of their paths replaced by `new`."""

    def replaced(path: str) -> str:
        return new + path.removeprefix(old) if path.startswith(old) else path

    return tuple(dataclasses.replace(row, path=replaced(row.path), needs=replaced(row.needs)) for row in rows)


_SHARED = LAYER + "shared_transformer."
# The first layer that uses a shared block (`{owner}`) also stores the LoRA updates of the other users (`{use}`).
_OWNER = "model.layers.{owner}.shared_transformer."
_HEADS = "(heads head_dim)"
_PROJECTIONS = {"q": ("query", "heads"), "k": ("key", "kv_heads"), "v": ("value", "kv_heads")}


def _adapter_weights() -> tuple[Weight, ...]:
    mlp = _OWNER + "feed_forward.gate_up_proj_adapter_list.{use}."
    rows = [
        Weight(mlp + "0.weight", "mixer.mlp_pair.down", "rank embed -> embed rank"),
        Weight(mlp + "1.weight", "mixer.mlp_pair.up", "(inputs mlp) rank -> rank inputs mlp"),
    ]
    for letter, (path, heads) in _PROJECTIONS.items():
        adapter = f"{_OWNER}self_attn.linear_{letter}_adapter_list.{{use}}."
        up_pattern = f"({heads} head_dim) rank -> rank {heads} head_dim"
        rows.append(Weight(adapter + "0.weight", f"mixer.{path}_pair.down", "rank embed -> embed rank"))
        rows.append(Weight(adapter + "1.weight", f"mixer.{path}_pair.up", up_pattern))
    return tuple(rows)


FAMILY = Family(
    model_type="zamba2",
    architecture="Zamba2ForCausalLM",
    settings=(
        Group("shape", MambaSizes, _SHAPE),
        mamba_settings(key_dim=64, keys=_KEY_NAMES, more=(_EPS,), step=Number("time_step_min", "mamba.dt_min", 0.001)),
        Group("transformer", shared_transformer, _TRANSFORMER, uses=("shape",)),
        Only("add_bias_linear", False),
        Only("use_long_context", False, written=True),
        Integer("adapter_rank", _in_mixer("mlp_rank"), 128, name="rank"),
        Flag(
            "use_shared_attention_adapter",
            lambda config: _hybrid_mixer(config).attention_rank is not None,
            False,
            name="attention_adapters",
        ),
        Rule("hybrid", _read_hybrid, _write_hybrid),
    ),
    build=zamba2,
    weights=(
        *renamed(ENDS, {"model.norm": "model.final_layernorm"}),
        *norm_weights(LAYER, pre_mixer_norm="input_layernorm"),
        *mamba_weights(LAYER + "mamba."),
        *norm_weights(LAYER + "mamba_decoder.", **{"mixer.norm": "input_layernorm"}),
        *_with_path_prefix(mamba_weights(LAYER + "mamba_decoder.mamba."), "mixer.", "mixer.mixer."),
        Weight(LAYER + "linear.weight", "mixer.linear", "mlp embed -> embed mlp"),
        *norm_weights(_SHARED, input_norm="input_layernorm", mlp_norm="pre_ff_layernorm"),
        *_with_path_prefix(self_attention(_SHARED), "mixer.", "attention."),
        Weight(_SHARED + "self_attn.o_proj.weight", "attention.out", f"latent {_HEADS} -> heads head_dim latent"),
        *fused_mlp(_SHARED + "feed_forward."),
        *_adapter_weights(),
    ),
    ignored_keys={
        "attention_head_dim attention_hidden_size hybrid_layer_ids kv_channels "
        "num_query_groups": "other keys determine it",
        "time_step_floor time_step_max": "initialization only",
        "use_conv_bias": "convolutions always have a bias",
        "chunk_size num_logits_to_keep use_mamba_kernels use_mem_eff_path": "runtime option; it changes no output",
    },
)


MODELS = {
    "zamba2-1.2b": dict(
        model_type="zamba2", hidden_size=2048, num_hidden_layers=38,
        layers_block_type=["hybrid" if layer % 6 == 5 else "linear_attention" for layer in range(38)],
        mamba_d_state=128, n_mamba_heads=64, use_mem_rope=True, use_shared_attention_adapter=True,
    ),
    "zamba2-2.7b": dict(model_type="zamba2", n_mamba_heads=80, num_mem_blocks=2),
    "zamba2-7b": dict(
        model_type="zamba2", hidden_size=3584, num_hidden_layers=81,
        layers_block_type=[
            "hybrid" if layer in (6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77) else "linear_attention"
            for layer in range(81)
        ],
        mamba_ngroups=2, n_mamba_heads=112, num_mem_blocks=2, use_mem_rope=True,
    ),
}  # fmt: skip
