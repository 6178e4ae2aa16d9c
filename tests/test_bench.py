"""The benchmarks of accelerators and of sizes: run small on the CPU, and compiled for TPUs."""

import importlib
import json
import subprocess
import sys

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import eqx_decoders as ed
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.llama import llama
from tests.commands import ROOT
from tests.compare import assert_array_equal
from tests.errors import assert_names
from tests.programs import tpu_devices


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module


@pytest.mark.slow
def test_everything_runs_small(script):
    """A line with a time for each program; 64 tokens see 64 * 65 / 2 pairs, and less through a window."""
    bench = script("bench_accelerator")
    case = bench.Attention(1, 64, 4, 2, 16)
    some: dict = dict(attention=(case,), grouped=(bench.Grouped(16, 2, 8, 8),))
    some |= dict(recurrences=(bench.Recurrence(1, 20, 1, 2, 8, 8, True),), decoding=(2,), past=15)
    shapes = bench.Shapes(model="gpt3-52k", rows=1, seq_len=16, **some)
    lines = []
    bench.measure(jax.devices()[:2], 1, shapes, lines.append)
    assert len(lines) == 1 + 1 + 2 * 2 + 2 + 2 + 1 and all(" ms" in line for line in lines[1:])
    assert "tokens/s" in lines[1] and "dot" in lines[2] and "chunked" in lines[4] and "GB/s" in lines[-1]
    assert bench.visible_pairs(case) == 2080
    assert bench.visible_pairs(case._replace(mask=bench.SlidingWindow(2))) == 1 + 63 * 2


@pytest.mark.slow
def test_shares_are_of_the_data_sheet(script):
    bench = script("bench_accelerator")
    chip = bench.chip_of("TPU v5")
    line = bench.format_line(bench.Program("p", None, (), flops=4.59e12, bytes=2.765e10, tokens=5), 0.1, chip)
    assert_names(line, "50 tokens/s", "MFU 10.0%", "bandwidth")
    assert line.count("10.0%") == 2


def test_without_an_accelerator_it_names_the_platforms(script):
    lines = []
    assert not script("bench_accelerator").accelerator(1, say=lines.append)
    assert len(lines) == 1
    assert_names(lines[0], "TPU", "GPU")


@pytest.mark.slow
def test_sizes_go_on_with_the_rows_that_are_there(script, monkeypatch, tmp_path, capsys):
    """Errors are tried again, fewer rows if none fits; a line that was cut off counts for nothing."""
    bench, file, asked = script("bench_sizes"), tmp_path / "rows.jsonl", []
    monkeypatch.setattr(bench, "table", lambda rows: f"{len(rows)} rows")
    plan = {"settings": {}}
    ends = [(2, "", "so\nno"), (2, "", "None fits"), (0, json.dumps(plan), "")]
    results = iter(subprocess.CompletedProcess([], *end) for end in ends)
    monkeypatch.setattr(bench.subprocess, "run", lambda command, **_: asked.append(command) or next(results))
    bench.plan_sizes(file, ["gemma3-1b"])
    assert bench.read_rows(file)[0]["error"] == "no" and asked[0][0] == sys.executable and "gemma3-1b" in asked[0]
    with file.open("a") as out:
        out.write('{"model": "cut')
    bench.plan_sizes(file, ["gemma3-1b"])
    bench.plan_sizes(file, ["gemma3-1b"])
    assert len(asked) == 3 and asked[1] != asked[2] and "1 rows" in capsys.readouterr().out


def test_inference_takes_turns_and_says_ratios(script, monkeypatch):
    """Medians of both sides; without transformers a line about it."""
    bench, turns, lines = script("bench_inference"), [], []
    rows = {"generate": {"here": [(1.0, 2.0), (9.0, 9.0), (1.0, 2.0)], "transformers": [(2.0, 3.0)]}}
    rows["engine"] = rows["generate"]
    rows["roofs"] = {name: [(0.1, 0.04), (0.2, 0.02)] for name in ("here", "transformers")}
    monkeypatch.setattr(bench, "in_turn", lambda kind, work, *_: turns.append((kind, work)) or rows[kind])
    assert bench.show_inference("python", 3, (bench.Work("float32", 8),), lambda text, **_: lines.append(text))
    assert [kind for kind, _ in turns] == ["roofs", "generate", "engine"] and "172 GFLOP/s, reads  20.0 GB/s" in lines[
        1
    ]
    assert lines[-2].endswith("prefill    4096.0 tokens/s, transformers   2048.0: 2.00")
    assert lines[-1].endswith("decode      256.0 tokens/s, transformers    170.7: 1.50")
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert not bench.show_inference(None, 3, say=lines.append) and "--peer" in lines[-1]


@pytest.mark.slow
def test_what_a_server_does_is_drawn(script, tmp_path):
    bench = script("bench_serving")
    bench.draw(str(tmp_path / "serving.png"), {"here": dict.fromkeys(bench.CLIENTS, 20.0), "there": {1: 9.4, 2: 13.6}})
    assert (tmp_path / "serving.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
def test_weights_for_llama_cpp(script, tmp_path):
    """It turns neighbours of queries and keys, where the published weights turn the halves of a head."""
    sizes = dict(vocab_size=64, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48)
    ed.save_hf(ed.init(llama(DecoderSizes(**sizes)), key=jax.random.key(0)), tmp_path)
    script("bench_serving").save_gguf(tmp_path, tmp_path / "model.gguf")
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    published = load_file(tmp_path / "model.safetensors")
    assert len(found) == len(published)
    for name, count in (("attn_q", 4), ("attn_k", 2)):
        weight = published[f"model.layers.1.self_attn.{name[-1]}_proj.weight"]
        first, second = np.split(weight.reshape(count, -1, weight.shape[1]), 2, axis=1)
        turned = found[f"blk.1.{name}.weight"].reshape(count, -1, 2, weight.shape[1])
        assert_array_equal(turned[:, :, 0], first)
        assert_array_equal(turned[:, :, 1], second)
    assert_array_equal(found["blk.0.attn_v.weight"], published["model.layers.0.self_attn.v_proj.weight"])


@pytest.mark.slow
def test_a_side_answers_line_by_line(script):
    """In a process of its own, and in this one."""
    bench = script("bench_inference")
    sizes = dict(vocab_size=64, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=48)
    for side in (bench.our_generate, bench.our_engine):
        assert side(bench.Work("float32", 2, 9, 8), sizes)()[0] > 0
    process = subprocess.Popen(
        [sys.executable, bench.__file__, "roofs", "here", json.dumps(bench.Work("float32", 1))],
        **dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1),
    )
    assert bench._answer(process) == "ready"
    process.stdin.write("go\n")
    assert len(bench._answer(process)) == 2
    process.stdin.close()
    assert process.wait() == 0
    with pytest.raises(SystemExit, match="exit code 0"):
        bench._answer(process)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
def test_everything_compiles_for_tpus(script, topology):
    bench = script("bench_accelerator")
    made = list(bench.programs(tpu_devices(topology)))
    kinds = {program.name.split(",")[0] for program in made}
    assert ("grouped product by megablox" in kinds) == (topology == "v6e:2x2")
    assert {
        "interval",
        "chunked",
        "dot",
        "grouped product by blocks",
        "delta rule in a kernel",
        "linear recurrence in chunks",
    } <= kinds
    for program in made:
        sizes = program.function.lower(*program.arguments).compile().memory_analysis()
        print(f"{program.name}: {(sizes.argument_size_in_bytes + sizes.temp_size_in_bytes) / 1e9:.2f} GB")
