"""What compiled steps of meshes of TPUs send: no more than they did. Needs libtpu, and a jaxlib that can print."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import eqx_decoders as ed
from eqx_decoders.planning.collectives import collectives
from eqx_decoders.planning.hlo import parse
from eqx_decoders.planning.plan import abstract_batch
from eqx_decoders.training.optimizer import OptimizerConfig
from eqx_decoders.training.step import Trainer
from tests.programs import tpu_devices


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jaxlib 0.10 can't print programs of today's libtpu"),
]

# GB that a device sends in a step of four layers of Llama 3.2 1B (0.24 billion weights and a table of 0.26), 8 x 2048
MOST: dict[str, tuple[dict[str, int], dict[str, object], float]] = {
    "data": (dict(data=4), {}, 2.588),
    "fsdp": (dict(fsdp=4), {}, 3.084),
    "data and fsdp": (dict(data=2, fsdp=2), {}, 3.860),
    "tensor": (dict(tensor=4), {}, 1.544),
    "fsdp and tensor": (dict(fsdp=2, tensor=2), {}, 2.365),
    "context": (dict(context=4), {}, 3.487),
    "context, exchanged heads": (dict(fsdp=2, context=2), dict(context_form="all_to_all"), 4.113),
    "pipeline": (dict(stage=2, fsdp=2), dict(pipeline=ed.Pipeline(microbatches=4)), 7.246),
}


@pytest.mark.parametrize("name", MOST)
def test_a_step_sends_no_more(name):
    sizes, options, most = MOST[name]
    layout = ed.Layout.create(**sizes, devices=tpu_devices("v5p:2x2x1"))
    config = ed.get_config("llama3.2-1b")
    config = dataclasses.replace(config, blocks=config.blocks[:4])
    precision = ed.Precision(compute=jnp.bfloat16)
    model = ed.abstract(config, layout=layout, precision=precision, remat="full", **options)
    trainer = Trainer.create(OptimizerConfig(), model, steps=100)
    step = jax.jit(trainer.advance, donate_argnums=0)
    traced = step.trace(trainer.abstract(model, key=jax.random.key(0)), abstract_batch(layout, 8, 2048))
    found = collectives(parse(traced.lower().compile().as_text()), layout.sizes)
    sent = sum(each.total for each in found) / 1e9
    print(f"{name}: {sent:.3f} GB")
    assert sent <= 1.02 * most
