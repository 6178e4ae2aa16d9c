"""What compiled steps of meshes of TPUs send: no more than they did. Needs libtpu, and a jaxlib that can print."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_decoders as ed
from eqx_decoders.cli.xla_flags import options as xla_options
from eqx_decoders.numerics.einsum import einsum
from eqx_decoders.numerics.rounded_weight import Rounded
from eqx_decoders.planning.collectives import Collective, collectives, overlapped_fraction
from eqx_decoders.planning.hlo import parse
from eqx_decoders.planning.traced_memory import abstract_batch
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.step import Trainer
from tests.programs import tpu_devices


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jaxlib 0.10 can't print programs of today's libtpu"),
]

PIPELINE = dict(stage=2, fsdp=2)
# GB that a device sends in a step of four layers of Llama 3.2 1B (0.24 billion weights and a table of 0.26), 8 x 2048
MOST: dict[str, tuple[dict[str, int], dict[str, object], float]] = {
    "data": (dict(data=4), {}, 2.588),
    "fsdp": (dict(fsdp=4), {}, 2.291),
    "data and fsdp": (dict(data=2, fsdp=2), {}, 2.807),
    "tensor": (dict(tensor=4), {}, 1.544),
    "fsdp and tensor": (dict(fsdp=2, tensor=2), {}, 1.841),
    "context": (dict(context=4), {}, 3.088),
    "context, exchanged heads": (dict(fsdp=2, context=2), dict(context_form="all_to_all"), 3.188),
    "pipeline": (PIPELINE, dict(pipeline=ed.Pipeline(microbatches=4)), 6.421),
    "pipeline, weights once a repeat": (PIPELINE, dict(pipeline=ed.Pipeline(microbatches=4, gather="repeat")), 3.258),
    "pipeline, weights once": (PIPELINE, dict(pipeline=ed.Pipeline(microbatches=4, gather="once")), 3.258),
    "pipeline, late": (PIPELINE, dict(pipeline=ed.Pipeline(microbatches=4, delay=True)), 7.356),
    "pipeline, two repeats": (PIPELINE, dict(pipeline=ed.Pipeline(microbatches=4, repeats=2)), 5.420),
    "pipeline, a layer outside": (PIPELINE, dict(pipeline=ed.Pipeline(microbatches=4), layers=5), 7.516),
    "pipeline and context": (
        dict(stage=2, context=2),
        dict(pipeline=ed.Pipeline(microbatches=4), context_form="ring"),
        6.631,
    ),
}


def sent_by(
    topology: str, sizes: dict[str, int], layers: int = 4, flags=None, name: str = "llama3.2-1b", **options
) -> list[Collective]:
    """Compile a step for a topology; return its collectives."""
    layout = ed.Layout.create(**sizes, devices=tpu_devices(topology))
    config = ed.get_config(name)
    config = dataclasses.replace(config, blocks=config.blocks[:layers])
    precision = ed.Precision(compute=jnp.bfloat16)
    model = ed.abstract(config, layout=layout, precision=precision, remat="full", **options)
    trainer = Trainer.create(OptimizerConfig(), model, steps=100)
    step = jax.jit(trainer.advance, donate_argnums=0)
    traced = step.trace(
        trainer.abstract(model, key=jax.random.key(0)), abstract_batch(layout, max(8, *sizes.values()), 2048)
    )
    return collectives(parse(traced.lower().compile(compiler_options=flags).as_text()), layout.sizes)


@pytest.mark.parametrize("name", MOST)
def test_steps_send_at_most_the_recorded_bytes(name):
    sizes, options, most = MOST[name]
    found = sent_by("v5p:2x2x1", sizes, **options)
    sent = sum(each.total for each in found) / 1e9
    print(f"{name}: {sent:.3f} GB")
    assert sent <= 1.02 * most


@pytest.mark.parametrize(
    ("topology", "fsdp", "name", "layers", "least"),
    [
        ("v5p:2x2x1", 4, "llama3.2-1b", 4, 0.9),
        ("v6e:2x2", 4, "llama3.2-1b", 4, 0.9),
        ("v5p:2x2x2", 8, "gemma3-12b", 12, 0.94),
        ("v5e:4x8", 32, "llama3-8b", 4, 0.9),
    ],
)
def test_collectives_of_layer_weights_overlap_with_products(topology, fsdp, name, layers, least):
    """With the options of training: gathers of weights, and sums of their gradients. The head's are alone.

    Gemma's layers are two cycles of six, whose weights are gathered for one layer after the other.
    """
    flags = xla_options(topology.split(":")[0])
    found = sent_by(topology, dict(fsdp=fsdp), flags=flags, name=name, layers=layers)
    part = [each for each in found if each.cause.startswith(("attention", "mlp"))]
    print(f"{topology}: {overlapped_fraction(part):.3f} of the layers', {overlapped_fraction(found):.3f} of all")
    assert overlapped_fraction(part) > least


@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
def test_collectives_of_expert_gradients_overlap_with_products(topology):
    """XLA's kernel of grouped products and Pallas's: no sum of a whole array, and rings go on beside the products."""
    found = sent_by(topology, dict(fsdp=4), layers=2, name="qwen3-30b-a3b")
    sums = [each for each in found if each.cause.startswith("experts") and each.phase == "backward"]
    print(f"{topology}: {overlapped_fraction(sums):.3f} of {sum(each.total for each in sums) / 1e9:.3f} GB")
    assert {each.kind for each in sums} == {"collective-permute"} and overlapped_fraction(sums) > 0.9
    assert all(each.bytes < 10**7 for each in found if each.kind == "all-reduce")


@pytest.mark.parametrize(("topology", "mode"), [("v5p:2x2x1", "int8"), ("tpu7x:2x2x1", "fp8")])
@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
def test_products_in_8_bits_send_weights_as_bytes_and_sums_in_16_bits(topology, mode, axis):
    """Of two products and their gradients: every product is of 8-bit numbers, and no sum travels in 32 bits."""
    devices = tpu_devices(topology)
    layout = ed.Layout.create(
        fsdp=len(devices) // 2,
        **({} if axis == "fsdp" else {axis: 2}),
        devices=devices[: len(devices) // (2 if axis == "fsdp" else 1)],
    )
    config = ed.LowPrecision(mode=mode)

    def loss(weights, x):
        def layer(x, weights):
            up, down = (Rounded(each, seed=None, config=config) for each in weights)
            y = einsum("batch length embed, embed mlp -> batch length mlp", x, up, layout=layout)
            y = layout.constrain(y, "batch length mlp")
            y = einsum("batch length mlp, mlp embed -> batch length embed", y, down, layout=layout)
            return layout.constrain(y, "batch length embed"), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2)

    def like(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(layout.mesh, spec))

    words = ("embed", "mlp"), ("mlp", "embed")
    weights = tuple(like((4, 1024, 1024), jnp.float32, P(None, *layout.weight_spec(" ".join(each)))) for each in words)
    x = like((8, 1024, 1024), jnp.bfloat16, layout.activation_spec("batch length embed"))
    split = jax.tree.map(lambda leaf: leaf.sharding, (weights, x))
    program = jax.jit(jax.grad(loss, argnums=(0, 1)), out_shardings=split).lower(weights, x).compile().as_text()
    sums = "s32" if mode == "int8" else "f32"
    assert set(re.findall(r"= (\w+)\[\S* (?:convolution|dot)\(", program)) == {sums}
    sent = {}
    for each in collectives(parse(program), layout.sizes):
        kind = each.kind, re.sub(r"\[.*", "", each.shape)
        sent[kind] = sent.get(kind, 0) + each.total
    print(topology, mode, axis, sent)
    parts = 2 if axis == "tensor" else 1
    # both weights of four layers, once forwards, and as much again where they are not kept; as bytes
    assert sent["all-gather", "u8"] <= 2 * 2 * 4 * 1024 * 1024 / parts
    rest = sum(size for (_, dtype), size in sent.items() if dtype not in ("u8", "bf16"))
    assert rest < 0.02 * sum(sent.values())  # the largest numbers of rows and columns
