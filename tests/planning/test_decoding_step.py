"""Plans of decoding steps: of a small model on the CPU's devices, and what is found in the text of a program."""

import json

import jax
import jax.numpy as jnp
import pytest

import eqx_decoders as ed
from eqx_decoders.model.config_json import with_fields
from eqx_decoders.planning.decoding_step import (
    copied_bytes,
    decoding_data,
    decoding_report,
    pallas_kernels,
    plan_decoding,
    read_weights,
)
from eqx_decoders.planning.hlo import parse as parse_program
from eqx_decoders.sharding.axes import axes, named_leaves
from eqx_decoders.sharding.layout import device_bytes
from tests.planning.test_step_plan import torus


HALF = ed.Precision(params=jnp.bfloat16, compute=jnp.bfloat16)
# a loop of three turns that copies a slice, copies outside of it, one to a TPU's own memory, one small; two kernels
PROGRAM = """HloModule jit_step

%fused_slice (p: bf16[3,1024,1024], i: s32[]) -> bf16[1,1024,1024] {
  %p = bf16[3,1024,1024]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %slice = bf16[1,1024,1024]{2,1,0} dynamic-slice(%p, %i, %i, %i), dynamic_slice_sizes={1,1024,1024}
}

%fused_add (p: bf16[1,1024,1024]) -> bf16[1,1024,1024] {
  %p = bf16[1,1024,1024]{2,1,0} parameter(0)
  %copy.1 = bf16[1,1024,1024]{2,1,0} copy(%p)
  ROOT %add = bf16[1,1024,1024]{2,1,0} add(%copy.1, %copy.1)
}

%body (t: (s32[], bf16[3,1024,1024])) -> (s32[], bf16[3,1024,1024]) {
  %t = (s32[], bf16[3,1024,1024]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %w = bf16[3,1024,1024]{2,1,0} get-tuple-element(%t), index=1
  %one = bf16[1,1024,1024]{2,1,0} fusion(%w, %i), kind=kLoop, calls=%fused_slice, metadata={op_name="slice"}
  %two = bf16[1,1024,1024]{2,1,0} fusion(%one), kind=kLoop, calls=%fused_add, metadata={op_name="add"}
  %k = f32[8]{0} custom-call(%two), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/while/body/paged_attention/pallas_call"}
  ROOT %out = (s32[], bf16[3,1024,1024]{2,1,0}) tuple(%i, %w)
}

%cond (t: (s32[], bf16[3,1024,1024])) -> pred[] {
  %t = (s32[], bf16[3,1024,1024]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (w: bf16[3,1024,1024]) -> bf16[3,1024,1024] {
  %w = bf16[3,1024,1024]{2,1,0} parameter(0)
  %zero = s32[] constant(0)
  %small = s32[8]{0} copy(%zero)
  %read = bf16[3,1024,1024]{2,1,0:T(8,128)(2,1)S(1)} copy(%w)
  %large = bf16[3,1024,1024]{2,1,0} copy(%w)
  %t = (s32[], bf16[3,1024,1024]{2,1,0}) tuple(%zero, %large)
  %k = f32[8]{0} custom-call(%large), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/grouped_rows_kernel/pallas_call"}
  %loop = (s32[], bf16[3,1024,1024]{2,1,0}) while(%t), condition=%cond, body=%body
  ROOT %out = bf16[3,1024,1024]{2,1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_copies_and_kernels_of_a_program():
    """A slice is copied at each turn of a loop; a copy in a fusion that computes costs nothing."""
    program = parse_program(PROGRAM)
    assert copied_bytes(program) == 2 * 1024 * 1024 * (3 + 3)
    assert pallas_kernels(program) == {"grouped_rows_kernel": 1, "paged_attention": 3}


def test_only_experts_that_rows_choose_are_read():
    """One of four experts by a token alone, all by many; an untied embedding table is not read. Of rows a device reads
    its own, and those of the devices with other experts."""
    config = ed.get_config("mixtral-8x7b")
    model = ed.abstract(with_fields(config, ("num_layers=2",)), precision=HALF)
    sizes, words = {name: device_bytes(leaf) for name, leaf in named_leaves(model).items()}, axes(model)
    of_experts = sum(size for name, size in sizes.items() if "experts" in words[name] and "router" not in name)
    others = sum(sizes.values()) - of_experts - sizes["embedding.table"]
    assert read_weights(model, 1) == pytest.approx(others + of_experts / 4)  # two of eight
    assert read_weights(model, 1000) == pytest.approx(others + of_experts)
    copies = model.replace(layout=ed.Layout.create(data=4, devices=jax.devices()[:4]))
    assert read_weights(copies, 4) == pytest.approx(others + of_experts / 4)
    split = model.replace(layout=ed.Layout.create(expert=4, devices=jax.devices()[:4]))
    assert read_weights(split, 4) > others + of_experts / 2


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [None, 16])
def test_a_plan_adds_up(page_size):
    """Weights and cache are those of a device; the cache stays in place."""
    layout = ed.Layout.create(tensor=2, devices=jax.devices()[:2])
    config = with_fields(ed.get_config("tiny"), ("num_layers=2",))
    model = ed.abstract(config, layout=layout, precision=HALF)
    plan = plan_decoding(model, torus(2, 1), rows=4, length=64, page_size=page_size)
    memory = plan.memory
    assert memory.parameters == sum(map(device_bytes, jax.tree.leaves(model))) and memory.gradients == 0
    assert memory.cache > 1000 > memory.outputs and memory.fits and plan.token_bytes == memory.cache / (4 * 64)
    assert memory.total == memory.parameters + memory.cache + memory.batch + memory.temporaries + memory.outputs
    free = memory.capacity - memory.peak
    assert plan.room == int((free + memory.cache) / plan.token_bytes) > 256
    assert plan.kernels == {} and {one.kind for one in plan.collectives} >= {"all-reduce"}
    assert plan.roofline.memory > plan.roofline.compute > 0 and plan.roofline.networks["tensor"] > 0
    text = decoding_report(plan)
    for part in ("cache  ", "kernels: none", "the cache has 256 tokens", "all-reduce along tensor", "tokens/s"):
        assert part in text
    assert "optimizer" not in text and "gradients" not in text
    assert json.loads(json.dumps(decoding_data(plan)))["memory"]["cache"] == memory.cache
