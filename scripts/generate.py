"""Let a trained model write.

    python scripts/generate.py --run-dir runs/tiny --prompt "def main("

Without a prompt it asks for one after another.
"""

import dataclasses
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np

from eqx_decoders import Decoder, Greedy, Sample, abstract, get_config, stream
from eqx_decoders.errors import ConfigError, EqxDecodersError, check, check_integer, need_extra
from eqx_decoders.io.checkpoint import load_weights
from eqx_decoders.io.rundir import exit_code
from eqx_decoders.training.settings import load_settings
from eqx_decoders.training.tokenizer import StreamDecoder, Tokenizer, load_tokenizer, prompt_ids


PROMPT_BUCKET = 64  # prompts are padded to a multiple of this, so that few programs are compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Let a trained model write; without a prompt, ask for one after another."""

    run_dir: str = "runs/tiny"
    """Run directory of scripts/train.py."""
    prompt: str | None = None
    """Text to continue; None: read prompts from the terminal, a line each."""
    step: int | None = None
    """Checkpoint to load; None: the newest."""
    max_new_tokens: int = 200
    """Tokens to write at most."""
    temperature: float = 0.7
    """Divides logits; 0: always the most likely token."""
    top_k: int | None = None
    """Draw from the k most likely tokens only."""
    top_p: float | None = 0.95
    """Draw from the most likely tokens that together reach this probability."""
    min_p: float | None = None
    """Draw from tokens at least this times as likely as the most likely one."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self):
        check_integer("max_new_tokens", self.max_new_tokens)
        check(self.temperature >= 0, f"temperature={self.temperature} must be 0 or above.")
        self.sampler()

    def sampler(self) -> Greedy | Sample:
        """How tokens are drawn."""
        if self.temperature == 0:
            return Greedy()
        return Sample(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


def main() -> int:
    try:
        if find_spec("tyro") is None:
            raise need_extra("tyro", "train")
        import tyro

        config = tyro.cli(GenerateConfig, description=__doc__)
        model, tokenizer = load(config)
        if config.prompt is not None:
            write(model, tokenizer, config, config.prompt)
            return 0
        return converse(model, tokenizer, config)
    except EqxDecodersError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)


def load(config: GenerateConfig) -> tuple[Decoder, Tokenizer]:
    """The model and the tokenizer of a run."""
    run = Path(config.run_dir)
    settings = load_settings(run / "settings.json")
    model = load_weights(run / "checkpoints", abstract(get_config(settings.model)), config.step)
    return model, load_tokenizer(run / "tokenizer")


def converse(model: Decoder, tokenizer: Tokenizer, config: GenerateConfig) -> int:
    """Continue one line after another, until the end of the input."""
    asking = sys.stdin.isatty()
    while True:
        if asking:
            print("prompt> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return 0
        if line.strip():
            write(model, tokenizer, config, line.rstrip("\n"))


def write(model: Decoder, tokenizer: Tokenizer, config: GenerateConfig, prompt: str) -> None:
    """Print the prompt and its continuation as it comes."""
    ids = prompt_ids(tokenizer, prompt)
    if len(ids) == 0:
        raise ConfigError("prompt='' is empty, and the tokenizer has no token that begins a text: give some text.")
    padded = np.zeros((1, -(-len(ids) // PROMPT_BUCKET) * PROMPT_BUCKET), np.int32)
    padded[0, : len(ids)] = ids
    stops = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    tokens = stream(
        model,
        padded,
        prompt_lengths=np.asarray([len(ids)]),
        max_new_tokens=config.max_new_tokens,
        sampler=config.sampler(),
        key=jax.random.key(config.seed),
        stop_ids=stops,
    )
    text = StreamDecoder(tokenizer)
    print(prompt, end="", flush=True)
    for token in tokens:
        if token[0] not in stops:
            print(text.push(token[0]), end="", flush=True)
    print(text.flush())


if __name__ == "__main__":
    sys.exit(main())
