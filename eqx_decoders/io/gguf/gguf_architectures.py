"""Table of the architectures of llama.cpp that can be loaded and saved.

The sources are llama.cpp's models (`src/models/*.cpp`) and, for the contents of files, its converter
(`conversion/*.py`). To add an architecture, add a row to `ARCHITECTURES`: `Architecture` describes the fields.
"""

from eqx_decoders.io.gguf.gguf_table import (
    LAYER_NORM,
    RMS,
    WINDOW,
    Architecture,
    FileMetadata,
    NewMetadata,
    Settings,
    read_masks,
    write_masks,
)


_SILU = {"hidden_act": "silu"}
_BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_OSS = "model.layers.{layer}.mlp.experts"
_EXPERT_SIZE = {"expert_feed_forward_length": "moe_intermediate_size"}


def _query_scalar(found: FileMetadata, settings: Settings, largest: int) -> None:
    """Set the scale of attention scores. Files do not contain it: in llama.cpp, it depends on the number of layers.

    `largest`: number of layers of the largest model of the family, which has another scale.
    """
    is_largest = settings["num_hidden_layers"] == largest
    default = settings["hidden_size"] // settings["num_attention_heads"]
    settings["query_pre_attn_scalar"] = default if is_largest else settings["head_dim"]


def _read_gemma2(found: FileMetadata, settings: Settings) -> None:
    read_masks(found, settings, 2, 4096)
    _query_scalar(found, settings, 46)


def _read_gemma3(found: FileMetadata, settings: Settings) -> None:
    read_masks(found, settings, 6)
    _query_scalar(found, settings, 62)
    _read_local_rope(found, settings, 10_000.0)


def _read_local_rope(found: FileMetadata, settings: Settings, theta: float) -> None:
    """Read the RoPE of layers with a sliding window, which has a separate base, and is never scaled.

    `theta`: default base.
    """
    local_theta = found.fields.number("rope.freq_base_swa", theta)
    ropes = {"full_attention": settings["rope_parameters"], "sliding_attention": {"rope_theta": local_theta}}
    settings["rope_parameters"] = {
        layer_type: {"rope_type": "default", **rope}
        for layer_type, rope in ropes.items()
        if layer_type in settings["layer_types"]
    }


def _write_masks_and_local_rope(settings: Settings, metadata: NewMetadata, period: int) -> None:
    write_masks(settings, metadata, period)
    metadata.values["rope.freq_base_swa"] = settings["rope_parameters"].get("sliding_attention", {}).get("rope_theta")


def _read_olmo3(found: FileMetadata, settings: Settings) -> None:
    read_masks(found, settings, 4)
    _read_local_rope(found, settings, settings["rope_parameters"]["rope_theta"])


def _read_phi3(found: FileMetadata, settings: Settings) -> None:
    settings["sliding_window"] = found.fields.integer(WINDOW, None, least=0) or None
    length = settings["rope_parameters"].get("original_max_position_embeddings")
    found.fields.take("rope.scaling.original_context_length", None)
    if length is not None:
        settings["original_max_position_embeddings"] = length


def _write_phi3(settings: Settings, metadata: NewMetadata) -> None:
    metadata.values[WINDOW] = settings.get("sliding_window") or 0
    length = settings.get("original_max_position_embeddings") or settings["max_position_embeddings"]
    metadata.values["rope.scaling.original_context_length"] = length


def _read_smollm3(found: FileMetadata, settings: Settings) -> None:
    layers = settings["num_hidden_layers"]
    settings["no_rope_layers"] = [int((index + 1) % 4 != 0) for index in range(layers)]
    settings["layer_types"] = ["full_attention"] * layers


def _read_lfm2(found: FileMetadata, settings: Settings) -> None:
    num_layers = settings["num_hidden_layers"]
    heads = found.fields.take("attention.head_count_kv")
    heads = heads if isinstance(heads, list) else [heads] * num_layers
    attention_heads = {count for count in heads if count}
    if len(heads) != num_layers or len(attention_heads) != 1:
        raise found.fields.error(
            f"attention.head_count_kv={str(heads)[:80]} must have a number for each layer: 0 for convolutions, and the "
            "same number of heads for all layers with attention."
        )
    settings["layer_types"] = ["full_attention" if count else "conv" for count in heads]
    settings["num_key_value_heads"] = attention_heads.pop()


def _write_lfm2(settings: Settings, metadata: NewMetadata) -> None:
    heads, kinds = settings["num_key_value_heads"], settings["layer_types"]
    metadata.values["attention.head_count_kv"] = [heads if kind == "full_attention" else 0 for kind in kinds]


def _read_stablelm(found: FileMetadata, settings: Settings) -> None:
    found.fields.flag("use_parallel_residual", True)  # llama.cpp ignores it and looks at the tensors
    settings["use_parallel_residual"] = not found.has("ffn_norm.weight")


def _write_stablelm(settings: Settings, metadata: NewMetadata) -> None:
    metadata.values["use_parallel_residual"] = settings.get("use_parallel_residual")


def _read_gpt_oss(found: FileMetadata, settings: Settings) -> None:
    read_masks(found, settings, 2)
    size = found.fields.integer("expert_feed_forward_length", settings["intermediate_size"])
    settings["intermediate_size"] = size
    if settings["rope_parameters"].get("rope_type") == "yarn":
        settings["rope_parameters"]["truncate"] = False  # as in the published model: files do not contain it


_LLAMA = Architecture(name="llama", family="llama", fixed=_SILU, flags=_BIASES, interleaved_rope=True)
_QWEN2 = Architecture(name="qwen2", family="qwen2", fixed={**_SILU, "use_sliding_window": False}, head_dim=False)
_QWEN3 = Architecture(
    name="qwen3", family="qwen3", fixed={**_SILU, "use_sliding_window": False, "attention_bias": False}, theta=1e6
)
_GEMMA = Architecture(
    name="gemma",
    family="gemma",
    fixed={"hidden_act": "gelu_pytorch_tanh", "attention_bias": False},
    norms_plus_one=True,
)
_SOFTCAPPING = {"final_logit_softcapping": "final_logit_softcapping"}

ARCHITECTURES: tuple[Architecture, ...] = (
    _LLAMA,
    Architecture(
        name="llama",
        family="mixtral",
        fixed={**_SILU, "sliding_window": None},
        keys={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        interleaved_rope=True,
    ),
    _QWEN2,
    Architecture(
        name="qwen2moe",
        family="qwen2_moe",
        fixed={
            **_SILU,
            "use_sliding_window": False,
            "norm_topk_prob": False,
            "qkv_bias": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        keys={**_EXPERTS, **_EXPERT_SIZE, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        head_dim=False,
        extra_axes={"ffn_gate_inp_shexp.weight": 0},
    ),
    _QWEN3,
    Architecture(
        name="qwen3moe",
        family="qwen3_moe",
        fixed={**_QWEN3.fixed, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        keys={**_EXPERTS, **_EXPERT_SIZE},
        theta=1e6,
    ),
    _GEMMA,
    Architecture(
        name="gemma2",
        family="gemma2",
        fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
        keys={**_SOFTCAPPING, "attn_logit_softcapping": "attn_logit_softcapping"},
        norms_plus_one=True,
        read=_read_gemma2,
        write=lambda settings, metadata: write_masks(settings, metadata, 2),
    ),
    Architecture(
        name="gemma3",
        family="gemma3_text",
        fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
        keys=_SOFTCAPPING,
        theta=1e6,
        norms_plus_one=True,
        read=_read_gemma3,
        write=lambda settings, metadata: _write_masks_and_local_rope(settings, metadata, 6),
    ),
    Architecture(
        name="phi3",
        family="phi3",
        fixed=_SILU,
        head_dim=False,
        rope="partial",
        read=_read_phi3,
        write=_write_phi3,
    ),
    Architecture(
        name="phi2",
        family="phi",
        fixed={"hidden_act": "gelu_new", "qk_layernorm": False},
        norm=(LAYER_NORM, "layer_norm_eps"),
        head_dim=False,
        rope="partial",
    ),
    Architecture(
        name="gpt2",
        family="gpt2",
        fixed={"activation_function": "gelu_new"},
        renamed={
            "num_hidden_layers": "n_layer",
            "max_position_embeddings": "n_positions",
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_attention_heads": "n_head",
            "num_key_value_heads": None,
        },
        norm=(LAYER_NORM, "layer_norm_epsilon"),
        head_dim=False,
        rope=None,
        transposed=("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"),
    ),
    Architecture(
        name="olmo",
        family="olmo",
        fixed={**_SILU, "attention_bias": False},
        keys={"attention.clamp_kqv": "clip_qkv"},
        norm=None,
        interleaved_rope=True,
        read=lambda found, settings: found.fields.allow_only(LAYER_NORM, 1e-5),
        write=lambda settings, metadata: metadata.values.update({LAYER_NORM: 1e-5}),
    ),
    Architecture(name="olmo2", family="olmo2", fixed={**_SILU, "attention_bias": False}),
    Architecture(
        name="olmo2",
        family="olmo3",
        fixed={**_SILU, "attention_bias": False},
        read=_read_olmo3,
        write=lambda settings, metadata: _write_masks_and_local_rope(settings, metadata, 4),
    ),
    Architecture(
        name="olmoe",
        family="olmoe",
        fixed={**_SILU, "attention_bias": False, "norm_topk_prob": False},
        keys=_EXPERTS,
        read=lambda found, settings: found.fields.take("expert_feed_forward_length", None),
    ),
    Architecture(
        name="granite",
        family="granite",
        fixed=_SILU,
        flags=_BIASES,
        keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        interleaved_rope=True,
    ),
    Architecture(
        name="smollm3",
        family="smollm3",
        fixed={**_SILU, "attention_bias": False, "mlp_bias": False, "use_sliding_window": False},
        interleaved_rope=True,
        read=_read_smollm3,
    ),
    Architecture(
        name="starcoder2",
        family="starcoder2",
        fixed={"hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
        flags={"use_bias": "attn_q.bias"},
        norm=(LAYER_NORM, "norm_epsilon"),
    ),
    Architecture(
        name="stablelm",
        family="stablelm",
        fixed={**_SILU, "qk_layernorm": False},
        flags={"use_qkv_bias": "attn_q.bias"},
        norm=(LAYER_NORM, "layer_norm_eps"),
        head_dim=False,
        rope="partial",
        read=_read_stablelm,
        write=_write_stablelm,
    ),
    Architecture(
        name="command-r",
        family="cohere",
        fixed={**_SILU, "attention_bias": False},
        flags={"use_qk_norm": "attn_q_norm.weight"},
        keys={"logit_scale": "logit_scale"},
        norm=(LAYER_NORM, "layer_norm_eps"),
    ),
    Architecture(
        name="cohere2",
        family="cohere2",
        fixed={**_SILU, "attention_bias": False},
        keys={"logit_scale": "logit_scale"},
        norm=(LAYER_NORM, "layer_norm_eps"),
        read=lambda found, settings: read_masks(found, settings, 4),
        write=lambda settings, metadata: write_masks(settings, metadata, 4),
    ),
    Architecture(
        name="seed_oss",
        family="seed_oss",
        fixed=_SILU,
        flags={**_BIASES, "attention_out_bias": "attn_output.bias"},
    ),
    Architecture(
        name="arcee",
        family="arcee",
        fixed={"hidden_act": "relu2", "attention_bias": False},
        flags={"mlp_bias": "ffn_up.bias"},
        interleaved_rope=True,
    ),
    Architecture(name="ernie4_5", family="ernie4_5", fixed={**_SILU, "use_bias": False}),
    Architecture(
        name="nemotron",
        family="nemotron",
        fixed={"hidden_act": "relu2"},
        flags=_BIASES,
        norm=(LAYER_NORM, "norm_eps"),
        rope="partial",
        norms_plus_one=True,
        read=lambda found, settings: found.fields.take(RMS, None),
    ),
    Architecture(
        name="gpt-oss",
        family="gpt_oss",
        fixed={**_SILU, "attention_bias": True, "swiglu_limit": 7.0},
        keys={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        transposed=("ffn_down_exps.weight", "ffn_gate_exps.weight"),
        names={
            "blk.{layer}.attn_sinks.weight": "model.layers.{layer}.self_attn.sinks",
            "blk.{layer}.ffn_down_exps.weight": f"{_OSS}.down_proj",
            "blk.{layer}.ffn_down_exps.bias": f"{_OSS}.down_proj_bias",
        },
        interleaved_tensors={
            f"{_OSS}.gate_up_proj{end}": (f"blk.{{layer}}.ffn_gate_exps.{kind}", f"blk.{{layer}}.ffn_up_exps.{kind}")
            for end, kind in (("", "weight"), ("_bias", "bias"))
        },
        read=_read_gpt_oss,
    ),
    Architecture(
        name="lfm2",
        family="lfm2",
        fixed={"block_auto_adjust_ff_dim": False},
        keys={"shortconv.l_cache": "conv_L_cache"},
        renamed={"num_key_value_heads": None},
        extra_axes={"shortconv.conv.weight": 1},
        norm=(RMS, "norm_eps"),
        head_dim=False,
        read=_read_lfm2,
        write=_write_lfm2,
    ),
)


def find_architecture(name: str, found: FileMetadata) -> Architecture:
    """Return the architecture with a name. Raises ConversionError for unknown names.

    If two families share the name, the metadata decide: the second family has experts or a sliding window.
    """
    architectures = [architecture for architecture in ARCHITECTURES if architecture.name == name]
    if not architectures:
        known = ", ".join(dict.fromkeys(architecture.name for architecture in ARCHITECTURES))
        raise found.fields.error(
            f"general.architecture={name[:40]!r} is not supported. Supported: {known}. Load a Hugging Face directory."
        )
    if len(architectures) == 1:
        return architectures[0]
    has_experts_or_window = any(found.fields.content.get(key) for key in ("expert_count", WINDOW))
    return architectures[1] if has_experts_or_window else architectures[0]
