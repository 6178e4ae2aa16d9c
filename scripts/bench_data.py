"""Measurements of data and starts for `bench.py`: restarts, tokenizing, plans of rows, and memory of processes."""

import itertools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from eqx_decoders.data.batches import Batches, Corpus
from eqx_decoders.data.sources.readers import ReadOptions, read_source
from eqx_decoders.data.sources.sources import Source
from eqx_decoders.data.store.corpus import CorpusStats, read_documents
from eqx_decoders.data.store.store import open_store
from eqx_decoders.io.exit_codes import EXIT_SIGTERM
from eqx_decoders.io.text.tokenizer import load_tokenizer, train_bpe


def restart(folder: Path, **environment: str) -> float:
    """Measure seconds from the start of the training program to the row of its first step, then stop it.

    The run in `folder` is resumed if it was started before.
    """
    metrics, command = folder / "metrics.jsonl", [sys.executable, str(Path(__file__).with_name("train.py"))]
    options = ["--tokenizer", "bytes", "--data", str(Path(__file__).parents[1] / "README.md"), "--trackers"]
    options += ["--held-out-fraction", "0", "--sample-tokens", "0", "--steps", "1000"]
    rows = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    command += ["--run-dir", str(folder), *options]
    begun, seconds, nowhere = time.perf_counter(), 0.0, subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=nowhere, stderr=nowhere, env=os.environ | environment)
    while process.poll() is None:
        if not seconds and metrics.exists() and metrics.read_bytes().count(b"\n") > rows:
            seconds = time.perf_counter() - begun
            process.terminate()  # it saves, and the next start goes on
        time.sleep(0.02)
    assert process.returncode == EXIT_SIGTERM and seconds
    return seconds


def make_text(folder: Path, size: int) -> None:
    """Write JSON lines of the standard library's text, and a tokenizer of 32,000 ids trained on it."""
    text = "".join(document.text or "" for document in read_documents(None))
    train_bpe(itertools.islice((one.text or "" for one in read_documents(None)), 300), 32_000).save(folder)
    generator, written = random.Random(0), 0
    with (folder / "text.jsonl").open("w") as file:
        while written < size:
            begin = generator.randrange(len(text) - 8000)
            written += file.write(json.dumps({"text": text[begin : begin + generator.randrange(100, 8000)]}) + "\n")


def encode(folder: str, begin: int, end: int) -> dict[str, float]:
    """Measure `encode_batch_fast` alone over a part of the text: bytes a second, and a second of the processor."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    documents = read_source(Source("text.jsonl", Path(folder, "text.jsonl")), ReadOptions(), (begin, end))
    seconds = processor = size = 0
    while batch := [document.text or "" for document in itertools.islice(documents, 256)]:
        start, used = time.perf_counter(), time.process_time()
        tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        seconds += time.perf_counter() - start
        processor += time.process_time() - used
        size += sum(len(text.encode()) for text in batch)
    return {"rate": size / seconds, "processor_rate": size / processor}


def tokenise(folder: str) -> dict[str, float]:
    """Measure making a store, start of its processes and counting included: bytes of text a second, and memory."""
    peak, done = [0], threading.Event()
    watch = threading.Thread(target=watch_memory, args=(peak, done))
    watch.start()
    begin = time.perf_counter()
    tokenizer, path = load_tokenizer(folder), f"{folder}/text.jsonl"
    store = open_store(f"{folder}/run", tokenizer, path=path, cache_dir=f"{folder}/cache")
    seconds = time.perf_counter() - begin
    done.set()
    watch.join()
    counts = [store.counts(split) for split in ("train", "held_out")]
    size, tokens = sum(count.bytes or 0 for count in counts), sum(count.tokens for count in counts)
    used = os.times()
    processor = used.user + used.system + used.children_user + used.children_system
    rates = {"rate": size / seconds, "processor_rate": size / processor}
    return rates | {"seconds": seconds, "tokens": tokens, "peak_mb": peak[0] / 1e6}


def watch_memory(peak: list[int], done: threading.Event) -> None:
    """Record the peak of the memory of this process and of those that it started together."""
    while not done.wait(0.25):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        sizes = []
        for pid in ("self", *children):
            try:
                sizes.append(memory("VmRSS", pid))
            except (OSError, StopIteration):  # it has just ended
                continue
        peak[0] = max(peak[0], sum(sizes))


def memory(field: str, pid: str = "self") -> int:
    """Read the bytes of a field of Linux's account of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


class EndlessCorpus:
    """Documents of about 1000 tokens, whose sizes repeat after a million of them."""

    content_hash, has_targets = "endless", False

    def __init__(self, documents: int):
        generator, self._documents = np.random.default_rng(0), documents
        self._sizes = np.clip(generator.lognormal(6.5, 0.9, 1 << 20), 2, 100_000).astype(np.int64)
        self._held_out = generator.random(1 << 20) < 0.001
        self._tokens = np.zeros(100_000, np.uint16)

    def __len__(self) -> int:
        return self._documents

    def __getitem__(self, document: int) -> np.ndarray:
        return self._tokens[: self._sizes[document % len(self._sizes)]]

    def counts(self, split: str) -> CorpusStats:
        return CorpusStats(documents=self._documents, tokens=0, targets=0, bytes=None)

    def sizes(self, start: int, stop: int) -> np.ndarray:
        return self._part(self._sizes, start, stop)

    def is_held_out(self, start: int, stop: int) -> np.ndarray:
        return self._part(self._held_out, start, stop)

    def _part(self, values: np.ndarray, start: int, stop: int) -> np.ndarray:
        first = start % len(values)
        last = first + stop - start
        return values[first:last] if last <= len(values) else np.append(values[first:], values[: last - len(values)])


def plan(documents: int) -> dict[str, float]:
    """Measure batches of 256 x 2048 of documents whose tokens are not read: seconds, rows a second, memory."""
    seconds, corpus = {}, EndlessCorpus(documents)
    with tempfile.TemporaryDirectory() as folder:
        part = Corpus("", corpus, False, Path(folder))  # pyright: ignore[reportArgumentType]
        settings = {"split": "train", "rows": range(256), "batch_size": 256, "seq_len": 2048, "seed": 0, "pack": True}
        for what in ("count", "open"):
            begin = time.perf_counter()
            batches = Batches([part], **settings)
            seconds[what] = time.perf_counter() - begin
        with batches:
            begin = time.perf_counter()
            next(batches)
            seconds["first batch"] = time.perf_counter() - begin
            begin, count = time.perf_counter(), 1000
            for _ in range(count):
                next(batches)
            rate, rows = 256 * count / (time.perf_counter() - begin), batches.rows_per_epoch
        (plans,) = batches._plans
        for row in range(max(0, rows - 400_000), rows + 10_000):
            begin = time.perf_counter()
            list(plans.pieces(row))
            if row >= rows - 10_000:
                seconds["epoch"] = max(seconds.get("epoch", 0.0), time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"documents": documents, "rows": rows, "rate": rate, "peak_gb": peak, **seconds}
