"""Checkpoints are restored bit by bit, or an error names the arrays that differ."""

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from eqx_decoders.errors import CheckpointError, MissingPackage
from eqx_decoders.io.checkpoint import reading
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints, load_weights
from eqx_decoders.io.checkpoint.manifest import digest, fingerprint
from eqx_decoders.io.checkpoint.steps import COMMITTED, SET_ASIDE, TEMPORARY, Steps
from eqx_decoders.sharding.axes import named_leaves
from tests.commands import ROOT
from tests.errors import assert_names, refused
from tests.programs import no_renames


# After an error, Orbax leaves unfinished tasks.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]


class Model(eqx.Module):
    weight: jax.Array
    bias: jax.Array | None
    size: int = eqx.field(static=True)
    act: object = jax.nn.silu


class State(eqx.Module):
    model: Model
    optimizer: optax.OptState
    key: jax.Array
    step: jax.Array


def make_state(seed=0, bias=True, shape=(64, 16)):
    """The weights are too large for Orbax to store them inline, where it checks them."""
    weight = jax.random.normal(jax.random.key(seed), shape)
    model = Model(weight, jnp.full(8, seed + 1.5, jnp.bfloat16) if bias else None, 3)
    optimizer = optax.adamw(1e-3).init(eqx.filter(model, eqx.is_array))
    return State(model, optimizer, jax.random.key(seed + 7, impl="rbg"), jnp.int32(seed))


def bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes(), leaf.shape, str(leaf.dtype)


def arrays(tree):
    return {name: bits(leaf) for name, leaf in named_leaves(tree).items() if eqx.is_array(leaf)}


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert arrays(one) == arrays(other)


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x, tree)


@pytest.fixture(scope="module", params=["renamed", "in place"])
def mode(request):
    """Rename complete steps, or write in place if renaming is not supported, as in a bucket."""
    return request.param


@pytest.fixture(autouse=True)
def writing(request):
    """Write steps in the `mode` of the test."""
    in_place = "mode" in request.fixturenames and request.getfixturevalue("mode") == "in place"
    with no_renames() if in_place else contextlib.nullcontext():
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory, mode):
    """Return a directory with steps 10 and 20, which tests copy and do not change."""
    directory = tmp_path_factory.mktemp("saved")
    with no_renames() if mode == "in place" else contextlib.nullcontext(), Checkpoints(directory) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, make_state(step), data_state={"next": step}, config={"layers": 2})
    return directory


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


@pytest.mark.slow(fast=("in place",))
def test_round_trip_of_modules_optimizer_and_keys(saved):
    for template in (make_state(1), abstract(make_state(1))):
        tree, data_state, step = Checkpoints(saved).restore(template)
        assert_same(tree, make_state(20))
        assert (data_state, step) == ({"next": 20}, 20)
        assert tree.model.size == 3 and tree.model.act is jax.nn.silu
    assert Checkpoints(saved).restore(make_state(), step=10).step == 10
    assert Checkpoints(saved).manifest()["config"] == {"layers": 2}


@pytest.mark.slow
def test_every_kind_of_array(tmp_path):
    tree = {
        "bool": jnp.array([True, False, True]),
        "int4": jnp.arange(-4, 4).astype(jnp.int4),
        "int8": jnp.arange(-4, 4, dtype=jnp.int8),
        "fp8": jnp.arange(5.0).astype(jnp.float8_e4m3fn),
        "f16": jnp.float16(2.5),
        "complex": jnp.array([1 + 2j, 3j], jnp.complex64),
        "odd": {"a/b": jnp.array([jnp.nan, -0.0, jnp.inf]), "": jnp.ones((1, 1))},
        "empty": jnp.zeros((0, 3)),
        "keys": jax.random.split(jax.random.key(3), 4),
        "rbg": jax.random.key(3, impl="rbg"),
        "legacy": jax.random.PRNGKey(4),
        "python": (1, 2.5, "text", None),
    }
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, tree, data_state={}, config="text")
    assert_same(Checkpoints(tmp_path).restore(tree).tree, tree)
    template = {**tree, "rbg": jax.random.key(3)}
    with refused(CheckpointError, "rbg", "key<rbg>[]", "key<fry>[]"):
        Checkpoints(tmp_path).restore(template)


def test_donation_right_after_an_asynchronous_save(tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    shardings = [NamedSharding(mesh, P("x")), NamedSharding(mesh, P()), jax.devices()[0]]

    def make():
        return [jax.device_put(jnp.arange(1 << 18, dtype=jnp.float32), s) for s in shardings]

    want = arrays(make())
    jax.block_until_ready([overwrite(x) for x in make()])  # compiled before, because it must run during the write
    with Checkpoints(tmp_path, max_checkpoints=9) as checkpoints:
        for step in range(3):
            tree = make()
            checkpoints.save(step, tree, data_state={}, config={})
            jax.block_until_ready([overwrite(overwrite(x)) for x in tree])
            for x in tree:
                x.delete()
        checkpoints.wait()
        for step in range(3):
            assert arrays(checkpoints.restore(make(), step).tree) == want


def test_restore_on_other_meshes_is_bit_equal(tmp_path):
    devices = np.array(jax.devices())
    layouts = [
        (Mesh(devices, ("a",)), P("a")),
        (Mesh(devices.reshape(4, 2), ("a", "b")), P("a", "b")),
        (Mesh(devices[:2].reshape(1, 2), ("a", "b")), P(None, "b")),
        (Mesh(devices[:1], ("a",)), P()),
    ]

    def place(mesh, spec, source):
        def put(leaf):
            return jax.device_put(leaf, NamedSharding(mesh, spec if leaf.ndim == 2 else P()))

        return jax.tree.map(lambda x: put(x) if eqx.is_array(x) else x, source)

    want, prints = make_state(5), set()
    for number, (mesh, spec) in enumerate(layouts):
        directory = tmp_path / str(number)
        with Checkpoints(directory) as checkpoints:
            checkpoints.save(1, place(mesh, spec, want), data_state={}, config={}, wait=True)
            prints.add(json.dumps(checkpoints.manifest(1)["arrays"]))
        after = layouts[(number + 1) % len(layouts)]
        template = place(*after, make_state(0))
        template = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if eqx.is_array(x) else x, template
        )
        tree = Checkpoints(directory).restore(template).tree
        assert_same(tree, want)
        assert tree.model.weight.sharding == NamedSharding(*after)
        assert tree.key.sharding.device_set == set(after[0].devices.flat)
    assert len(prints) == 1, "fingerprints depend on the mesh"


def test_uncommitted_leaves_stay_uncommitted(saved):
    """A counter made by `jnp.zeros` must still go with weights on a mesh after a restore."""
    tree = Checkpoints(saved).restore(make_state()).tree
    assert not tree.step.committed and not tree.key.committed
    mesh = Mesh(np.array(jax.devices()), ("x",))
    there = jax.device_put(jnp.ones(8, jnp.int32), NamedSharding(mesh, P("x")))
    jax.block_until_ready(jax.jit(lambda a, b: a + jnp.broadcast_to(b, 8))(there, tree.step))


def test_all_differences_are_listed_before_arrays_are_loaded(saved, copied):
    for file in copied.rglob("d/*"):
        file.unlink()  # loading would raise an error
    template = make_state(shape=(64, 5), bias=False)
    template = eqx.tree_at(lambda s: (s.step, s.model.act), template, (jnp.float32(0), jnp.ones(2)))
    with refused(CheckpointError, copied / "20", "8 differences") as caught:
        Checkpoints(copied).restore(template)
    lines = {line.split(":")[0].strip(): line for line in str(caught.value).splitlines()[1:-1]}
    assert_names(lines.pop("model.weight"), "float32[64, 16]", "float32[64, 5]")
    assert_names(lines.pop("model.bias"), "bfloat16[8]")
    assert_names(lines.pop("model.act"), "float32[2]")
    assert_names(lines.pop("step"), "int32[]", "float32[]")
    assert lines.keys() == {f"optimizer.0.{moment}.{name}" for moment in ("mu", "nu") for name in ("weight", "bias")}
    assert Checkpoints(copied).steps == (10, 20), "a mismatch is not damage"


def test_fingerprint_detects_changed_bits_and_swapped_values(getkey):
    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.uint8, np.int16, jnp.bfloat16):
        value = rng.integers(0, 255, 4 * 6 * 8, dtype=np.uint8).view(dtype).reshape(4, -1)
        want = fingerprint(jnp.asarray(value))
        assert np.isscalar(want.item()) and want.dtype == jnp.uint32
        for _ in range(20):
            flipped = value.copy()
            flat = flipped.reshape(-1).view(np.uint8)
            flat[rng.integers(flat.size)] ^= np.uint8(1 << rng.integers(8))
            assert fingerprint(jnp.asarray(flipped)) != want
    assert fingerprint(jnp.arange(4)) != fingerprint(jnp.array([1, 0, 2, 3]))


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "bfloat16", "float32", "complex64", "int64", "float64", "key"]
)
def test_fingerprint_is_the_sum_of_its_formula(dtype):
    """Numbers of more than four bytes count as several words."""
    value = np.random.default_rng(0).normal(0, 99, (3, 4)).astype("uint32" if dtype == "key" else dtype)
    with jax.enable_x64(dtype in ("int64", "float64")):
        array = jax.random.wrap_key_data(jnp.asarray(value), impl="rbg") if dtype == "key" else jnp.asarray(value)
        words = value.view(f"uint{8 * min(value.itemsize, 4)}").reshape(-1).astype(np.uint64)
        want = int(np.sum(words * (2 * np.arange(words.size, dtype=np.uint64) + 1)) % 2**32)
        assert int(fingerprint(array)) == want


def flip(file: Path, place: int, bit: int):
    data = bytearray(file.read_bytes())
    data[place] ^= 1 << bit
    file.write_bytes(data)


def is_set_aside(directory: Path, mode: str) -> bool:
    names = {path.name for path in (directory / ("20.corrupt" if mode == "renamed" else "20")).iterdir()}
    return {"arrays", "manifest"} <= names and (mode == "renamed" or (SET_ASIDE in names and COMMITTED not in names))


def data_file(step: Path) -> Path:
    return max((step / "arrays").rglob("d/*"), key=lambda file: file.stat().st_size)


@pytest.mark.slow
@pytest.mark.parametrize("trials", [6, 200])
def test_flipped_bits_are_detected_or_harmless(saved, tmp_path, mode, trials):
    """`restore` falls back to the step before; `load_weights` of that step raises."""
    pick, template, by_fingerprint, by_digest = random.Random(0), make_state(), 0, 0
    state = arrays(make_state(20))
    for trial in range(trials):
        copy = shutil.copytree(saved, tmp_path / str(trial))
        file = data_file(copy / "20") if trial % 2 else copy / "20/manifest/data.json"
        flip(file, pick.randrange(file.stat().st_size), pick.randrange(8))
        try:
            weights, refusal = load_weights(copy, template.model, 20).tree, ""
            assert_same(weights, make_state(20).model)
        except CheckpointError as error:
            refusal = str(error)
        by_fingerprint += "model.weight" in refusal
        by_digest += "SHA-256" in refusal
        reports = []
        tree, data_state, step = Checkpoints(copy, warn=reports.append).restore(template)
        if step == 10:
            (report,) = reports
            assert_names(report, copy / "20", "step 10")
            assert is_set_aside(copy, mode) and Checkpoints(copy).steps == (10,)
            assert refusal or "optimizer" in report
        else:
            assert not refusal and arrays(tree) == state and data_state == {"next": 20}
    assert min(by_fingerprint, by_digest) >= trials // 4


@pytest.mark.slow(fast=("renamed",))
def test_damaged_arrays_are_named_and_an_explicit_step_has_no_fallback(copied):
    manifest = copied / "20/manifest/data.json"
    body = json.loads(manifest.read_text())
    other = json.loads((copied / "10/manifest/data.json").read_text())
    body["arrays"]["model.weight"]["fingerprint"] = other["arrays"]["model.weight"]["fingerprint"]
    body.pop("sha256")
    manifest.write_text(json.dumps({**body, "sha256": digest(body)}))
    with refused(CheckpointError, copied / "20", "1 of 9 arrays", "model.weight"):
        Checkpoints(copied).restore(make_state(), step=20)
    assert Checkpoints(copied).steps == (10, 20)
    assert_same(Checkpoints(copied).restore(make_state(), verify=False).tree, make_state(20))
    assert Checkpoints(copied, warn=lambda text: None).restore(make_state()).step == 10


@pytest.mark.slow(fast=("renamed",))
def test_a_truncated_newest_step_falls_back_and_training_resumes(copied, mode, capfd):
    os.truncate(data_file(copied / "20"), 40)
    warnings = []
    with Checkpoints(copied, warn=warnings.append) as checkpoints:
        tree, _, step = checkpoints.restore(make_state())
        assert step == 10 and len(warnings) == 1
        assert_same(tree, make_state(10))
        assert is_set_aside(copied, mode)
        assert not checkpoints.save(10, tree, data_state={}, config={}), "that very step is there already"
        assert checkpoints.save(20, make_state(20), data_state={"next": 20}, config={}, wait=True)
        assert_same(checkpoints.restore(make_state()).tree, make_state(20))
    assert (copied / "20.corrupt").is_dir() == (mode == "renamed")
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err + printed.out, "Orbax's own noise must not reach the terminal"


@pytest.mark.slow(fast=("renamed",))
def test_arrays_and_manifest_are_read_again_before_a_step_is_set_aside(copied, monkeypatch):
    """Network and memory errors may be transient."""
    read, flips = reading.ocp.load_checkpointables, ["manifest", "arrays"]

    def unsteady(path, items):
        found = read(path, items)
        if flips and flips[0] in items:
            flips.pop(0)
            changed = {"step": 21} if "manifest" in items else {"model.weight": jnp.zeros((64, 16))}
            found = {next(iter(items)): {**next(iter(found.values())), **changed}}
        return found

    monkeypatch.setattr(reading.ocp, "load_checkpointables", unsteady)
    assert_same(Checkpoints(copied, warn=pytest.fail).restore(make_state()).tree, make_state(20))
    assert not flips and Checkpoints(copied).steps == (10, 20)


@pytest.mark.slow(fast=("renamed",))
def test_a_step_of_another_run_in_the_directory_stops_saving(copied):
    """Hosts may not see each other's locks."""
    with Checkpoints(copied, max_checkpoints=1) as one, Checkpoints(copied) as other:
        assert one.restore(make_state()).step == other.restore(make_state()).step == 20
        one.save(30, make_state(30), data_state={}, config={}, wait=True)
        with refused(CheckpointError, "step 30", copied, "step 20"):
            other.save(40, make_state(40), data_state={}, config={})
    assert Checkpoints(copied).steps == (30,)


def test_without_renames_only_committed_steps_are_deleted(tmp_path):
    """Directories with numbers may be someone else's, and partly copied steps are not skipped."""
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024/photo.jpg").touch()
    with no_renames(), Checkpoints(tmp_path, max_checkpoints=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": jnp.ones(2)}, data_state={}, config={}, wait=True)
        assert checkpoints.steps == (2,) and (tmp_path / "2024/photo.jpg").exists()
        (tmp_path / "2" / COMMITTED).unlink()
        with refused(CheckpointError, tmp_path / "2", COMMITTED):
            _ = checkpoints.latest
        (tmp_path / f"2{TEMPORARY}").touch()  # of the process that writes or deletes the step
        assert checkpoints.steps == ()


@pytest.mark.parametrize("place", ["s3://bucket/run", "gs:/bucket/run", "gs://", "gs://bucket", "gs://bucket/run[1]"])
def test_malformed_locations_are_refused(place):
    with refused(CheckpointError, f"directory='{place}'", "gs://bucket/path"):
        Checkpoints(place)


def test_step_that_was_set_aside_survives_a_killed_save(tmp_path):
    with no_renames():
        with Checkpoints(tmp_path) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, {"x": jnp.ones(2)}, data_state={}, config={})
        (tmp_path / f"2{TEMPORARY}").touch()
        (tmp_path / "2/manifest/data.json").unlink()
        with Checkpoints(tmp_path, warn=lambda text: None) as checkpoints:
            assert checkpoints.restore({"x": jnp.zeros(2)}).step == 1
            checkpoints.save(3, {"x": jnp.ones(2)}, data_state={}, config={})
        assert checkpoints.steps == (1, 3)
        assert (tmp_path / "2" / SET_ASIDE).exists() and (tmp_path / "2/arrays").exists()


def test_bucket_needs_its_package(monkeypatch):
    monkeypatch.setattr("etils.epath.backend.fsspec_backend.fs", mock.Mock(side_effect=ImportError("gcsfs")))
    with refused(MissingPackage, "'gcsfs'", "[gcs]"):
        Checkpoints("gs://bucket/run")


def test_error_if_all_steps_are_damaged_deletes_nothing(copied):
    for step in (10, 20):
        (copied / f"{step}/manifest/data.json").unlink()
    with refused(CheckpointError, copied / "10", copied / "20", "manifest"):
        Checkpoints(copied).restore(make_state())
    assert Checkpoints(copied).steps == (10, 20), "the next start must not begin from scratch"


def test_error_names_a_directory_that_cannot_be_created(tmp_path):
    (tmp_path / "file").touch()
    with refused(CheckpointError, f"directory={tmp_path}/file/run"):
        Checkpoints(tmp_path / "file/run").save(1, make_state(), data_state={}, config={})


@pytest.mark.slow(fast=("renamed",))
def test_only_the_first_process_renames_and_deletes_steps(copied, monkeypatch):
    monkeypatch.setattr("eqx_decoders.io.checkpoint.checkpoints._is_writer", lambda: False)
    (copied / "20/manifest/data.json").unlink()
    leftover = Steps(copied)
    leftover.begin(30)
    leftover.uncommit(30) if leftover.in_place else (copied / f"30{TEMPORARY}").mkdir()
    other = Checkpoints(copied, max_checkpoints=1, warn=lambda text: None)
    assert other.restore(make_state()).step == 10
    other = Checkpoints(copied, max_checkpoints=1)
    assert other.save(40, make_state(40), data_state={}, config={}, wait=True)
    assert other.steps == (10, 20, 40) and (copied / f"30{TEMPORARY}").exists()


@pytest.mark.slow(fast=("renamed",))
def test_load_weights_reads_only_the_model(copied):
    model = load_weights(copied, abstract(make_state()).model).tree
    assert_same(model, make_state(20).model)
    os.truncate(data_file(copied / "20"), 40)
    warnings = []
    assert_same(load_weights(copied, make_state().model, warn=warnings.append).tree, make_state(10).model)
    assert warnings and Checkpoints(copied).steps == (10, 20), "reading changes nothing"
    with refused(CheckpointError, copied / "20", "model.bias", "bfloat16[8]"):
        load_weights(copied, make_state(bias=False).model, 20)


class Killed(BaseException):
    pass


def operations(limit: int, patch: pytest.MonkeyPatch) -> list[str]:
    """Record all changes of files and directories through epath from now on; raise `Killed` after `limit` of them."""
    done = []

    def counted(name, real):
        def operation(path, *args, **options):
            if len(done) == limit:
                raise Killed
            done.append(name)
            return real(path, *args, **options)

        return operation

    kind = type(epath.Path("/"))
    for name in ("rename", "unlink", "write_text", "mkdir", "rmtree"):
        patch.setattr(kind, name, counted(name, getattr(kind, name)))
    patch.setattr(shutil, "rmtree", counted("rmtree", shutil.rmtree))
    return done


@pytest.mark.slow
@pytest.mark.parametrize("remove", ["first", "last"])
def test_a_kill_during_a_deletion_leaves_no_partial_step(mode, tmp_path, monkeypatch, remove):
    """`remove`: whether the marker of complete steps is deleted before or after all other files."""

    def partly(path, *_, **__):
        files = sorted(Path(path).rglob("*.*"), key=lambda file: file.name != COMMITTED, reverse=remove == "last")
        files[0].unlink()
        raise Killed

    for limit in range(9):
        directory, tree = tmp_path / str(limit), {"x": jnp.full(2, 1.0)}
        with Checkpoints(directory, max_checkpoints=3) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, tree, data_state={"at": step}, config={}, wait=True)
        steps = Steps(directory)
        with monkeypatch.context() as patch:
            done = operations(limit, patch)
            patch.setattr(shutil, "rmtree", partly)
            with contextlib.suppress(Killed):
                steps.uncommit(1)
                steps.clean()
        for step in Checkpoints(directory).steps:
            tree, state, _ = Checkpoints(directory, warn=pytest.fail).restore({"x": jnp.zeros(2)}, step)
            assert (tree["x"] == 1).all() and state == {"at": step}
        assert 2 in Checkpoints(directory).steps
        with Checkpoints(directory, max_checkpoints=1) as checkpoints:
            checkpoints.save(3, tree, data_state={}, config={}, wait=True)
        assert [path.name for path in directory.iterdir()] == ["3"]
        if len(done) < limit:
            return
    pytest.fail("there are more operations than were tried")


@pytest.mark.slow(fast=("renamed",))
def test_retains_the_last_steps_and_removes_partial_ones(mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    leftover = tmp_path / "run" / (f"5{TEMPORARY}-123" if mode == "renamed" else "5")
    leftover.mkdir(parents=True)
    (leftover / "junk").write_text("half")
    if mode == "in place":
        (tmp_path / "run" / f"5{TEMPORARY}").touch()
    with Checkpoints("run", max_checkpoints=2) as checkpoints:  # a relative path
        assert checkpoints.latest is None and checkpoints.steps == ()
        with refused(CheckpointError, tmp_path / "run"):
            checkpoints.restore(make_state())
        for step in (1, 2, 3, 4):
            checkpoints.save(step, {"x": jnp.ones(2)}, data_state={}, config={})
        checkpoints.wait()
        assert checkpoints.steps == (3, 4) and checkpoints.latest == 4
        with refused(CheckpointError, "step=3", "step 4"):
            checkpoints.save(3, {"x": jnp.ones(2)}, data_state={}, config={})
        with refused(CheckpointError, "step=2", "[3, 4]"):
            checkpoints.restore({"x": jnp.ones(2)}, step=2)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["3", "4"]


def test_foreign_directories_with_numeric_names_are_not_steps(tmp_path):
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "photo.png").write_text("mine")
    with Checkpoints(tmp_path, max_checkpoints=1) as checkpoints:
        for step in (1, 3000, 3001):
            checkpoints.save(step, {"x": jnp.ones(2)}, data_state={}, config={}, wait=True)
    assert checkpoints.steps == (3001,)
    assert (tmp_path / "2024" / "photo.png").read_text() == "mine"


def test_older_steps_are_deleted_after_the_next_save(tmp_path):
    """They are not deleted after an error, or if a step is saved with `drop=False`."""
    with contextlib.suppress(KeyError), Checkpoints(tmp_path, max_checkpoints=1) as checkpoints:
        for step, kept in ((1, set()), (2, {1}), (3, {2})):
            checkpoints.save(step, {"x": jnp.ones(2)}, data_state={}, config={})
            assert set(checkpoints.steps) - {step} == kept
        checkpoints.wait(drop=False)
        assert checkpoints.steps == (2, 3)
        checkpoints.save(4, {"x": jnp.ones(2)}, data_state={}, config={}, drop=False)
        raise KeyError
    assert checkpoints.steps == (2, 3, 4)
    with Checkpoints(tmp_path, max_checkpoints=1) as again:
        again.restore({"x": jnp.ones(2)})
        again.save(5, {"x": jnp.ones(2)}, data_state={}, config={})
        assert set(again.steps) - {5} == {4}
    assert again.steps == (5,)


@pytest.mark.parametrize(
    ("tree", "extra", "named"),
    [
        ({"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, {}, "path"),
        ({"a": np.ones(1)}, {}, "NumPy"),
        ({"a": 1}, {}, "step=1"),
        ({"a": jnp.ones(1)}, {"data_state": {"at": (1, 2)}}, "data_state"),
        ({"a": jnp.ones(1)}, {"data_state": {"at": float("nan")}}, "data_state"),
        ({"a": jnp.ones(1)}, {"config": {"at": {1, 2}}}, "config"),
    ],
    ids=["equal paths", "NumPy", "no arrays", "tuple", "NaN", "set"],
)
def test_trees_and_settings_that_cannot_be_saved_are_refused(tmp_path, tree, extra, named):
    with refused(CheckpointError, named):
        Checkpoints(tmp_path).save(1, tree, **{"data_state": {}, "config": {}, **extra})


def test_failing_save_is_reported_and_keeps_the_last_step(copied, monkeypatch):
    from orbax.checkpoint import v1 as ocp

    class Full:
        def result(self):
            raise OSError(28, "No space left on device")

    state = make_state(30)
    with Checkpoints(copied) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(ocp, "save_checkpointables_async", lambda *_: Full())
            checkpoints.save(30, state, data_state={}, config={})
            half = copied / f"30{TEMPORARY}-1"
            half.mkdir()
            with refused(CheckpointError, "Step 30", copied, "OSError", "[10, 20]"):
                checkpoints.wait()
        assert not half.exists()
        checkpoints.save(31, state, data_state={}, config={})
    assert Checkpoints(copied).steps == (10, 20, 31)


@pytest.mark.slow(fast=("renamed-input/output",))
@pytest.mark.parametrize(
    "error",
    [OSError(5, "Input/output error"), ValueError("UNKNOWN: Error reading x [OS error 116: ESTALE Stale file handle]")],
    ids=["input/output", "stale handle"],
)
def test_reading_is_retried_before_a_step_counts_as_unreadable(copied, monkeypatch, error):
    """It is not set aside, whether it can be read in the end or not."""
    read, calls = reading.ocp.load_checkpointables, []
    monkeypatch.setattr(reading, "PAUSES", (0.0, 0.0))

    def failing(*args, often):
        calls.append(args)
        if len(calls) <= often:
            raise ValueError("wrapped") from error
        return read(*args)

    for often, step in ((2, 20), (3, None)):
        calls.clear()
        monkeypatch.setattr(reading.ocp, "load_checkpointables", functools.partial(failing, often=often))
        if step is not None:
            assert Checkpoints(copied).restore(make_state()).step == step
        else:
            with refused(CheckpointError, copied / "20", type(error).__name__, "3 times"):
                Checkpoints(copied).restore(make_state())
    assert Checkpoints(copied).steps == (10, 20)


def test_out_of_memory_does_not_count_as_damage(copied, monkeypatch):
    from orbax.checkpoint import v1 as ocp

    real = ocp.load_checkpointables

    def load(path, items):
        if "arrays" in items:
            raise ValueError("wrapped") from MemoryError("out of memory")
        return real(path, items)

    monkeypatch.setattr(ocp, "load_checkpointables", load)
    with refused(CheckpointError, copied / "20", "MemoryError"):
        Checkpoints(copied).restore(make_state())
    assert Checkpoints(copied).steps == (10, 20)


def test_a_newer_format_is_refused_without_fallback(copied):
    manifest = copied / "20/manifest/data.json"
    body = {**json.loads(manifest.read_text()), "format_version": 99}
    body.pop("sha256")
    manifest.write_text(json.dumps({**body, "sha256": digest(body)}))
    with refused(CheckpointError, copied / "20", "format_version=99"):
        Checkpoints(copied).restore(make_state())
    assert Checkpoints(copied).steps == (10, 20)


SAVER = """
import contextlib, sys, jax, jax.numpy as jnp
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from tests.programs import no_renames
writing = no_renames() if sys.argv[2] == "in place" else contextlib.nullcontext()
with writing, Checkpoints(sys.argv[1], max_checkpoints=2) as checkpoints:
    step = (checkpoints.latest or 0)
    if step:
        tree, data_state, step = checkpoints.restore({"x": jnp.zeros(1 << 20), "n": jnp.int32(0)})
        assert data_state == {"next": step} and (tree["x"] == step).all() and tree["n"] == step
    print("restored", step, flush=True)
    while True:
        step += 1
        tree = {"x": jnp.full(1 << 20, step, jnp.float32), "n": jnp.int32(step)}
        checkpoints.save(step, tree, data_state={"next": step}, config={})
        print("saving", step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("trials", [1, 25])
def test_sigkill_while_saving_leaves_a_loadable_step(tmp_path, mode, trials):
    pick, template = random.Random(1), {"x": jnp.zeros(1 << 20), "n": jnp.int32(0)}
    before = 0
    for _ in range(trials):
        command = [sys.executable, "-c", SAVER, str(tmp_path), mode]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout and process.stderr
            assert process.stdout.readline() == f"restored {before}\n", process.stderr.read()
            begun = [process.stdout.readline().split() for _ in range(3)][-1]
            time.sleep(pick.random() * 0.2)
            process.send_signal(signal.SIGKILL)
        tree, data_state, step = Checkpoints(tmp_path).restore(template)
        assert step >= int(begun[1]) - 1, "all but the save under way must be committed"
        assert data_state == {"next": step} and (tree["x"] == step).all() and tree["n"] == step
        assert not [*tmp_path.glob("*.corrupt"), *tmp_path.glob(f"*/{SET_ASIDE}")]
        before = step + 1
        with Checkpoints(tmp_path, max_checkpoints=2) as checkpoints:
            tree = {"x": jnp.full(1 << 20, before, jnp.float32), "n": jnp.int32(before)}
            checkpoints.save(before, tree, data_state={"next": before}, config={})
        assert {path.name for path in tmp_path.iterdir()} == set(map(str, checkpoints.steps)), "leftovers are removed"


def test_error_names_a_dotted_path_of_two_leaves():
    with refused(CheckpointError, "'a.b'"):
        reading.arrays_of({"a.b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}})
