"""Hugging Face directories of small models with encoders: weights, tokenizer, template, settings of processors."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import eqx_decoders as ed
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.gemma.audio import ConformerSizes, gemma4_audio
from eqx_decoders.families.gemma.gemma4 import gemma4
from eqx_decoders.families.gemma.gemma4_vision import gemma4_vision
from eqx_decoders.families.qwen.text import qwen3
from eqx_decoders.families.qwen.vision import qwen3_vl, qwen_vision
from eqx_decoders.families.vision_fields import EncoderSizes
from eqx_decoders.layers.mask import Causal, SlidingWindow
from eqx_decoders.layers.rope import Rope
from eqx_decoders.sharding.axes import named_leaves, replaced
from tests.models import filled


SOURCE = Path(__file__).parents[1] / "fixtures" / "chat_llama"
WORDS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = """{%- for message in messages %}{{ '<|' + message.role + '|>' }}
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
AUDIO_WORDS = ("<|audio|>", "<|audio>", "<audio|>")
AUDIO_TEMPLATE = TEMPLATE.replace("'image'", "'audio'").replace(
    "<|vision_start|><|image_pad|><|vision_end|>", "<|audio|>"
)
AUDIO_RULES = {
    "processor_class": "Gemma4Processor",
    "feature_extractor": {
        "feature_extractor_type": "Gemma4AudioFeatureExtractor",
        "feature_size": 8,
        "sampling_rate": 16_000,
        "frame_length": 320,
        "hop_length": 160,
        "padding_side": "left",
        "dither": 0.0,
        "per_bin_mean": None,
    },
}
RULES = {
    "processor_class": "Qwen3VLProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def vision_directory(folder: Path) -> Path:
    """Write it; the words of `WORDS` are tokens behind those of the tokenizer that it is made of."""
    tokenizer = tokenizer_with(WORDS)
    image, video = (tokenizer.token_to_id(word) for word in WORDS[:2])
    shape = DecoderSizes(
        vocab_size=tokenizer.get_vocab_size(),
        embed_dim=16,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        mlp_dim=24,
    )
    sizes = EncoderSizes(embed_dim=16, layers=2, heads=2, mlp_dim=24, out_dim=16, size=4)
    vision = qwen_vision(sizes, deepstack=(0,), side=4)
    made = qwen3_vl(qwen3(shape, rope=Rope(theta=5e6, sections=(2, 1, 1))), vision)
    assert made.media is not None
    media = dataclasses.replace(made.media, image_token=image, video_token=video)
    ed.save_hf(filled(dataclasses.replace(made, media=media), 3), folder)
    save_words(folder, tokenizer, TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(RULES))
    return folder


def audio_directory(folder: Path) -> Path:
    """Write that of a Gemma 4 with an encoder of audio alone."""
    tokenizer = tokenizer_with(AUDIO_WORDS)
    shape = DecoderSizes(
        vocab_size=tokenizer.get_vocab_size(),
        embed_dim=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        mlp_dim=24,
        activation="gelu_tanh",
    )
    sizes = ConformerSizes(embed_dim=8, layers=2, heads=2, mel_bands=8, filters=(8, 3), feature_dim=12)
    audio = gemma4_audio(sizes, out_dim=16)
    plain = gemma4(shape, masks=(SlidingWindow(8), Causal()), heads=((1, 8), (1, 8)))
    token = tokenizer.token_to_id("<|audio|>")
    model = filled(
        gemma4_vision(plain, None, audio=audio, image_spans=False, audio_token=token, image_token=0, video_token=1), 4
    )
    loose = {"input_min": -9.0, "input_max": 9.0, "output_min": -9.0, "output_max": 9.0}
    bounds = {path: loose.get(path.split(".")[-1]) for path in named_leaves(model)}
    kept = {path: jnp.full_like(named_leaves(model)[path], end) for path, end in bounds.items() if end is not None}
    ed.save_hf(replaced(model, kept), folder)
    save_words(folder, tokenizer, AUDIO_TEMPLATE)
    (folder / "processor_config.json").write_text(json.dumps(AUDIO_RULES))
    return folder


def tokenizer_with(words):
    """A tokenizer with these special tokens behind its own."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(SOURCE / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words])
    return tokenizer


def save_words(folder: Path, tokenizer, template: str) -> None:
    """Write the files of a tokenizer, and a chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        shutil.copyfile(SOURCE / name, folder / name)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)


def save_image(path: Path, width: int, height: int, seed: int = 0) -> Path:
    """An image of noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path
