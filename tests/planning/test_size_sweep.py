"""Which sizes are planned, on which slices, and the table of rows."""

import itertools
import math

from eqx_decoders.cli.plan import parse
from eqx_decoders.planning.size_sweep import SLICES, family, flags, rows_tried, sized, slice_of, spread, table


def test_sizes_from_1b_to_1t_have_a_slice():
    sizes = sized(["kimi-k2-1t", "tiny", "llama3-8b", "gemma3-1b", "gpt2"])
    assert list(sizes) == ["gemma3-1b", "llama3-8b", "kimi-k2-1t"]
    assert list(sized(["kimi-k2-1t", "llama3-8b", "qwen2.5-72b"], "h100")) == ["llama3-8b", "qwen2.5-72b"]
    assert rows_tried(slice_of(10**9)) == [4, 2, 1] and rows_tried(slice_of(10**12)) == [2, 1]
    assert slice_of(sizes["llama3-8b"]).devices < slice_of(sizes["kimi-k2-1t"]).devices
    assert slice_of(sizes["llama3-8b"], "h100").topology == "h100:1x8"
    for each in itertools.chain(*SLICES.values()):
        assert math.prod(map(int, each.topology.split(":")[1].split("x"))) == each.devices


def test_one_of_each_family_comes_first():
    assert family("llama3-8b") == family("llama3-70b") == "llama3" and family("qwen2.5-7b") == "qwen2.5"
    order = spread(["llama3-8b", "llama3-70b", "gemma-2b", "llama3-405b", "gemma-7b"])
    assert order == ["gemma-2b", "llama3-8b", "gemma-7b", "llama3-70b", "llama3-405b"]


def test_flags_are_parsed_and_lengths_do_not_exceed_positions():
    config = parse(flags("llama3-8b", slice_of(8 * 10**9), 4))
    assert (config.model, config.search, config.json, config.seq_len) == ("llama3-8b", 1, True, 4096)
    short = parse(flags("gpt2-xl", slice_of(2 * 10**9), 4))
    assert short.seq_len == 1024 and short.batch_size * 1024 == config.batch_size * 4096


def test_a_table_has_a_line_for_each_row():
    settings = {"topology": "v5p:2x2x1", "mesh": {"fsdp": 4}, "remat": "full", "batch_size": 16, "seq_len": 4096}
    plan = {
        "settings": settings, "devices": 4, "memory": {"peak": 20e9, "capacity": 95e9},
        "collectives": [{"total": 2e9}, {"total": 3e9}], "seconds": {"one_by_one": 1.234}, "mfu": {"one_by_one": 0.5},
    }  # fmt: skip
    rows = [{"model": "b", "parameters": 2e9, "plan": plan}, {"model": "a", "parameters": 1e9, "error": "no"}]
    *_, line, failed = table(rows).splitlines()
    assert line == "| `b` | 2.0 b | v5p:2x2x1 (4) | fsdp 4 | `full` | 16 x 4,096 | 20.0 (95) | 5 | 1.23 | 50% |"
    assert failed == "a: no"
    assert "|  | 1.23 |" in table([{"model": "b", "parameters": 2e9, "plan": plan | {"collectives": None}}])
