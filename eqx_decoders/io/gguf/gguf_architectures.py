"""Architectures of llama.cpp that are families here: one row each.

llama.cpp's programs are the source (`src/models/*.cpp`), and its converter for what files say (`conversion/*.py`).
"""

from eqx_decoders.io.gguf.gguf_table import (
    LAYER_NORM,
    RMS,
    WINDOW,
    Architecture,
    Found,
    Metadata,
    Settings,
    read_masks,
    write_masks,
)


_SILU = {"hidden_act": "silu"}
_BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_OSS = "model.layers.{layer}.mlp.experts"
_EXPERT_SIZE = {"expert_feed_forward_length": "moe_intermediate_size"}


def _query_scalar(found: Found, settings: Settings, largest: int) -> None:
    """Set the scale of scores, which llama.cpp knows by the number of layers: the largest models have their own."""
    heads, embed = settings["num_attention_heads"], settings["hidden_size"]
    big = settings["num_hidden_layers"] == largest
    settings["query_pre_attn_scalar"] = embed // heads if big else settings["head_dim"]


def _read_gemma2(found: Found, settings: Settings) -> None:
    read_masks(found, settings, 2, 4096)
    _query_scalar(found, settings, 46)


def _read_gemma3(found: Found, settings: Settings) -> None:
    read_masks(found, settings, 6)
    _query_scalar(found, settings, 62)
    _read_local_rope(found, settings, 10_000.0)


def _read_local_rope(found: Found, settings: Settings, theta: float) -> None:
    """Read the rotary embedding of layers with a window, which has a base of its own and is never scaled."""
    local = found.fields.number("rope.freq_base_swa", theta)
    tables = {"full_attention": settings["rope_parameters"], "sliding_attention": {"rope_theta": local}}
    settings["rope_parameters"] = {
        kind: {"rope_type": "default", **table} for kind, table in tables.items() if kind in settings["layer_types"]
    }


def _write_windows(settings: Settings, metadata: Metadata, period: int) -> None:
    """Add the masks, and the rotary embedding of layers with a window."""
    write_masks(settings, metadata, period)
    metadata.values["rope.freq_base_swa"] = settings["rope_parameters"].get("sliding_attention", {}).get("rope_theta")


def _read_olmo3(found: Found, settings: Settings) -> None:
    read_masks(found, settings, 4)
    _read_local_rope(found, settings, settings["rope_parameters"]["rope_theta"])


def _read_phi3(found: Found, settings: Settings) -> None:
    settings["sliding_window"] = found.fields.integer(WINDOW, None, least=0) or None
    length = settings["rope_parameters"].get("original_max_position_embeddings")
    found.fields.take("rope.scaling.original_context_length", None)
    if length is not None:
        settings["original_max_position_embeddings"] = length


def _write_phi3(settings: Settings, metadata: Metadata) -> None:
    metadata.values[WINDOW] = settings.get("sliding_window") or 0
    length = settings.get("original_max_position_embeddings") or settings["max_position_embeddings"]
    metadata.values["rope.scaling.original_context_length"] = length


def _read_smollm3(found: Found, settings: Settings) -> None:
    layers = settings["num_hidden_layers"]
    settings["no_rope_layers"] = [int((index + 1) % 4 != 0) for index in range(layers)]
    settings["layer_types"] = ["full_attention"] * layers


def _read_lfm2(found: Found, settings: Settings) -> None:
    heads, layers = found.fields.take("attention.head_count_kv"), settings["num_hidden_layers"]
    heads = heads if isinstance(heads, list) else [heads] * layers
    with_attention = {count for count in heads if count}
    if len(heads) != layers or len(with_attention) != 1:
        raise found.fields.error("attention.head_count_kv must have 0 or one number of heads for each layer.")
    settings["layer_types"] = ["full_attention" if count else "conv" for count in heads]
    settings["num_key_value_heads"] = with_attention.pop()


def _write_lfm2(settings: Settings, metadata: Metadata) -> None:
    heads, kinds = settings["num_key_value_heads"], settings["layer_types"]
    metadata.values["attention.head_count_kv"] = [heads if kind == "full_attention" else 0 for kind in kinds]


def _read_stablelm(found: Found, settings: Settings) -> None:
    found.fields.flag("use_parallel_residual", True)  # the program asks the tensors
    settings["use_parallel_residual"] = not found.has("ffn_norm.weight")


def _write_stablelm(settings: Settings, metadata: Metadata) -> None:
    metadata.values["use_parallel_residual"] = settings.get("use_parallel_residual")


def _read_gpt_oss(found: Found, settings: Settings) -> None:
    read_masks(found, settings, 2)
    size = found.fields.integer("expert_feed_forward_length", settings["intermediate_size"])
    settings["intermediate_size"] = size
    if settings["rope_parameters"].get("rope_type") == "yarn":
        settings["rope_parameters"]["truncate"] = False  # as published: files do not say it


_LLAMA = Architecture(name="llama", family="llama", fixed=_SILU, flags=_BIASES, in_pairs=True)
_QWEN2 = Architecture(name="qwen2", family="qwen2", fixed={**_SILU, "use_sliding_window": False}, head_dim=False)
_QWEN3 = Architecture(
    name="qwen3", family="qwen3", fixed={**_SILU, "use_sliding_window": False, "attention_bias": False}, theta=1e6
)
_GEMMA = Architecture(
    name="gemma", family="gemma", fixed={"hidden_act": "gelu_pytorch_tanh", "attention_bias": False}, plus_one=True
)
_CAPS = {"final_logit_softcapping": "final_logit_softcapping"}

ARCHITECTURES: tuple[Architecture, ...] = (
    _LLAMA,
    Architecture(
        name="llama",
        family="mixtral",
        fixed={**_SILU, "sliding_window": None},
        keys={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        in_pairs=True,
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
        added={"ffn_gate_inp_shexp.weight": 0},
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
        keys={**_CAPS, "attn_logit_softcapping": "attn_logit_softcapping"},
        plus_one=True,
        read=_read_gemma2,
        write=lambda settings, metadata: write_masks(settings, metadata, 2),
    ),
    Architecture(
        name="gemma3",
        family="gemma3_text",
        fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
        keys=_CAPS,
        theta=1e6,
        plus_one=True,
        read=_read_gemma3,
        write=lambda settings, metadata: _write_windows(settings, metadata, 6),
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
        in_pairs=True,
        read=lambda found, settings: found.fields.allow_only(LAYER_NORM, 1e-5),
        write=lambda settings, metadata: metadata.values.update({LAYER_NORM: 1e-5}),
    ),
    Architecture(name="olmo2", family="olmo2", fixed={**_SILU, "attention_bias": False}),
    Architecture(
        name="olmo2",
        family="olmo3",
        fixed={**_SILU, "attention_bias": False},
        read=_read_olmo3,
        write=lambda settings, metadata: _write_windows(settings, metadata, 4),
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
        in_pairs=True,
    ),
    Architecture(
        name="smollm3",
        family="smollm3",
        fixed={**_SILU, "attention_bias": False, "mlp_bias": False, "use_sliding_window": False},
        in_pairs=True,
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
        in_pairs=True,
    ),
    Architecture(name="ernie4_5", family="ernie4_5", fixed={**_SILU, "use_bias": False}),
    Architecture(
        name="nemotron",
        family="nemotron",
        fixed={"hidden_act": "relu2"},
        flags=_BIASES,
        norm=(LAYER_NORM, "norm_eps"),
        rope="partial",
        plus_one=True,
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
        joined={
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
        added={"shortconv.conv.weight": 1},
        norm=(RMS, "norm_eps"),
        head_dim=False,
        read=_read_lfm2,
        write=_write_lfm2,
    ),
)


def find_architecture(name: str, found: Found) -> Architecture:
    """Return the row of an architecture, by what a file says. Raises ConversionError."""
    rows = [row for row in ARCHITECTURES if row.name == name]
    if not rows:
        known = ", ".join(dict.fromkeys(row.name for row in ARCHITECTURES))
        raise found.fields.error(
            f"general.architecture={name[:40]!r} is not read. Known: {known}. Load a directory of Hugging Face instead."
        )
    if len(rows) == 1:
        return rows[0]
    # a family with experts, or with windows, of the same name
    other = any(key in found.fields.content and found.fields.content[key] for key in ("expert_count", WINDOW))
    return rows[other]
