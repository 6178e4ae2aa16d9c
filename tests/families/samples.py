"""One `config.json` of each family, in both spellings where there are two, and what the tests read from it."""

import json
import pathlib

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES


FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
SAMPLES = {
    f"{path.parent.name}/{path.stem}": json.loads(path.read_text())
    for path in sorted(FIXTURES.glob("*/config*.json"))
    if "model_type" in json.loads(path.read_text())
}


# Of families that have no checkpoint there (most have encoders), what describes a published model.
PUBLISHED = {
    "gemma3": "gemma3-4b-vision",
    "gemma4": "gemma4-e2b-vision",
    "llama4": "llama4-17b-16e-vision",
    "mimo": "mimo-7b",
    "idefics3": "smolvlm2-256m",
    "glm46v": "glm4.6v-flash-9b",
    "qwen3_vl": "qwen3-vl-2b",
    "qwen3_vl_moe": "qwen3-vl-30b-a3b",
    "qwen3_5": "qwen3.5-0.8b-vision",
    "qwen3_5_moe": "qwen3.5-35b-a3b-vision",
}
SAMPLES |= {f"{kind}/model": FAMILIES[kind].encode(ed.get_config(name)) for kind, name in PUBLISHED.items()}


def decode(content) -> ed.DecoderConfig:
    return FAMILIES[content["model_type"]].decode(content)[0]


def sample(kind: str, *missing: str, **keys) -> dict:
    """The settings of a family without some keys and with others."""
    content = next(content for content in SAMPLES.values() if content["model_type"] == kind)
    return {key: value for key, value in content.items() if key not in missing} | keys


def mixers(config) -> list:
    return [block.mixer for block in config.blocks]


WINDOW_KEYS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern")


def windows(kind: str, layers: int, **keys) -> list[int | None]:
    """The window of each layer; of the keys about windows only the given ones are there."""
    config = decode(sample(kind, *WINDOW_KEYS, num_hidden_layers=layers, **keys))
    return [getattr(mixer.mask, "size", None) for mixer in mixers(config)]
