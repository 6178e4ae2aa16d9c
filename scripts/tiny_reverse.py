"""Teach a tiny model to write five digits backwards, first by examples and then by one of several lessons.

    python scripts/tiny_reverse.py                       # GRPO; what `make train MODEL=tiny-reverse` runs
    python scripts/tiny_reverse.py --lesson dpo --seed 1

The examples stop early, so that there is something left to learn. Every stage is a program that you could call: they
are printed. At the end stands how many of 400 numbers that no lesson has shown are written backwards without a mistake,
with greedy and with sampled completions, before and after.
"""

import argparse
import json
import random
import shlex
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parent
SIZES = dict(num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=192, vocab_size=260)
EXAMPLES, TEACHER = 165, 400  # steps on examples, of the model and of a teacher
COMMON = ["--seq-len", 128, "--sample-tokens", 0, "--eval-every", 0, "--checkpoint-every", 1000]
MUON = ["--optimizer.name", "muon", "--optimizer.learning-rate", 3e-3]
SAMPLING = ["--rl.max-new-tokens", 8, "--rl.slots", 64, "--rl.completions-per-row", 16]
CONSTANT = ["--optimizer.schedule", "constant", "--optimizer.learning-rate"]


def exact(prompt: dict, completion: str) -> float:
    """Return 1 for the digits of a prompt backwards: the reward, and the grade of an evaluation."""
    return float(completion.strip() == prompt["answer"])


def numbers(count, seed, held_out=False):
    """Yield prompts with their answers. Held-out ones are those whose digits add up to a multiple of 10."""
    draw = random.Random(seed)
    while count:
        digits = draw.choices(range(10), k=5)
        if (sum(digits) % 10 == 0) == held_out:
            text = "".join(map(str, digits))
            yield {"prompt": f"{text}=", "answer": text[::-1]}
            count -= 1


class Task:
    """Numbers as a task of `scripts/evaluate.py`."""

    max_new_tokens = 8

    def __init__(self, *arguments):
        self.examples, self.grade = list(numbers(*arguments)), exact


held_out, others = Task(400, 0, True), Task(1500, 7)


def write(path, rows):
    """Write records as lines of JSON; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def program(name, *words):
    """Run a program of this folder, and print how."""
    words = [str(word) for word in words]
    print(f"\n$ python scripts/{name}.py {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, str(ROOT / f"{name}.py"), *words], check=True)


def accuracy(model, folder):
    """Return the fractions of correct completions of a model, greedy and sampled."""
    shares = []
    for name, samples in (("greedy", 1), ("sampled", 4)):
        out, spec = folder / f"{model.name}-{name}", f"{Path(__file__)}:held_out"
        program("evaluate", "--model", model, "--tasks", spec, "--samples", samples, "--max-batch-size", 64,
                "--output", out)  # fmt: skip
        results = json.loads((out / "results.json").read_text())
        shares.append(results["models"][str(model)]["held_out"]["score"])
    return shares


def examples(folder, name, steps, seed):
    """Train a new model on examples, unless another lesson has; return where it is."""
    if (folder / name).exists():
        return folder / name
    rows = ({"prompt": row["prompt"], "completion": row["answer"]} for row in numbers(20000, seed=1))
    data = write(folder / "examples.jsonl", rows)
    sizes = [word for field, value in SIZES.items() for word in ("--set", f"{field}={value}")]
    flags = ["--tokenizer", "bytes", *sizes, *COMMON, *MUON, "--batch-size", 8, "--steps", steps, "--seed", seed]
    program("train", "--run-dir", folder / f"{name}-run", "--data", data, *flags, "--export", folder / name)
    return folder / name


def sample(folder, base):
    """Sample eight completions for many numbers; return them by prompt, with their grades."""
    flags = ["--tasks", f"{Path(__file__)}:others", "--samples", 8, "--max-batch-size", 64]
    program("evaluate", "--model", base, *flags, "--output", folder / "completions")
    groups = {}
    for line in (folder / "completions" / "others.jsonl").read_text().splitlines():
        row = json.loads(line)
        groups.setdefault(row["example.prompt"], []).append((row["answer"], row["grade"].get("score", 0.0)))
    return groups


def grpo(folder, base, seed):
    """Reinforcement with the rewards of `exact`."""
    prompts = write(folder / "prompts.jsonl", numbers(5000, seed=2))
    held = write(folder / "held_out.jsonl", held_out.examples)
    return ["--method", "rl", "--rl.preset", "grpo", "--rl.reward", f"{Path(__file__)}:exact", *SAMPLING,
            "--data", prompts, "--held-out", held, "--eval-every", 25, "--batch-size", 16, "--steps", 300,
            *CONSTANT, 5e-4]  # fmt: skip


def ppo(folder, base, seed):
    """The same rewards with a critic, which learns alone at first: what each digit is worth when it is written."""
    critic = ["--rl.critic.learning-rate", 3e-3, "--rl.critic.warmup-steps", 20, "--rl.critic.updates", 4]
    return [*grpo(folder, base, seed), "--rl.preset", "ppo", "--rl.critic.no-bootstrap", *critic]


def dpo(folder, base, seed):
    """Pairs of a correct and a wrong completion of the model, with the likelihood of the correct one."""
    rows = []
    for prompt, completions in sample(folder, base).items():
        correct, wrong = ([text for text, score in completions if (score == 1) == good] for good in (True, False))
        rows += [{"prompt": prompt, "chosen": a, "rejected": b} for a, b in zip(correct, wrong, strict=False)]
    pairs = write(folder / "pairs.jsonl", rows)
    return ["--method", "dpo", "--preference.beta", 0.1, "--preference.nll-weight", 1, "--data", pairs,
            "--batch-size", 8, "--steps", 120, *CONSTANT, 3e-4]  # fmt: skip


def rejection(folder, base, seed):
    """Rejection sampling: the correct completions of the model as examples."""
    rows = [
        {"prompt": prompt, "completion": text}
        for prompt, completions in sample(folder, base).items()
        for text in {text for text, score in completions if score == 1}
    ]
    return ["--data", write(folder / "right.jsonl", rows), "--batch-size", 8, "--steps", 120, *CONSTANT, 3e-4]


def distill(folder, base, seed):
    """A teacher, the same model after more examples: the whole distribution of each of its next tokens."""
    teacher = examples(folder, "teacher", TEACHER, seed + 100)
    rows = [{"prompt": row["prompt"], "completion": row["answer"]} for row in numbers(5000, seed=3)]
    return ["--method", "distill", "--distill.teacher", teacher, "--data", write(folder / "rows.jsonl", rows),
            "--batch-size", 8, "--steps", 150, *CONSTANT, 3e-4]  # fmt: skip


def on_policy(folder, base, seed):
    """On-policy distillation: the reverse divergence at each token of completions that the student samples."""
    prompts = write(folder / "prompts.jsonl", numbers(5000, 2))
    return ["--method", "distill", "--distill.on-policy", "--distill.divergence", "reverse", *SAMPLING,
            "--data", prompts, "--distill.teacher", examples(folder, "teacher", TEACHER, seed + 100),
            "--batch-size", 16, "--steps", 150, *CONSTANT, 1e-3]  # fmt: skip


def one_sample(folder, base, seed):
    """On-policy distillation from one sample: the teacher's log-probs of the sampled tokens."""
    prompts = write(folder / "prompts.jsonl", numbers(5000, 2))
    teacher = examples(folder, "teacher", TEACHER, seed + 100)
    return ["--method", "rl", "--rl.teacher", teacher, *SAMPLING, "--data", prompts, "--batch-size", 16, "--steps", 300,
            *CONSTANT, 5e-4]  # fmt: skip


LESSONS = {lesson.__name__: lesson for lesson in (grpo, ppo, dpo, rejection, distill, on_policy, one_sample)}


def main():
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/tiny-reverse"), help="where all of it goes")
    parser.add_argument("--lesson", choices=LESSONS, default="grpo")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder, seed = options.run_dir, options.seed
    base = examples(folder, "examples", EXAMPLES, seed)
    before = accuracy(base, folder)
    run, export = folder / options.lesson, folder / f"{options.lesson}-model"
    flags = LESSONS[options.lesson](folder, base, seed)
    program("train", "--run-dir", run, "--init-from", base, "--export", export, "--seed", seed, *COMMON, *flags)
    after = accuracy(export, folder)
    print(f"\n{'':24}{'greedy':>12}{'sampled':>8}")
    for name, shares in (("after the examples", before), (f"after {options.lesson}", after)):
        print(f"{name:24}{shares[0]:12.3f}{shares[1]:8.3f}")


if __name__ == "__main__":
    main()
