"""What is kept for the backward pass, by tracing: known bytes, and those of a compiled program."""

import pathlib
import time

import jax
import jax.numpy as jnp
import pytest

import eqx_decoders as ed
from eqx_decoders.model.config_json import with_fields
from eqx_decoders.planning import compile
from eqx_decoders.planning.compile import assigned_sizes
from eqx_decoders.planning.machine import Machine
from eqx_decoders.planning.step_plan import make_plan
from eqx_decoders.planning.traced_memory import predicted_bytes, saved_activation_bytes, saved_arrays
from eqx_decoders.sharding.chips import CHIPS
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.step import Trainer


V5P = {chip.name: chip for chip in CHIPS}["v5p"]
MACHINE = Machine(V5P, tuple((0, (i,), 0) for i in range(8)), (8,))
CONFIG = with_fields(ed.get_config("gpt3-52k"), ("num_layers=3",))
SHAPE = dict(batch_size=8, seq_len=32)


def stepped(remat: str, config: ed.DecoderConfig = CONFIG, **sizes: int):
    precision = ed.Precision(compute=jnp.bfloat16)
    model = ed.abstract(config, layout=ed.Layout.create(**sizes), precision=precision, remat=remat)
    return model, Trainer.create(OptimizerConfig(), model, steps=10)


def test_a_loop_saves_what_its_gradient_reads():
    """Of five sines the five arguments' cosines, and nothing of a loop without a gradient."""

    def sines(x):
        return jax.lax.scan(lambda x, _: (jnp.sin(x), x), x, length=5)[0].sum()

    x = jnp.ones((3, 2))
    assert saved_arrays(jax.make_jaxpr(sines)(x)) == []
    found = saved_arrays(jax.make_jaxpr(jax.grad(jax.jit(sines)))(x)) or saved_arrays(
        jax.make_jaxpr(jax.grad(sines))(x)
    )
    assert [array.shape for array in found] == [(5, 3, 2)]


@pytest.mark.slow(fast=("full-1",))
@pytest.mark.parametrize("remat, widths", [("full", 1), ("save_qkv_proj", 4)])
def test_remat_policies_save_what_they_name(remat, widths):
    """The stream that enters each layer, and its queries, keys and values, which are as wide, in two bytes each."""
    config = ed.get_config("gpt3-52k")
    assert (config.embed_dim, config.blocks[0].mixer.num_heads * config.blocks[0].mixer.head_dim) == (16, 16)
    whole = 3 * 8 * 32 * 16 * 2 * widths
    assert saved_activation_bytes(*stepped(remat, fsdp=8), **SHAPE) == whole // 8
    assert saved_activation_bytes(*stepped(remat, fsdp=4, tensor=2), **SHAPE) == whole // 4 // widths + (
        whole * (widths - 1) // widths // 8
    )


@pytest.mark.slow
def test_predicted_memory_equals_that_of_the_compiled_step():
    """Kept is what the program keeps; with state and gradients and a layer it is about what the program needs."""
    model, trainer = stepped("save_qkv_proj", fsdp=8)
    plan = make_plan(model, trainer, MACHINE, **SHAPE)
    assert saved_activation_bytes(model, trainer, **SHAPE) == plan.memory.saved_activations
    known = plan.memory.state + plan.memory.gradients + plan.memory.saved_activations
    assert known < predicted_bytes(model, trainer, MACHINE, **SHAPE) < 2 * plan.memory.total


# --- what XLA says of its allocations ---

ALLOCATIONS = """BufferAssignment:
allocation 0: size 4, color 8, page 0, thread-local:
allocation 5: size 64, page 0, thread-local:
 value: <3 a{0} (phi) @0> (size=512,offset=58359808): s32[]{:T(128)}
allocation 6: size 1048576, page 0, parameter 0, shape |f32[4096,64]| at ShapeIndex {}, maybe-live-out:
allocation 7: size 512, page 0, parameter 1, shape |s32[8]| at ShapeIndex {}:
allocation 119: size 512, page 0, maybe-live-out:
allocation 160: size 192, page 0, output shape is |(f32[4096,64], f32[])|, maybe-live-out:
allocation 161: size 256, page 0, constant:
allocation 380: size 4, color 2, page 0, preallocated-temp:
allocation 381: size 135593984, page 0, preallocated-temp:
allocation 382: size 67043328, color 1, page 0, preallocated-temp:
"""


def test_allocations_in_device_memory_are_added_up():
    """Arguments (those that results take the place of, too), temporaries, other results; not what has another color."""
    found = assigned_sizes(ALLOCATIONS)
    assert (found.argument_size_in_bytes, found.temp_size_in_bytes) == (1048576 + 512, 135593984)
    assert (found.output_size_in_bytes, found.alias_size_in_bytes) == (512 + 192, 0)


class Compiling:
    """A compilation that writes its files, or fails."""

    def __init__(self, files: dict[str, str], error: Exception | None = None):
        self.files, self.error = files, error

    def compile(self, compiler_options):
        assert compiler_options["a"] == "1"
        if self.error is not None:
            raise self.error
        for name, text in self.files.items():
            pathlib.Path(compiler_options["xla_dump_to"], f"module_0000.jit_f.{name}").write_text(text)
        time.sleep(1)


def test_a_compilation_is_abandoned_once_memory_is_assigned(monkeypatch):
    monkeypatch.setattr(compile, "abandoned", [])
    files = {"after_optimizations-buffer-assignment.txt": ALLOCATIONS}
    files |= {"after_optimizations_after_buffer_assignment.txt": "HloModule f", "debug_options": ""}
    sizes, text = compile.compile_until_assigned(Compiling(files), {"a": "1"})
    assert (sizes, text) == (assigned_sizes(ALLOCATIONS), "HloModule f")
    assert [thread.is_alive() for thread in compile.abandoned] == [True]
    with pytest.raises(ValueError, match="no room"):
        compile.compile_until_assigned(Compiling({}, ValueError("no room")), {"a": "1"})
