"""Wrong arguments of public functions get an error that names the argument, without the type checks of the tests."""

import json
import subprocess
import sys

from tests.commands import ENVIRONMENT, ROOT


MISTAKES = {
    "model(np.arange(12))": "tokens of shape (12,) must be [batch, length]: add the batch, tokens[None].",
    "model(np.zeros((2, 3)))": "tokens of dtype float64 must be integers: .astype(int).",
    "model([[1, 2], [3, 4]], positions=np.zeros((2, 3), int))": "positions of shape (2, 3) must be shaped like tokens",
    "model(np.ones((1, 2), int), segment_ids=np.ones((1, 2)))": "segment_ids of dtype float64 must be integers",
    "model(np.full((1, 4), 99))": "tokens holds 99, 99, 99, 99, but ids must be 0 to 63, below DecoderConfig",
    "model()": "A decoder takes either tokens or embeds: give one of them.",
    "model(np.ones((1, 2), int), embeds=np.ones((1, 2, 48)))": "A decoder takes either tokens or embeds",
    "model(embeds=np.ones((1, 2, 47)))": "embeds of shape (1, 2, 47) must be [batch, length, 48].",
    "jax.jit(lambda tokens: model(tokens).logits)(np.ones(3, int))": "tokens of shape (3,) must be [batch, length]",
    "ed.next_token_loss(model, ed.Batch(tokens=np.ones((1, 3))))": "Batch.tokens of dtype float64 must be integers",
    "ed.next_token_loss(model, ed.Batch(tokens=np.ones((1, 3), int), loss_mask=np.ones((3,))))": "loss_mask of shape",
    "ed.next_token_loss(model, ed.Batch(tokens=np.full((1, 3), -1)))": "Batch.tokens holds -1, -1, -1, but ids must be",
    "ed.generate(model, [[]], max_new_tokens=2)": "generate: prompt=[[]] must hold lists of token ids",
    "ed.generate(model, [], max_new_tokens=2)": "generate: prompt=[] must hold lists of token ids",
    "ed.generate(model, [1, 2], max_new_tokens=2)": "generate: prompt=[1, 2] must hold lists of token ids",
    "ed.generate(model, [['a']], max_new_tokens=2)": "generate: prompt=[['a']] must hold lists of token ids",
    "ed.generate(model, [[1]], max_new_tokens=2, prompt_lengths=[1])": "prompt_lengths belongs to a padded array",
    "ed.generate(model, np.ones((2, 3)), max_new_tokens=2)": "generate: prompt of dtype float64 must be integers",
    "ed.generate(model, np.arange(3), max_new_tokens=2)": "prompt of shape (3,) must be [batch, length]: add the batch",
    "list(ed.stream(model, [[64]], max_new_tokens=2))": "generate: prompt holds 64, but ids must be 0 to 63",
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
        found[call] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def test_wrong_arguments_get_a_sentence_with_their_name():
    command = [sys.executable, "-c", "import eqx_decoders.layers" + CALLER]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, input=json.dumps(list(MISTAKES))
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {call: text[: len(MISTAKES[call])] for call, text in found.items() if MISTAKES[call] not in text} == {}
