"""Wrong arguments of public functions get an error that names the argument, without the type checks of the tests."""

import json
import subprocess
import sys

from tests.commands import ENVIRONMENT, ROOT
from tests.errors import assert_names


# Calls, and what their errors name.
MISTAKES = {
    "model(np.arange(12))": ["tokens", "(12,)", "[batch, length]"],
    "model(np.zeros((2, 3)))": ["tokens", "float64"],
    "model([[1, 2], [3, 4]], positions=np.zeros((2, 3), int))": ["positions", "(2, 3)", "tokens", "(2, 2)"],
    "model(np.ones((1, 2), int), segment_ids=np.ones((1, 2)))": ["segment_ids", "float64"],
    "model(np.full((1, 4), 99))": ["tokens", "99", "63", "DecoderConfig"],
    "model()": ["tokens", "embeds"],
    "model(np.ones((1, 2), int), embeds=np.ones((1, 2, 48)))": ["tokens", "embeds"],
    "model(embeds=np.ones((1, 2, 47)))": ["embeds", "(1, 2, 47)", "48"],
    "jax.jit(lambda tokens: model(tokens).logits)(np.ones(3, int))": ["tokens", "(3,)", "[batch, length]"],
    "ed.next_token_loss(model, ed.Batch(tokens=np.ones((1, 3))))": ["Batch.tokens", "float64"],
    "ed.next_token_loss(model, ed.Batch(tokens=np.ones((1, 3), int), loss_mask=np.ones((3,))))": ["loss_mask", "(3,)"],
    "ed.next_token_loss(model, ed.Batch(tokens=np.full((1, 3), -1)))": ["Batch.tokens", "-1", "63"],
    "ed.generate(model, [[]], max_new_tokens=2)": ["generate", "prompt=[[]]"],
    "ed.generate(model, [], max_new_tokens=2)": ["generate", "prompt=[]"],
    "ed.generate(model, [1, 2], max_new_tokens=2)": ["generate", "prompt=[1, 2]"],
    "ed.generate(model, [['a']], max_new_tokens=2)": ["generate", "prompt=[['a']]"],
    "ed.generate(model, [[1]], max_new_tokens=2, prompt_lengths=[1])": ["prompt_lengths"],
    "ed.generate(model, np.ones((2, 3)), max_new_tokens=2)": ["generate", "prompt", "float64"],
    "ed.generate(model, np.arange(3), max_new_tokens=2)": ["prompt", "(3,)", "[batch, length]"],
    "ed.BlockConfig(mixer=None, mlp=None, residual=3)": ["BlockConfig.residual", "3", "sequential"],
    "list(ed.stream(model, [[64]], max_new_tokens=2))": ["stream: prompt", "64", "63"],
    "ed.stream(model, [[1]], max_new_tokens=0)": ["stream: max_new_tokens=0"],
    "ed.generate(model, [[1]], max_new_tokens=2, key=0.5)": ["generate: key=0.5", "jax.random.key(0)"],
    "ed.generate(model, [[1]], max_new_tokens=2, sampler='greedy')": ["generate: sampler='greedy'", "Greedy()"],
    "ed.generate(model, [[1]], max_new_tokens=2, pad_id=None)": ["generate: pad_id=None"],
}
CALLER = """
import json, sys
import jax, numpy as np
import eqx_decoders as ed

norm = ed.layers.RMSNormConfig()
block = ed.BlockConfig(mixer=None, mlp=ed.layers.MLPConfig(mlp_dim=8), pre_mlp_norm=norm)
config = ed.DecoderConfig(vocab_size=64, embed_dim=48, blocks=(block,), final_norm=norm)
model, found = ed.init(config, key=jax.random.key(0)), {}
for call in json.load(sys.stdin):
    try:
        found[call] = repr(eval(call))
    except ed.ConfigError as error:
        found[call] = str(error)
    except Exception as error:
        found[call] = type(error).__name__
print(json.dumps(found))
"""


def test_errors_name_the_wrong_arguments():
    command = [sys.executable, "-c", "import eqx_decoders.layers" + CALLER]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, input=json.dumps(list(MISTAKES))
    )
    assert done.returncode == 0, done.stderr[-3000:]
    messages = json.loads(done.stdout)
    assert messages.keys() == MISTAKES.keys()
    for call, names in MISTAKES.items():
        assert_names(messages[call], *names)
