"""A Hugging Face directory of a small model that sees: weights, tokenizer, chat template, settings of its processor."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np

import eqx_decoders as ed
from eqx_decoders.families.qwen3 import qwen3
from eqx_decoders.families.qwen3_vl import qwen3_vl
from eqx_decoders.families.qwen_vision import qwen_vision
from eqx_decoders.families.shape import Shape
from eqx_decoders.layers.rope import Rope
from tests.models import filled


SOURCE = Path(__file__).parent.parent / "fixtures" / "chat_llama"
WORDS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = """{%- for message in messages %}{{ '<|' + message.role + '|>' }}
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
RULES = {
    "processor_class": "Qwen3VLProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def seeing_directory(folder: Path) -> Path:
    """Write it; the words of `WORDS` are tokens behind those of the tokenizer that it is made of."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(SOURCE / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in WORDS])
    image, video = (tokenizer.token_to_id(word) for word in WORDS[:2])
    shape = Shape(
        vocab_size=tokenizer.get_vocab_size(),
        embed_dim=16,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        mlp_dim=24,
    )
    vision = qwen_vision(embed_dim=16, layers=2, heads=2, mlp_dim=24, out_dim=16, deepstack=(0,), size=4, side=4)
    made = qwen3_vl(qwen3(shape, rope=Rope(theta=5e6, sections=(2, 1, 1))), vision)
    assert made.media is not None
    media = dataclasses.replace(made.media, image_token=image, video_token=video)
    ed.save_hf(filled(dataclasses.replace(made, media=media), 3), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        shutil.copyfile(SOURCE / name, folder / name)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(RULES))
    return folder


def save_picture(path: Path, width: int, height: int, seed: int = 0) -> Path:
    """A picture of noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path
