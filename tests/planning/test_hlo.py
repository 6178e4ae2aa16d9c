"""Reading compiled programs: written by hand, where every count is known, and compiled here."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from eqx_decoders.context import Execution, ForwardContext
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.planning.collectives import Collective, axes_of, collectives, groups_of, overlapped_fraction, phase_of
from eqx_decoders.planning.device_memory import stacked_bytes
from eqx_decoders.planning.hlo import functions, members, parse, shape_bytes


# A mesh of data=2 x tensor=2. In the entry: a loop of 3 trips, in it one of 5; a condition; pairs of asynchronous ones.
TEXT = """HloModule jit_step, is_scheduled=true

FileNames
1 "elsewhere/model.py"

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.2 (input: bf16[8,4]) -> bf16[4,4] {
  %input = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.1 = bf16[8,4]{1,0:T(8,128)(2,1)} all-reduce(%input), replica_groups={{0,2},{1,3}}, to_apply=%add
  ROOT %cut = bf16[4,4]{1,0} dynamic-slice(%all-reduce.1), dynamic_slice_sizes={4,4}
}

%inner_condition (p: (s32[], f32[4])) -> pred[] {
  %bound = s32[] constant(5)
  %p = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

%inner_body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4] get-tuple-element(%p), index=1
  %gather = f32[8]{0} all-gather(%x), replica_groups=[2,2]<=[4], dimensions={0}, metadata={op_name="jit(step)/jvp()/while/body/while/body/eval_jaxpr/dot_general"}
  ROOT %next = (s32[], f32[4]) tuple(%i, %x)
}

%outer_condition (p: (s32[], f32[4], f32[3,4], f32[3,2])) -> pred[] {
  %p = (s32[], f32[4], f32[3,4], f32[3,2]) parameter(0)
  ROOT %less = pred[] custom-call(%p), custom_call_target="less"
}

%outer_body (p: (s32[], f32[4], f32[3,4], f32[3,2])) -> (s32[], f32[4], f32[3,4], f32[3,2]) {
  %p = (s32[], f32[4], f32[3,4]{1,0:T(4,128)}, /*index=3*/f32[3,2]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4] get-tuple-element(%p), index=1
  %kept = f32[3,4]{1,0:T(4,128)} get-tuple-element(%p), index=2
  %weights = f32[3,2] get-tuple-element(%p), index=3
  %inner = (s32[], f32[4]) while(%p), condition=%inner_condition, body=%inner_body
  %scatter = bf16[4,4] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.2, metadata={op_name="jit(step)/transpose(jvp())/while/body/checkpoint/rematted_computation/mul"}
  %write = f32[3,4]{1,0:T(4,128)} dynamic-update-slice(%kept, %x, %i)
  ROOT %next = (s32[], f32[4], f32[3,4]{1,0:T(4,128)}, /*index=3*/f32[3,2]) tuple(%i, %x, %write, /*index=3*/%weights)
}

%light (p: f32[16]) -> f32[16] {
  %p = f32[16] parameter(0)
  ROOT %small = f32[16] all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%add
}

%heavy (p: f32[16]) -> f32[16] {
  %p = f32[16] parameter(0)
  %one = f32[16] all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %two = (f32[16], u8[4]) all-reduce(%one, %p), replica_groups={}, to_apply=%add
}

%wrapped (p: f32[2]) -> f32[4] {
  %p = f32[2] parameter(0)
  ROOT %gather.7 = f32[4] all-gather(%p), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
}

%offloaded (p: f32[8]) -> f32[16] {
  %p = f32[8] parameter(0)
  ROOT %gather.8 = f32[16] all-gather(%p), replica_groups=[2,2]<=[4], dimensions={0}
}

%while_data_decide (p: (f32[4])) -> (f32[4]) {
  %p = (f32[4]) parameter(0)
  %x = f32[4] get-tuple-element(%p), index=0
  %moved = f32[4] collective-permute(%x), source_target_pairs={{0,2},{2,0},{1,3},{3,1}}
  ROOT %next = (f32[4]) tuple(%moved)
}

%unknown (p: (f32[4])) -> pred[] {
  %p = (f32[4]) parameter(0)
  ROOT %less = pred[] custom-call(%p), custom_call_target="less"
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4] parameter(0)
  %outer = (s32[], f32[4], f32[3,4], f32[3,2]) while(%x), condition=%outer_condition, body=%outer_body, metadata={op_name="jit(step)/jvp()/while"}, backend_config={"known_trip_count":{"n":"3"}}
  %either = f32[16] conditional(%x, %x), branch_computations={%light, %heavy}
  %begin = ((f32[2]), f32[4], u32[]) async-start(%x), calls=%wrapped
  %more = ((f32[2]), f32[4], u32[]) async-update(%begin), calls=%wrapped
  %end = f32[4] async-done(%more), calls=%wrapped
  %core = ((f32[8]), f32[16]) custom-call-start(%x), called_computations={%offloaded}
  %core.1 = ((f32[8]), f32[16]) custom-call-update(%core), called_computations={%offloaded}
  %core.2 = f32[16] custom-call-done(%core.1), called_computations={%offloaded}
  %token = token[] after-all()
  %send = (bf16[6]{0:T(128)}, u32[], token[]) send(%x, %token), channel_id=4, is_host_transfer=true, frontend_attributes={_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2}x{0:1}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %start = (f32[2]{0:T(128)}, f32[4]{0:T(128)}, u32[]{:S(2)}) all-gather-start(%x), replica_groups=mesh['a'=2,'b'=2] {'b'}, dimensions={0}
  %done = f32[4]{0:T(128)} all-gather-done(%start)
  %part = f32[2,3] reduce-scatter(%x), replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=%add
  %turns = (f32[4]) while(%x), condition=%unknown, body=%while_data_decide
  %alone = f32[400] all-gather(%x), replica_groups={{0},{1},{2},{3}}, dimensions={0}
  ROOT %result = f32[4] add(%x, %x)
}
"""  # noqa: E501

MESH = {"data": 2, "tensor": 2}


def test_collectives_are_counted_once_per_execution():
    """By hand: bytes of the largest buffer, trips of all loops around it, axes, and the heavier of two branches."""
    found = collectives(parse(TEXT), MESH)
    rows = {(one.kind, one.times, one.bytes, one.axes, one.phase, one.cause) for one in found}
    assert rows == {
        ("all-gather", 15, 32, ("tensor",), "forward", "dot_general"),
        ("reduce-scatter", 3, 64, ("data",), "recomputed", "mul"),
        ("all-reduce", 1, 64, ("data", "tensor"), "update", ""),
        ("all-reduce", 1, 68, ("data", "tensor"), "update", ""),
        ("all-gather", 1, 16, ("data",), "update", ""),
        ("all-gather", 1, 64, ("tensor",), "update", ""),
        ("all-reduce", 1, 12, ("data",), "update", ""),  # between slices
        ("all-gather", 1, 16, ("tensor",), "update", ""),
        ("reduce-scatter", 1, 48, ("tensor",), "update", ""),
        ("collective-permute", 1, 16, ("data",), "update", ""),
    }
    assert [one.total for one in found] == sorted((one.total for one in found), reverse=True)
    assert [one.kind for one in found if one.unknown] == ["collective-permute"]
    assert max(found, key=lambda one: one.total).shape == "f32[8]"


def test_ragged_exchanges_count_the_smaller_buffer():
    """There and back: the larger buffer has room for the worst case."""
    text = """ENTRY %main (x: bf16[4,8]) -> bf16[4,8] {
  %x = bf16[4,8] parameter(0)
  %room = bf16[64,8] broadcast(%x)
  %there = bf16[64,8] ragged-all-to-all(%x, %room), replica_groups={{0,1},{2,3}}
  ROOT %back = bf16[4,8] ragged-all-to-all(%there, %x), replica_groups={{0,1},{2,3}}
}
"""
    (found,) = collectives(parse(text), MESH)
    assert (found.kind, found.bytes, found.times, found.axes) == ("ragged-all-to-all", 64, 2, ("tensor",))


def test_kernel_text_may_have_several_lines():
    """Splash attention describes its blocks so; what follows belongs to the same computation."""
    text = """ENTRY %main (x: bf16[4]) -> bf16[8] {
  %x = bf16[4] parameter(0)
  %kernel = bf16[4] custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"blocks":"{\\"block_q\\": 512}"
}}, metadata={op_name="jit(step)/splash"}
  ROOT %gathered = bf16[8] all-gather(%kernel), replica_groups={{0,1},{2,3}}, dimensions={0}
}
"""
    (found,) = collectives(parse(text), MESH)
    assert (found.kind, found.bytes) == ("all-gather", 16)


# Each collective as it is, and as XLA:GPU starts it; the last one as XLA:TPU does. One is in a fusion.
ASYNCHRONOUS = """%reduced (p: bf16[64]) -> bf16[64] {
  %p = bf16[64]{0} parameter(0)
  ROOT %inside = bf16[64]{0} all-reduce(%p), replica_groups=GROUPS, to_apply=%add
}

ENTRY %main (x: bf16[8,4], y: bf16[64]) -> bf16[8,4] {
  %x = bf16[8,4]{1,0} parameter(0)
  %y = bf16[64]{0} parameter(1)
  LINES
  ROOT %result = bf16[8,4] add(%x, %x)
}
"""
CAUSE = ', metadata={op_name="jit(step)/jvp()/psum"}'
PAIRS = {
    "all-gather": ("bf16[16,4]{1,0} NAME(%x)", "((bf16[8,4]{1,0}), bf16[16,4]{1,0}) NAME-start(%x)", 128),
    "reduce-scatter": ("bf16[4,4]{1,0} NAME(%x)", "((bf16[8,4]{1,0}), bf16[4,4]{1,0}) NAME-start(%x)", 64),
    "all-to-all": ("bf16[8,4]{1,0} NAME(%x)", "((bf16[8,4]{1,0}), bf16[8,4]{1,0}) NAME-start(%x)", 64),
    "collective-permute": ("bf16[8,4]{1,0} NAME(%x)", "((bf16[8,4]{1,0}), bf16[8,4]{1,0}) NAME-start(%x)", 64),
    "several": (
        "(bf16[4,4]{1,0}, bf16[32]{0}) reduce-scatter(%x, %y)",
        "((bf16[8,4]{1,0}, /*index=1*/bf16[64]{0}), (bf16[4,4]{1,0}, bf16[32]{0})) reduce-scatter-start(%x, %y)",
        192,
    ),
    "all-reduce": ("bf16[8,4]{1,0} NAME(%x)", "((bf16[8,4]{1,0}), bf16[8,4]{1,0}) NAME-start(%x)", 64),
    "fusion": (
        "bf16[64]{0} NAME(%y), kind=kCustom, calls=%reduced" + CAUSE,
        "((bf16[64]{0}), bf16[64]{0}) NAME-start(%y), kind=kCustom, calls=%reduced" + CAUSE,
        128,
    ),
    "of TPUs": (
        "(bf16[8,4]{1,0}, bf16[64]{0}) all-reduce(%x, %y)",
        "(bf16[8,4]{1,0}, bf16[64]{0}) all-reduce-start(%x, %y)",
        192,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_asynchronous_collectives_count_like_synchronous_ones(name):
    """Operands that a start returns beside its results are not sent twice."""
    *both, size = PAIRS[name]

    def read(call):
        groups = "{{0,1},{2,3}}"
        more = "" if "calls" in call else f", replica_groups={groups}, source_target_pairs={groups}"
        line, done = call.replace("NAME", name) + more, "bf16[8,4]{1,0} NAME-done(%a)".replace("NAME", name)
        lines = f"%a = {line}\n  %b = {done}" if "-start(" in call else f"%a = {line}"
        text = ASYNCHRONOUS.replace("LINES", lines).replace("GROUPS", groups)
        return collectives(parse(text), MESH)

    at_once, later = map(read, both)
    assert at_once == later and [one.total for one in later] == [size]
    assert [one.phase for one in later] == ["forward" if name == "fusion" else "update"]


# A schedule in a loop or in the entry; %deep multiplies two calls away, %light does not multiply.
SCHEDULE = """HloModule step, is_scheduled=true

%inner (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8] parameter(0)
  ROOT %dot = f32[8,8] dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%deep (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8] parameter(0)
  ROOT %fused = f32[8,8] fusion(%p), kind=kOutput, calls=%inner
}

%light (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8] parameter(0)
  ROOT %sum = f32[8,8] add(%p, %p)
}

%gather (p: f32[4,8]) -> f32[8,8] {
  %p = f32[4,8] parameter(0)
  ROOT %wrapped = f32[8,8] all-gather(%p), replica_groups={{0,1},{2,3}}, dimensions={0}
}

%async_collective_fusion.1 (p: f32[4,8]) -> (f32[8,8], f32[8,8]) {
  %p = f32[4,8] parameter(0)
  %q = f32[8,8] parameter(1)
  %part = f32[8,8] all-gather(%p), replica_groups={{0,1},{2,3}}, dimensions={0}
  %dot = f32[8,8] KIND(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %both = (f32[8,8], f32[8,8]) tuple(%part, %dot)
}

%condition (p: (f32[8,8])) -> pred[] {
  %p = (f32[8,8]) parameter(0)
  ROOT %less = pred[] custom-call(%p), custom_call_target="less"
}

%body (p: (f32[8,8])) -> (f32[8,8]) {
  %p = (f32[8,8]) parameter(0)
  %x = f32[8,8] get-tuple-element(%p), index=0
  BODY
  ROOT %next = (f32[8,8]) tuple(%x)
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8] parameter(0)
  ENTRY
  ROOT %result = f32[8,8] add(%x, %x)
}
"""
SYNCHRONOUS = "%g = f32[8,8] all-gather(%x), replica_groups={{0,1},{2,3}}, dimensions={0}"
START = "%s = (f32[8,8], f32[8,8]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}"
DONE = "%d = f32[8,8] collective-permute-done(%s)"
WRAPPED = "%s = ((f32[4,8]), f32[8,8], u32[]) async-start(%x), calls=%gather"
UPDATE = "%u = ((f32[4,8]), f32[8,8], u32[]) async-update(%s)"
OTHER = "%o = ((f32[8,8]), f32[8,8], u32[]) async-start(%x), calls=%deep"
DOT = "%y = f32[8,8] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
DEEP, LIGHT = (f"%y = f32[8,8] fusion(%x), kind=kLoop, calls=%{name}" for name in ("deep", "light"))
SEND = '%s = (f32[8,8], token[]) send(%x, %x), frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}'
LOOP = '%l = (f32[8,8]) while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}'


@pytest.mark.parametrize(
    "entry, body, share",
    [
        ((SYNCHRONOUS, DOT), (), 0),
        ((START, DOT, DONE), (), 1),
        ((DOT, START, DONE, DOT), (), 0),
        ((START, LIGHT, DONE), (), 0),
        ((START, DEEP, DONE), (), 1),
        ((START, LOOP, DONE), (DOT,), 1),
        ((START, LOOP, DONE), (LIGHT,), 0),
        ((LOOP,), (START, DOT, DONE), 1),
        ((LOOP,), (DOT, START, DONE), 0),
        ((LOOP, START, DONE), (START, DEEP, DONE), 0.75),
        ((START, "%c = f32[8,8] conditional(%x, %x), branch_computations={%light, %deep}", DONE), (), 1),
        ((START, '%k = f32[8,8] custom-call(%x), custom_call_target="tpu_custom_call"', DONE), (), 1),
        ((START, '%k = f32[8,8] custom-call(%x), custom_call_target="__cublas$gemm"', DONE), (), 1),
        ((START, '%k = f32[8,8] custom-call(%x), custom_call_target="AllocateBuffer"', DONE), (), 0),
        ((WRAPPED, DOT, UPDATE, "%d = f32[8,8] async-done(%u), calls=%gather"), (), 1),
        ((WRAPPED, UPDATE, DOT, "%d = f32[8,8] async-done(%u), calls=%gather"), (), 1),
        ((DOT, WRAPPED, UPDATE, "%d = f32[8,8] async-done(%u), calls=%gather", DOT), (), 0),
        ((SEND, DOT, "%d = token[] send-done(%s)"), (), 1),
        ((SEND, "%d = token[] send-done(%s)", DOT), (), 0),
        ((START, OTHER, DONE, "%e = f32[8,8] async-done(%o), calls=%deep"), (), 1),
        ((OTHER, START, "%e = f32[8,8] async-done(%o), calls=%deep", DONE), (), 0),
    ],
)
def test_collectives_overlap_with_products_between_start_and_end(entry, body, share):
    lines = {"  BODY": body, "  ENTRY": entry}
    text = SCHEDULE
    for word, each in lines.items():
        text = text.replace(word, "\n".join(f"  {line}" for line in each))
    assert overlapped_fraction(collectives(parse(text), MESH)) == share


@pytest.mark.parametrize("kind, share", [("dot", 1), ("add", 0)])
def test_a_collective_fused_with_products_is_counted_once(kind, share):
    """XLA:TPU writes it three times: in its start, in the fusion with a product, and in its end."""
    lines = """
  %async-collective-start.1 = (f32[4,8], f32[8,8]) fusion(%x), kind=kCustom, calls=%gather
  %fusion.1 = (f32[8,8], f32[8,8]) fusion(%async-collective-start.1#0, %x), calls=%async_collective_fusion.1
  %async-collective-done.1 = f32[8,8] fusion(%fusion.1#0), kind=kCustom, calls=%gather"""
    text = SCHEDULE.replace("  ENTRY", lines + f"\n  {DOT}").replace("KIND", kind)
    (found,) = collectives(parse(text), MESH)
    assert (found.kind, found.times, found.bytes, found.overlapped) == ("all-gather", 1, 256, share)


def test_overlap_without_collectives_is_1():
    assert overlapped_fraction([]) == 1


def test_saved_activations_are_the_slices_that_a_loop_writes():
    """Three pieces of 16 bytes; the weights that it reads, of three pieces, too, are none."""
    program = parse(TEXT)
    (loop, *_) = program.loops()
    assert program.trips(loop.op) == 3 and program.stacked(loop.op) == {"f32[3,4]": 1}
    assert stacked_bytes(program) == 48


@pytest.mark.parametrize(
    "shape, size",
    [
        ("f32[]", 4), ("bf16[2,3]{1,0:T(8,128)(2,1)}", 12), ("(f32[2]{0}, (s32[3], u8[4]))", 24), ("pred[7]", 7),
        ("s4[3]", 2), ("f8e4m3fn[5]", 5), ("c64[2]", 16), ("u32[]{:S(2)}", 4), ("token[]", 0), ("f32[<=8,2]", 64),
        ("()", 0),
    ],
)  # fmt: skip
def test_bytes_of_shapes(shape, size):
    assert shape_bytes(shape) == size


def test_members_of_tuples():
    assert members("(f32[2]{0:T(8,128)}, /*index=1*/(s32[], u8[4]))") == ["f32[2]{0:T(8,128)}", "(s32[], u8[4])"]
    assert members("f32[2]{0}") == ["f32[2]{0}"] and members("()") == []


@pytest.mark.parametrize(
    "text, groups",
    [
        ("replica_groups={{0,1},{2,3}}, x", ((0, 1), (2, 3))),
        ("replica_groups={}, x", ((0, 1, 2, 3),)),
        ("channel_id=1", ((0, 1, 2, 3),)),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x={0}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, y={'b'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("source_target_pairs={{0,1},{1,0}}, x", ((0, 1), (1, 0))),
    ],
)
def test_groups_in_all_formats(text, groups):
    assert groups_of(text, 4) == groups


def test_axes_are_those_along_which_a_group_differs():
    mesh = (("data", 2), ("fsdp", 2), ("tensor", 2))
    assert axes_of(((0, 1), (2, 3), (4, 5), (6, 7)), mesh) == ("tensor",)
    assert axes_of(((0, 2, 4, 6), (1, 3, 5, 7)), mesh) == ("data", "fsdp")
    assert axes_of(((0, 3),), mesh) == ("fsdp", "tensor")


def test_phases():
    assert phase_of("jit(step)/jvp()/while/body/dot") == "forward"
    assert phase_of("jit(step)/transpose(jvp())/while/body/dot") == "backward"
    assert phase_of("jit(step)/transpose(jvp())/while/checkpoint/rematted_computation/dot") == "recomputed"
    assert phase_of("jit(step)/cond/branch_1_fun/mul") == "update"


@functools.cache
def compiled() -> list[Collective]:
    """Of a scan of three layers on eight devices, with a sum of 5 x 7 numbers along `tensor` in each."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    split = NamedSharding(mesh, PartitionSpec("data", None))

    def local(x):
        def layer(x, _):
            return jnp.sin(jax.lax.psum(x, "tensor")), None

        return jax.lax.scan(layer, x, length=3)[0]

    spec = PartitionSpec("data")
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    shape = jax.ShapeDtypeStruct((10, 7), jnp.float32, sharding=split)
    return collectives(parse(step.lower(shape).compile().as_text()), dict(mesh.shape))


def test_a_compiled_program_has_the_traffic_that_it_was_written_with():
    assert {one.kind for one in compiled()} == {"all-reduce"}
    assert {one.axes for one in compiled()} == {("tensor",)}
    assert sum(one.total for one in compiled()) == 3 * 5 * 7 * 4


def test_products_are_attributed_to_their_layers():
    """And not to `einsum`, through which those of all layers pass."""
    layer = MLPConfig(mlp_dim=8).build(8, key=jax.random.key(0))
    ctx = ForwardContext(positions=jnp.arange(4, dtype=jnp.int32)[None], execution=Execution())
    grad = jax.grad(lambda layer, x: jnp.sum(layer(x, ctx)))
    text = jax.jit(grad).lower(layer, jnp.ones((1, 4, 8))).compile().as_text()
    owners = set(functions(text).values())
    assert any(owner.startswith("mlp: MLP") for owner in owners)
    assert not any(owner.startswith(("einsum", "matmul")) for owner in owners)
