"""Checkpoints of a training run: arrays, a manifest and the data iterator's state, committed together by Orbax.

What is saved is a flat dictionary `{"model.segments.0.unit.0.mlp.gate": array}`. Orbax alone casts dtypes, drops arrays
whose counterpart is None and loads flipped bits, all silently. So a manifest is saved beside the arrays: their shapes
and dtypes are compared before anything is loaded, and their fingerprints after.

In a run of several processes all of them save and restore together. Which steps there are is said by the first one. A
step is restored in a way that none waits in Orbax for another one, where an error would leave it waiting: they tell
each other how it went, and go on to an older step together.

Steps are listed, dropped and cleaned up here, not by `ocp.training.Checkpointer`: that one deletes a step file by file
under its own name, so a kill halfway leaves half a step that it lists as a whole one, and it creates the directory and
removes temporary ones when it is opened, even if only to read a run that is still being written.
"""

import errno
import hashlib
import importlib.metadata
import itertools
import json
import logging
import math
import shutil
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, PyTree, Shaped, UInt32
from orbax.checkpoint import v1 as ocp

from eqx_decoders.axes import named_leaves, path_name
from eqx_decoders.errors import CheckpointError, check, check_integer
from eqx_decoders.io.processes import from_first, gather
from eqx_decoders.io.waiting import Waiting


FORMAT_VERSION = 1
TEMPORARY = ".orbax-checkpoint-tmp"  # part of the name of a step that Orbax has not finished, or that is being deleted
CORRUPT = ".corrupt"

PAUSES = (0.5, 2.0, 5.0)  # seconds before what could not be read is tried again
# What a file system of a network says for a while, and a disk that fails; and what TensorStore does.
TRANSIENT = ("EIO", "EAGAIN", "ESTALE", "ETIMEDOUT", "ENETUNREACH", "EHOSTDOWN", "UNAVAILABLE", "DEADLINE_EXCEEDED")

T = TypeVar("T")
_log = logging.getLogger("eqx_decoders")


class _Damaged(CheckpointError):
    """A step that cannot be read back as it was written: an older step may be sound."""


class _Unread(_Damaged):
    """A step that could not be read this time."""


class Restored(NamedTuple):
    """What `Checkpoints.restore` returns; unpacks as `tree, data_state, step`."""

    tree: PyTree
    data_state: dict[str, Any]
    step: int


class Checkpoints:
    """The numbered steps in a directory: saved asynchronously, the last `max_checkpoints` of them kept.

    Saving requires that this process is the only writer (see `rundir.RunLock`); reading is always safe. Steps that
    cannot be read are reported through `warn`, by default as a warning of the logger `eqx_decoders`.
    """

    def __init__(self, directory: str | Path, *, max_checkpoints: int = 3, warn: Callable[[str], None] = _log.warning):
        check_integer("max_checkpoints", max_checkpoints)
        self.directory = _local(directory)
        self.max_checkpoints = max_checkpoints
        self._warn = warn
        self._pending: tuple[int, Any] | None = None
        self._own: int | None = None  # the step that this object saved or restored last

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.wait()
        except CheckpointError as failed:
            if error is None:
                raise
            self._warn(str(failed))  # the first error is the one to raise

    @property
    def steps(self) -> tuple[int, ...]:
        """The committed steps, oldest first."""
        return _steps(self.directory)

    @property
    def latest(self) -> int | None:
        """The newest committed step."""
        return max(self.steps, default=None)

    def manifest(self, step: int | None = None) -> dict[str, Any]:
        """What is known of a step (the newest one if None) without loading it: config, data_state, arrays."""
        return _read_manifest(self.directory / str(_existing(self.directory, step)))

    def save(
        self, step: int, tree: PyTree, *, data_state: dict[str, Any], config: dict[str, Any] | str, wait: bool = False
    ) -> bool:
        """Save the arrays of `tree`; return False if this object saved or restored this very step last.

        The arrays may be donated or deleted as soon as the call returns: the files are written in the background, and
        `wait`, `close` or the next `save` raise its errors. Leaves that are no arrays are not saved.
        """
        check_integer("step", step, minimum=0)
        self.wait()
        _same_operation()
        steps = from_first("steps", self.steps)
        if step == self._own and step in steps:
            return False
        newest = max(steps, default=None)
        rule = f"must come after step {newest}, the newest in {self.directory}"
        remedy = "resume from that one, move it away, or train in another directory"
        check(newest is None or step > newest, f"step={step} {rule}: {remedy}.", CheckpointError)
        arrays = _arrays(tree)
        check(bool(arrays), f"step={step} holds no arrays: there is nothing to save.", CheckpointError)
        self._remove_temporary()
        manifest = _manifest(step, arrays, data_state, config)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"directory={self.directory} cannot be made: {error}.") from error
        items = {"arrays": {name: leaf for name, leaf in arrays.items() if leaf.size}, "manifest": manifest}
        try:
            with _context():
                self._pending = step, ocp.save_checkpointables_async(str(self.directory / str(step)), items)
        except Exception as error:
            raise self._failed(step, error) from error
        if wait:
            self.wait()
        return True

    def wait(self) -> None:
        """Wait until the save in the background is committed, then delete all but the last `max_checkpoints` steps."""
        if self._pending is None:
            return
        (step, response), self._pending = self._pending, None
        try:
            response.result()
        except Exception as error:
            self._remove_temporary()
            raise self._failed(step, error) from error
        self._own = step
        if _is_writer():
            for old in self.steps[: -self.max_checkpoints]:  # renamed first: a kill while deleting leaves no half step
                (self.directory / str(old)).rename(self.directory / f"{old}{TEMPORARY}")
        self._remove_temporary()

    close = wait

    def restore(self, template: PyTree, step: int | None = None, *, verify: bool = True) -> Restored:
        """Load a step into the structure, dtypes and shardings of `template`.

        template: the tree that was saved, of arrays or `jax.ShapeDtypeStruct`s; other leaves are kept as they are.
        step: without it the newest one; one that is damaged is reported and set aside as `<step>.corrupt`, and the
        one before it is taken.
        verify: compare the fingerprints of what was loaded with those of what was saved.

        Raises CheckpointError with every difference between the trees, or with the names of the damaged leaves.
        """
        tree, manifest, damaged = _load_newest(self.directory, template, step, "", verify, self._warn)
        for bad in damaged if _is_writer() else ():
            _set_aside(self.directory / str(bad))
        gather("set aside")
        self._own = manifest["step"]
        return Restored(tree, manifest["data_state"], manifest["step"])

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"Step {step} could not be saved in {self.directory}: {_summary(error)}. "
            f"Check the space and the permissions there; saved before it: {list(self.steps)}."
        )

    def _remove_temporary(self) -> None:
        for path in self.directory.glob(f"*{TEMPORARY}*") if _is_writer() else ():
            shutil.rmtree(path, ignore_errors=True)


def load_weights(
    directory: str | Path,
    template: PyTree,
    step: int | None = None,
    *,
    prefix: str = "model.",
    verify: bool = True,
    warn: Callable[[str], None] = _log.warning,
) -> PyTree:
    """Load only the leaves below `prefix` into `template` (a model of arrays or `jax.ShapeDtypeStruct`s).

    Changes nothing in the directory, so it may be called while a run writes there.
    """
    with Waiting("loading the checkpoint"):
        return _load_newest(_local(directory), template, step, prefix, verify, warn)[0]


@jax.jit
def fingerprint(array: Shaped[Array, "*shape"]) -> UInt32[Array, ""]:
    """Σ bits(x_i) (2i + 1) mod 2³², i the row-major index of an element: the same on every mesh.

    Any single flipped bit b changes it, by ±2ᵇ times an odd number, never 0 modulo 2³².
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype == jnp.bool_:
        bits = array.astype(jnp.uint32)
    elif array.dtype.itemsize > 4:
        bits = jax.lax.bitcast_convert_type(array, jnp.uint32)  # two words at a new last axis
    else:
        width = jax.dtypes.itemsize_bits(array.dtype)
        bits = jax.lax.bitcast_convert_type(array, f"uint{width}").astype(jnp.uint32)
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis, _ in enumerate(bits.shape):  # no reshape: it would gather a sharded array
        stride = math.prod(bits.shape[axis + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride)
    return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)


def _fingerprints(arrays: dict[str, Any]) -> dict[str, int]:
    # Each is read before the next begins: processes of CPUs hang where two programs wait for each other at a time.
    return {name: int(fingerprint(leaf)) for name, leaf in arrays.items()}


def _manifest(step: int, arrays: dict[str, Any], data_state: dict, config: dict | str) -> dict[str, Any]:
    sums = _fingerprints(arrays)
    body = {
        "format_version": FORMAT_VERSION,
        "library_version": importlib.metadata.version("eqx_decoders"),
        "step": step,
        "config": _json("config", config),
        "data_state": _json("data_state", data_state),
        "arrays": {
            name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "fingerprint": sums[name]}
            for name, leaf in arrays.items()
        },
    }
    same = body["data_state"] == data_state
    check(same, "data_state must be plain JSON: lists and string keys only.", CheckpointError)
    return {**body, "sha256": _digest(body)}


def _json(what: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what} must be plain JSON: {error}.") from error


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        with _context(alone=True):
            manifest = ocp.load_checkpointables(str(path), {"manifest": None})["manifest"]
        digest = manifest.pop("sha256")
        version = manifest["format_version"]
    except Exception as error:
        raise _unreadable(error, f"Checkpoint {path} has no readable manifest") from error
    if digest != _digest(manifest):
        raise _Damaged(f"Checkpoint {path}: the manifest is damaged (its SHA-256 differs).")
    check(
        version <= FORMAT_VERSION,
        f"Checkpoint {path} has format_version={version}, this library reads up to {FORMAT_VERSION}: "
        f"it was written by eqx_decoders {manifest['library_version']}, install that version or a later one.",
        CheckpointError,
    )
    return manifest


def _load_newest(
    directory: Path, template: PyTree, step: int | None, prefix: str, verify: bool, warn: Callable[[str], None]
) -> tuple[PyTree, dict[str, Any], list[int]]:
    """The tree and the manifest of `step`, or of the newest sound one, and the newer steps, which are damaged."""
    newest, damaged = _existing(directory, step), {}
    for candidate in from_first("candidates", (newest,) if step is not None else _steps(directory)[::-1]):
        path = directory / str(candidate)
        try:
            manifest = _together(lambda path=path: _read_manifest(path))
            arrays = _together(lambda path=path, manifest=manifest: _load(path, manifest, template, prefix))
            if verify:
                _verify(path, manifest, arrays)
        except _Damaged as error:
            damaged[candidate] = str(error)
            continue
        for reason in damaged.values():
            warn(f"{reason} Falling back to step {candidate}.")
        return _filled(template, prefix, arrays), manifest, list(damaged)
    # Nothing is set aside here: the next start must not find an empty directory and begin from scratch.
    raise CheckpointError("\n".join([f"No step in {directory} can be loaded.", *damaged.values()]))


def _together(read: Callable[[], T]) -> T:
    """What `read` returns in this process, if no process finds damage; otherwise all of them raise `_Damaged`.

    What cannot be read may be sound, on a disk or in a network that is out of order: it is read again, by all, before
    it counts as damaged. Errors of the system that stay are no damage, and raised as they are.
    """
    pauses = iter(PAUSES)
    while True:
        failed = value = None
        try:
            value = read()
        except _Damaged as error:
            failed = error
        told = gather("read", [None if failed is None else str(failed), isinstance(failed, _Unread)])
        reason = next((reason for reason, _ in told if reason is not None), None)
        if reason is None:
            return cast(T, value)
        if not any(again for _, again in told):
            raise _Damaged(reason)
        if (pause := next(pauses, None)) is None:
            raise CheckpointError(f"{reason} It was tried {len(PAUSES) + 1} times: start again when it can be read.")
        time.sleep(pause)


def _load(path: Path, manifest: dict[str, Any], template: PyTree, prefix: str) -> dict[str, Any]:
    """The arrays of a step whose path begins with `prefix`, sharded as those of the template."""
    want = {prefix + name: leaf for name, leaf in _arrays(template).items()}
    have = {name: entry for name, entry in manifest["arrays"].items() if name.startswith(prefix)}
    model = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in want.items()}
    saved = {name: f"{entry['dtype']}{entry['shape']}" for name, entry in have.items()}
    differences = [
        f"{name}: {saved.get(name, 'not')} in the checkpoint, {model.get(name, 'not')} in the model"
        for name in dict.fromkeys([*model, *saved])
        if model.get(name) != saved.get(name)
    ]
    listed = "\n  ".join([f"Checkpoint {path} does not fit the model, {len(differences)} differences:", *differences])
    remedy = "Use the configuration that was saved with it, or another directory."
    check(not differences, f"{listed}\n{remedy}", CheckpointError)
    anywhere = SingleDeviceSharding(jax.local_devices()[0])
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or anywhere) for name, x in want.items()}
    loaded = {name: jnp.zeros(x.shape, x.dtype, device=x.sharding) for name, x in shapes.items() if not x.size}
    filled = {name: x for name, x in shapes.items() if x.size}  # Orbax saves no array without elements
    try:
        with _context(alone=True):
            loaded |= ocp.load_checkpointables(str(path), {"arrays": filled})["arrays"] if filled else {}
    except Exception as error:
        raise _unreadable(error, f"Checkpoint {path} cannot be read") from error
    return loaded


def _verify(path: Path, manifest: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Raise `_Damaged` for arrays that are not those which were saved; in all processes, as fingerprints are equal."""
    sums, saved = _fingerprints(loaded), manifest["arrays"]
    bad = [name for name in saved if name in sums and sums[name] != saved[name]["fingerprint"]]
    if bad:
        raise _Damaged(f"Checkpoint {path}: {len(bad)} of {len(sums)} arrays are damaged: {', '.join(bad)}.")


def _filled(template: PyTree, prefix: str, loaded: dict[str, Any]) -> PyTree:
    """The template with the arrays that were loaded; those that it has uncommitted are so."""
    for name, leaf in _arrays(template).items():
        if not getattr(leaf, "committed", leaf.sharding is not None):
            loaded[prefix + name] = _uncommitted(loaded[prefix + name])
    return jax.tree_util.tree_map_with_path(lambda at, leaf: loaded.get(prefix + path_name(at), leaf), template)


def _arrays(tree: PyTree) -> dict[str, Any]:
    """The arrays of a tree by path; what else it holds is left out."""
    named = named_leaves(tree)
    clash = len(named) != len(jax.tree.leaves(tree))
    check(not clash, "Two leaves of the tree have the same dotted path: use keys without dots.", CheckpointError)
    for name, leaf in named.items():
        host = isinstance(leaf, np.ndarray | np.generic)
        check(not host, f"{name} is a NumPy array: make it a jax.Array, or it could not be sharded.", CheckpointError)
    return {name: leaf for name, leaf in named.items() if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)}


def _uncommitted(leaf: Array) -> Array:
    """A copy, through the host, that is computed with on whatever devices the other operand is, like a `jnp.zeros`."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jnp.asarray(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jnp.asarray(np.asarray(leaf))


def _local(directory: str | Path) -> Path:
    rule = "must be a local path, where a rename is atomic: mount the bucket"
    check("://" not in str(directory), f"directory={str(directory)!r} {rule}.", CheckpointError)
    return Path(directory).expanduser().resolve()


def _steps(directory: Path) -> tuple[int, ...]:
    """Orbax renames a step to its number as the last act of a save: a directory with that name is complete."""
    return tuple(sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal() and path.is_dir()))


def _existing(directory: Path, step: int | None) -> int:
    """`step`, which must be there, or the newest one for None."""
    steps = _steps(directory)
    check(bool(steps), f"There is no checkpoint in {directory}.", CheckpointError)
    step = steps[-1] if step is None else step
    check(step in steps, f"step={step} is not in {directory}: it holds {list(steps)}.", CheckpointError)
    return step


def _set_aside(path: Path) -> None:
    names = itertools.chain([CORRUPT], (f"{CORRUPT}-{number}" for number in itertools.count(2)))
    targets = (path.with_name(path.name + name) for name in names)
    path.rename(next(target for target in targets if not target.exists()))


def _is_writer() -> bool:
    return jax.process_index() == 0


def _causes(error: BaseException) -> list[BaseException]:
    """The error and what it was raised from, innermost last: Orbax wraps whatever happens as a missing handler."""
    return [error, *(_causes(error.__cause__) if error.__cause__ is not None else ())]


def _unreadable(error: Exception, sentence: str) -> CheckpointError:
    """Damage, unless this process lacks memory or permissions: then it could not read any other step either."""
    causes = _causes(error)
    for cause in causes:
        if isinstance(cause, KeyboardInterrupt):
            raise cause
    ours = any(isinstance(cause, MemoryError | PermissionError | jax.errors.JaxRuntimeError) for cause in causes)
    texts = [f"{errno.errorcode.get(getattr(cause, 'errno', None) or 0)} {cause}" for cause in causes]
    system = any(word in text for word in TRANSIENT for text in texts)
    kind = CheckpointError if ours else _Unread if system else _Damaged
    return kind(f"{sentence}: {_summary(error)}.")


def _summary(error: Exception) -> str:
    """The first line of the innermost cause; there may be pages."""
    cause = _causes(error)[-1]
    line = next(iter(str(cause).strip().splitlines()), "")
    return f"{type(cause).__name__}: {line[:300].rstrip('.')}"


def _is_not_orbax(record: logging.LogRecord) -> bool:
    """False for Orbax's logs: pages of tracebacks of the errors that it also raises, which are reported here."""
    frames = traceback.extract_tb(record.exc_info[2] if record.exc_info else None)
    return not any("orbax" in name for name in (record.pathname, *(frame.filename for frame in frames)))


def _same_operation() -> None:
    """Orbax counts its operations in each process, and saves only where all have counted the same."""
    if jax.process_count() == 1:
        return
    from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

    last = max(map(int, gather("operation", OperationIdGenerator.get_current_operation_id())))
    while int(OperationIdGenerator.get_current_operation_id()) < last:
        OperationIdGenerator.next_operation_id()


def _context(*, alone: bool = False) -> ocp.Context:
    """How Orbax works here; `alone`: without waiting for the other processes."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_not_orbax)  # adding it twice does nothing
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="manifest")
    context = ocp.Context()
    context.checkpointables.registry = registry
    if alone:
        context.multiprocessing.primary_host = None
        context.multiprocessing.active_processes = {jax.process_index()}
        context.multiprocessing.barrier_sync_key_prefix = str(jax.process_index())
    context.pytree.loading.partial_load = True  # for `load_weights`; the trees were compared before
    return context
