"""Encode images and read a prompt with them, here and, where it is installed, with transformers."""

import dataclasses
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqx_decoders as ed
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.qwen.text import qwen3
from eqx_decoders.families.qwen.vision import qwen3_vl, qwen_vision
from eqx_decoders.families.vision_fields import EncoderSizes
from eqx_decoders.layers.rope import Rope


IMAGES, SIDE, WORDS = 8, 448, 64
REPEATS = 5


def image_config() -> ed.DecoderConfig:
    """Configure a Qwen3-VL of 110 M weights: an encoder of 12 layers, features of three depths, a decoder of 12."""
    shape = DecoderSizes(
        vocab_size=32_000, embed_dim=512, num_layers=12, num_heads=8, num_kv_heads=4, head_dim=64, mlp_dim=1536
    )
    sizes = EncoderSizes(embed_dim=512, layers=12, heads=8, mlp_dim=2048, out_dim=512, size=16)
    vision = qwen_vision(sizes, deepstack=(2, 5, 8), side=32)
    text = qwen3(shape, rope=Rope(theta=5e6, sections=(12, 10, 10)))
    config = qwen3_vl(text, vision)
    assert config.media is not None
    media = dataclasses.replace(config.media, image_token=31_998, video_token=31_999)
    return dataclasses.replace(config, media=media)


def inputs() -> dict[str, Any]:
    """Make tokens and patches of a prompt with all images, in transformers' names."""
    rows, generator = SIDE // 16, np.random.default_rng(0)
    row = np.concatenate([np.full((rows // 2) ** 2, 31_998), np.arange(1, 3)])
    ids = np.concatenate([*[row] * IMAGES, np.arange(3, 3 + WORDS)])[None]
    pixels = generator.normal(size=(IMAGES * rows * rows, 3 * 2 * 16 * 16)).astype(np.float32)
    grids = np.asarray([[1, rows, rows]] * IMAGES)
    return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grids}


def timed(run: Callable[[], Any]) -> float:
    """Return the median of a few runs, in seconds."""
    seconds = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def bench_images(_: Any) -> None:
    """Print a table of both sides."""
    arguments = inputs()
    ids = arguments.pop("input_ids")
    rows = []
    for dtype in ("float32", "bfloat16"):
        model = ed.init(image_config(), key=jax.random.key(0), precision=ed.Precision(params=dtype, compute=dtype))
        media = ed.Media.create(model.config, ids, **arguments)
        cache = ed.init_cache(model.config, 1, 2048, dtype=jnp.dtype(dtype))
        encoding = timed(lambda model=model, media=media: jax.block_until_ready(model.encode(media)))
        prefill = timed(
            lambda model=model, media=media, cache=cache: jax.block_until_ready(model(ids, cache=cache, media=media))
        )
        rows.append(("eqx_decoders", dtype, encoding, prefill))
        if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
            with tempfile.TemporaryDirectory() as folder:
                ed.save_hf(model, Path(folder) / "model")
                np.savez(Path(folder) / "inputs.npz", input_ids=ids, **arguments)
                output = subprocess.check_output([sys.executable, __file__, folder, dtype], text=True)
            encoding, prefill = map(float, output.split()[-2:])
            rows.append(("transformers", dtype, encoding, prefill))
    tokens = ids.shape[1]
    print(f"\n{IMAGES} images of {SIDE} x {SIDE} pixels before {WORDS} words: {tokens} tokens")
    for name, dtype, encoding, prefill in rows:
        print(f"{name:14} {dtype:9} encoding {encoding:6.2f} s, all of the prefill {prefill:6.2f} s")


def transformers_seconds(folder: str, dtype: str) -> None:
    """Measure the same with transformers, in a process of its own."""
    import torch
    import transformers

    arguments = {name: torch.from_numpy(value) for name, value in np.load(Path(folder) / "inputs.npz").items()}
    kind = transformers.Qwen3VLForConditionalGeneration
    model = kind.from_pretrained(Path(folder) / "model", dtype=getattr(torch, dtype)).eval()
    arguments["pixel_values"] = arguments["pixel_values"].to(model.dtype)
    arguments["mm_token_type_ids"] = (arguments["input_ids"] == 31_998).int()
    images = arguments["pixel_values"], arguments["image_grid_thw"]
    with torch.inference_mode():
        encoding = timed(lambda: model.get_image_features(*images))
        prefill = timed(lambda: model(**arguments, use_cache=True))
    print(encoding, prefill)


if __name__ == "__main__":
    transformers_seconds(*sys.argv[1:])
