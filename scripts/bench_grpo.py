"""Time GRPO steps here and with TRL, alternating, with the same model, prompts, reward and group size.

python scripts/bench.py --only rl --peer PYTHON      # an interpreter that has torch and trl
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[1]
LEARNER: dict[str, Any] = dict(
    num_layers=6, embed_dim=256, num_heads=8, num_kv_heads=4, head_dim=32, mlp_dim=768
)  # 5 M weights
PROMPTS, SAMPLES, NEW = 8, 8, 64  # prompts, completions per prompt, and maximum tokens of a completion
STEPS, SKIPPED = 9, 3  # number of steps; the first steps compile and are not counted


def letters(completion: str) -> float:
    """Return the fraction of characters that are the letter e: the reward, here and with TRL."""
    return completion.count("e") / max(1, len(completion))


def reward(prompt: dict, completion: str) -> float:
    """Return the reward of a completion, for `scripts/train.py`."""
    return letters(completion)


def save_learner(folder: Path) -> None:
    """Save a randomly initialized Llama with a tokenizer, and prompts for it."""
    import jax

    import eqx_decoders as ed
    from eqx_decoders.families.common import DecoderSizes
    from eqx_decoders.families.llama import llama

    tokenizer = ROOT / "tests" / "fixtures" / "chat_llama"
    vocab = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    model = ed.init(llama(DecoderSizes(**LEARNER, vocab_size=vocab)), key=jax.random.key(0))
    ed.save_hf(model, folder / "model")
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, folder / "model")
    words = ["the", "a", "old", "tree", "sees", "red", "here", "and", "we", "go"] * 2
    rows = [{"prompt": " ".join(random.Random(number).sample(words, 12))} for number in range(PROMPTS * STEPS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def our_steps(folder: Path) -> list[float]:
    """Run GRPO by `scripts/train.py`; return the seconds of each step."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    sizes = f"--rl.prompts {PROMPTS} --rl.samples {SAMPLES} --rl.max-new-tokens {NEW} --rl.slots {PROMPTS * SAMPLES}"
    sizes += f" --seq-len 800 --batch-size 8 --steps {STEPS} --rl.completions-per-row 8"
    quiet = "--sample-tokens 0 --eval-every 0 --checkpoint-every 1000"
    words = ["--method", "rl", "--rl.preset", "grpo", "--rl.reward", f"{__file__}:reward", "--run-dir", folder / "run"]
    words += ["--init-from", folder / "model", "--data", folder / "prompts.jsonl", *sizes.split(), *quiet.split()]
    subprocess.run([sys.executable, ROOT / "scripts" / "train.py", *map(str, words)], check=True, capture_output=True)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row["step_seconds"] for row in rows if "step_seconds" in row]


def their_steps(folder: Path) -> None:
    """Print the seconds of each step of TRL's GRPO."""
    import datasets
    import torch
    import trl

    torch.set_num_threads(os.cpu_count() or 1)
    options: dict[str, Any] = dict(num_generations=SAMPLES, per_device_train_batch_size=PROMPTS * SAMPLES)
    options |= dict(max_completion_length=NEW, max_steps=STEPS, beta=0.0, loss_type="grpo", logging_steps=1)
    options |= dict(model_init_kwargs={"dtype": "float32"}, use_cpu=True, bf16=False, gradient_checkpointing=False)
    options |= dict(report_to="none", save_strategy="no", disable_tqdm=True)
    config = trl.GRPOConfig(output_dir=str(folder / "trl"), **options)
    rows = datasets.load_dataset("json", data_files=str(folder / "prompts.jsonl"), split="train")
    trainer = trl.GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=lambda completions, **rest: [letters(each) for each in completions],
        args=config,
        train_dataset=rows,
    )
    trainer.train()
    print("SECONDS", json.dumps([row["step_time"] for row in trainer.state.log_history if "step_time" in row]))


def beside_trl(peer: str, repeats: int) -> dict[str, list[float]]:
    """Measure steps of both in turns; return the median of each turn."""
    medians: dict[str, list[float]] = {"here": [], "TRL": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_learner(folder)
        for _ in range(repeats):
            medians["here"].append(statistics.median(our_steps(folder)[SKIPPED:]))
            out = subprocess.run([peer, __file__, name], check=True, capture_output=True, text=True).stdout
            theirs = json.loads(out.split("SECONDS ")[-1])
            medians["TRL"].append(statistics.median(theirs[SKIPPED:]))
    return medians


def show_grpo(options: argparse.Namespace) -> None:
    """Print the seconds of a step, in turns."""
    if options.peer is None:
        print("steps of GRPO beside TRL: --peer PYTHON names an interpreter that has it")
        return
    print(f"\na GRPO step, Llama of 5 M weights, {PROMPTS} prompts x {SAMPLES} completions of {NEW} tokens, seconds:")
    for side, seconds in beside_trl(options.peer, min(options.repeats, 3)).items():
        print(f"{side:5} " + " ".join(f"{each:6.2f}" for each in seconds))


if __name__ == "__main__":
    their_steps(Path(sys.argv[1]))
