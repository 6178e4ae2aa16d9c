"""Model summaries against numbers computed by hand."""

import dataclasses
import re

import jax.numpy as jnp
import pytest

import eqx_decoders as ed
from eqx_decoders.families import registry
from eqx_decoders.families.registry import list_models
from tests.models import rich_decoder
from tests.tools.make_models_page import PAGE, row


@pytest.mark.slow(fast=("llama3-8b-8.03-8.03", "qwen3-30b-a3b-30.53-3.35"))
@pytest.mark.parametrize(
    "name, total, active",
    [
        ("llama3-8b", 8.03, 8.03),
        ("qwen3-30b-a3b", 30.53, 3.35),
        ("deepseek3-671b", 671.03, 37.55),
        ("gemma4-e2b-vision", 5.10, 2.76),  # with scalar weights in each layer of the encoders
    ],
)
def test_summaries_of_published_models(name, total, active):
    info = ed.describe_model(name)
    assert (info.parameters / 1e9, info.active_parameters / 1e9) == pytest.approx((total, active), abs=0.006)
    assert info.name == name and info.parameters == ed.count_parameters(ed.get_config(name))
    assert str(info).startswith(f"{name}: {total:,.2f} B weights, {active:,.2f} B active; a cache in bfloat16 holds ")


def test_bias_of_the_head_counts_as_active():
    info = ed.describe_model("gptj-6b")
    assert info.active_parameters == info.parameters


def test_cache_sizes():
    """Full layers store keys, values and the position per token; windows have a fixed size per sequence."""
    config = rich_decoder(4)  # two layers with a window of 5, two without; 2 heads of 8 features
    info = ed.describe_model(config, dtype=jnp.float32)
    keys_and_values = 2 * 2 * 8 * 4
    assert info.bytes_per_token == 2 * keys_and_values + 4
    assert info.bytes_per_sequence == 5 * (2 * keys_and_values + 4) + 4  # and the length of each row
    assert info.layers == {"Attention (window 5)": 2, "Attention": 2}
    assert info.name is None and info.dtype == "float32"
    assert ed.describe_model(dataclasses.replace(config, blocks=config.blocks[:1])).bytes_per_token == 0


ROWS = {line.split("|")[1].strip(): f"{line}\n" for line in PAGE.read_text().splitlines() if line.startswith("| `")}
SOME = list(ROWS)[::11]


def test_model_page_lists_every_model():
    names = [name for text in ROWS for name in re.findall(r"`(.*?)`", text)]
    assert sorted(names) == sorted(set(list_models()) - set(registry._REGISTERED_MODELS))


@pytest.mark.slow(fast=(SOME[0], SOME[-1]))
@pytest.mark.parametrize("names", SOME)
def test_model_page_is_up_to_date(names):
    assert row(tuple(re.findall(r"`(.*?)`", names))) == ROWS[names], "run python -m tests.tools.make_models_page"
