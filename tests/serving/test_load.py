"""`scripts/serve.py` under the load generator AIPerf: no request fails, and AIPerf counts the expected tokens."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eqx_decoders.inference.text_model import load_text_model
from tests.serving.processes import served
from tests.serving.servers import CHAT


WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")
PLACES = os.pathsep.join((str(Path(sys.prefix) / "load" / "bin"), os.environ.get("PATH", "")))
AIPERF = shutil.which("aiperf", path=PLACES)
COUNT, CLIENTS = 32, 4


def random_prompts(seed: int) -> list[dict]:
    """Return prompts and the number of tokens to generate for each."""
    pick = random.Random(seed)
    texts = (" ".join(pick.choices(WORDS, k=pick.randrange(1, 9))) for _ in range(COUNT))
    return [{"text": text, "output_length": pick.randrange(20, 80)} for text in texts]


def run_aiperf(folder: Path, url: str, kind: str, prompts: list[dict], *more: str) -> tuple[list[dict], dict]:
    """Run AIPerf. Returns its records, ordered by request, and its summary."""
    file, found = folder / "prompts.jsonl", folder / "found"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    options = f"--model m --url {url} --endpoint-type {kind} --streaming --tokenizer {CHAT} --input-file {file}"
    options += f" --custom-dataset-type single_turn --dataset-sampling-strategy sequential --request-count {COUNT}"
    options += f" --concurrency {CLIENTS} --extra-inputs ignore_eos:true --artifact-dir {found} --ui none"
    options += " --no-gpu-telemetry --no-server-metrics --workers-max 2 --record-processors 1"
    # home is a folder of the test, and huggingface.co is replaced by a closed port
    env = {**os.environ, "HOME": str(folder), "HF_HOME": str(folder), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(
        [str(AIPERF), "profile", *options.split(), *more], env=env, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (found / "profile_export.jsonl").read_text().splitlines()]
    rows.sort(key=lambda row: row["metadata"]["session_num"])
    return rows, json.loads((found / "profile_export_aiperf.json").read_text())


def numbers(rows: list[dict], name: str) -> list:
    return [row["metrics"][name]["value"] for row in rows]


@pytest.mark.slow
@pytest.mark.skipif(AIPERF is None, reason="needs aiperf, which `make test-slow` installs")
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf_counts_the_expected_tokens(tmp_path, kind):
    text, prompts = load_text_model(CHAT, "float32"), random_prompts(seed=len(kind))
    told = [prompt["text"] for prompt in prompts]
    lengths = [
        text.prepare(each if kind == "completions" else [{"role": "user", "content": each}])[0].size for each in told
    ]
    # AIPerf counts the tokens of a user message with its own tokenizer; for completions it uses our count
    seen = [text.tokenizer.encode(each).size for each in told] if kind == "chat" else lengths
    with served(CHAT) as (_, server):
        more = [] if kind == "chat" else ["--use-server-token-count"]
        rows, whole = run_aiperf(tmp_path, server.url.removesuffix("/v1"), kind, prompts, *more)
        counts = dict(re.findall(r"^(\S+) (\S+)$", server.call("/metrics")[2].decode(), re.MULTILINE))
    assert len(rows) == COUNT and not any(row.get("error") for row in rows)
    assert whole["request_count"]["avg"] == COUNT and whole["request_error_rate"]["avg"] == 0
    assert numbers(rows, "input_sequence_length") == seen
    assert numbers(rows, "usage_prompt_tokens") == lengths
    new = [prompt["output_length"] for prompt in prompts]
    assert numbers(rows, "usage_completion_tokens") == new
    assert float(counts['vllm:prompt_tokens_total{model_name="m"}']) == sum(lengths)
    assert float(counts['vllm:generation_tokens_total{model_name="m"}']) == sum(new)
    first, gaps = numbers(rows, "time_to_first_token"), numbers(rows, "inter_token_latency")
    assert all(ms > 0 for ms in first) and all(ms >= 0 for ms in gaps) and sum(gaps) > 0
    for name in ("time_to_first_token", "inter_token_latency"):
        print(kind, name, *(f"{share}={whole[name][share]:.2f} ms" for share in ("p50", "p90", "p99")))
