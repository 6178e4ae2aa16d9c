"""Reading of steps by all processes of a run.

No process waits in Orbax for another process, because an error in one process would make the others wait forever.
Instead, each process reads without the others. Then the processes exchange their results, and agree on the step.
"""

import collections
import errno
import itertools
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, PyTree
from orbax.checkpoint import v1 as ocp

from eqx_decoders.errors import CheckpointError
from eqx_decoders.io.checkpoint.manifest import FORMAT_VERSION, digest, fingerprints
from eqx_decoders.io.checkpoint.orbax import causes, orbax_context, summary
from eqx_decoders.io.checkpoint.steps import Steps
from eqx_decoders.io.processes import all_gather_json, broadcast_json
from eqx_decoders.sharding.axes import named_leaves, path_name


PAUSES = (0.5, 2.0, 5.0)  # seconds before a failed read is retried
# Temporary errors of failing disks, network file systems, TensorStore and buckets: parts of messages, and classes.
TRANSIENT = ("EIO", "EAGAIN", "ESTALE", "ETIMEDOUT", "ENETUNREACH", "EHOSTDOWN", "ECONNRESET", "ECONNREFUSED")
TRANSIENT += ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
TRANSIENT_CLASSES = {"TimeoutError", "ConnectionError", "ClientError", "HttpError", "RequestException"}
PERMISSION = ("PERMISSION_DENIED", "UNAUTHENTICATED", "Forbidden")

T = TypeVar("T")


class DamagedStepError(CheckpointError):
    """A step cannot be read as it was written. An older step may be undamaged."""


class TransientReadError(DamagedStepError):
    """A step could not be read because of an error that may be temporary."""


def load_newest(
    steps: Steps,
    template_for: Callable[[dict[str, Any]], PyTree],
    step: int | None,
    prefix: str,
    verify: bool,
    warn: Callable[[str], None],
) -> tuple[PyTree, dict[str, Any], list[int]]:
    """Return the tree and the manifest of a step, and the newer steps, which are damaged.

    **Arguments:**

    - `template_for`: function from the manifest of a step to the template of the tree.
    - `step`: number of the step; None: the newest undamaged step.
    - `prefix`: prefix of the paths of the arrays to load, which is not part of the paths in the template.
    - `verify`: whether to compare fingerprints.
    - `warn`: function that reports damaged steps.
    """
    candidates = None
    damaged: dict[int, str] = {}
    if jax.process_index() == 0:
        newest = steps.existing(step)
        candidates = (newest,) if step is not None else steps.committed()[::-1]
    for candidate in broadcast_json("candidates", candidates):
        try:
            manifest = read_on_all(lambda candidate=candidate: read_manifest(steps, candidate))
            template = template_for(manifest)
            arrays = _load_verified(steps, manifest, template, prefix, verify)
        except DamagedStepError as error:
            damaged[candidate] = str(error)
            continue
        for reason in damaged.values():
            warn(f"{reason} Falling back to step {candidate}.")
        return _with_arrays(template, prefix, arrays), manifest, list(damaged)
    # The damaged steps are not renamed, because the next run would find no steps, and start from the beginning.
    raise CheckpointError("\n".join([f"No step in {steps.directory} can be loaded.", *damaged.values()]))


def read_on_all(read: Callable[[], T]) -> T:
    """Return the result of `read()` if it succeeds in all processes. Otherwise raise an error in all processes.

    If any process raises TransientReadError, all processes read again after pauses, and finally raise CheckpointError.
    If a process raises another DamagedStepError, all processes read again once, and then raise DamagedStepError.
    """
    transient_pauses = iter(PAUSES)
    damage_pauses = iter((0.0,))
    while True:
        failed = value = None
        try:
            value = read()
        except DamagedStepError as error:
            failed = error
        result = [None if failed is None else str(failed), isinstance(failed, TransientReadError)]
        results = all_gather_json("read", result)
        reason = next((reason for reason, _ in results if reason is not None), None)
        if reason is None:
            return cast(T, value)
        is_transient = any(transient for _, transient in results)
        pause = next(transient_pauses if is_transient else damage_pauses, None)
        if pause is None and is_transient:
            raise CheckpointError(f"{reason} It was tried {len(PAUSES) + 1} times. Start again when it can be read.")
        if pause is None:
            raise DamagedStepError(reason)
        time.sleep(pause)


def _load_verified(
    steps: Steps, manifest: dict[str, Any], template: PyTree, prefix: str, verify: bool
) -> dict[str, Any]:
    """Return the arrays of a step. If fingerprints differ, the arrays are read a second time.

    If one process finds a difference, all processes read again, because processes have copies of the same arrays.
    """
    damaged: list[str] = []
    found: dict[str, int] = {}
    for _ in range(2):
        loaded = read_on_all(lambda: _load(steps, manifest, template, prefix))
        found = fingerprints(loaded) if verify else {}
        differing = [name for name in found if found[name] != manifest["arrays"][name]["fingerprint"]]
        damaged = list(dict.fromkeys(itertools.chain.from_iterable(all_gather_json("verified", differing))))
        if not damaged:
            return loaded
        del loaded  # the memory may not suffice for two copies
    path = steps.path(manifest["step"])
    raise DamagedStepError(
        f"Checkpoint {path}: {len(damaged)} of {len(found)} arrays are damaged: {', '.join(damaged)}."
    )


def read_manifest(steps: Steps, step: int) -> dict[str, Any]:
    """Return the manifest of a step. Raises CheckpointError if it cannot be read, or was written by a newer version."""
    path = steps.path(step)
    try:
        with orbax_context(in_place=steps.in_place, alone=True):
            manifest = ocp.load_checkpointables(str(path), {"manifest": None})["manifest"]
        expected = manifest.pop("sha256")
        version = manifest["format_version"]
    except Exception as error:
        raise _unreadable(error, f"Checkpoint {path} has no readable manifest") from error
    if expected != digest(manifest):
        raise DamagedStepError(f"Checkpoint {path}: the manifest is damaged, because its SHA-256 differs.")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"Checkpoint {path} has format_version={version}, but this version of eqx_decoders reads only up to "
            f"{FORMAT_VERSION}. Install eqx_decoders {manifest['library_version']} or later."
        )
    return manifest


def _load(steps: Steps, manifest: dict[str, Any], template: PyTree, prefix: str) -> dict[str, Any]:
    """Return the arrays of a step whose paths start with `prefix`, with the shardings of the template."""
    path = steps.path(manifest["step"])
    expected = {prefix + name: leaf for name, leaf in arrays_of(template).items()}
    model = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in expected.items()}
    saved = {
        name: f"{entry['dtype']}{entry['shape']}"
        for name, entry in manifest["arrays"].items()
        if name.startswith(prefix)
    }
    differences = [
        f"{name}: {saved.get(name, 'not')} in the checkpoint, {model.get(name, 'not')} in the model"
        for name in dict.fromkeys([*model, *saved])
        if model.get(name) != saved.get(name)
    ]
    if differences:
        listed = "\n  ".join(differences)
        raise CheckpointError(
            f"Checkpoint {path} does not fit the model. There are {len(differences)} differences:\n  {listed}\nUse the "
            "configuration that was saved with the checkpoint, or another directory."
        )
    default = SingleDeviceSharding(jax.local_devices()[0])
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or default) for name, x in expected.items()
    }
    # Orbax does not save arrays without elements.
    loaded = {name: jnp.zeros(x.shape, x.dtype, device=x.sharding) for name, x in shapes.items() if not x.size}
    stored = {name: x for name, x in shapes.items() if x.size}
    try:
        with orbax_context(in_place=steps.in_place, alone=True):
            read = ocp.load_checkpointables(str(path), {"arrays": stored})["arrays"] if stored else {}
            loaded |= {name: read[name] for name in stored}
    except Exception as error:
        raise _unreadable(error, f"Checkpoint {path} cannot be read") from error
    return loaded


def _with_arrays(template: PyTree, prefix: str, loaded: dict[str, Any]) -> PyTree:
    """Return the template with the loaded arrays. They are uncommitted if the arrays of the template are."""
    for name, leaf in arrays_of(template).items():
        if not getattr(leaf, "committed", leaf.sharding is not None):
            loaded[prefix + name] = _uncommitted(loaded[prefix + name])
    return jax.tree_util.tree_map_with_path(lambda at, leaf: loaded.get(prefix + path_name(at), leaf), template)


def arrays_of(tree: PyTree) -> dict[str, Any]:
    """Return the arrays of a tree by path. Raises CheckpointError for NumPy arrays, and for equal paths."""
    named = named_leaves(tree)
    if len(named) != len(jax.tree.leaves(tree)):
        names = collections.Counter(path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))
        ((duplicate, count),) = names.most_common(1)
        raise CheckpointError(
            f"{count} leaves of the tree have the same dotted path {duplicate!r}. Use keys without dots."
        )
    for name, leaf in named.items():
        if isinstance(leaf, np.ndarray | np.generic):
            raise CheckpointError(
                f"{name} is a NumPy array, which cannot be sharded. Convert it to a jax.Array, for example with "
                "jnp.asarray."
            )
    return {name: leaf for name, leaf in named.items() if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)}


def _uncommitted(leaf: Array) -> Array:
    """Copy an array through the host, so that it is uncommitted: operations move it to the device of other operands."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jnp.asarray(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jnp.asarray(np.asarray(leaf))


def _unreadable(error: Exception, sentence: str) -> CheckpointError:
    """Return the error for a failed read.

    CheckpointError: this process lacks memory or permissions, so no other step can be read, either. TransientReadError:
    the error may be temporary. DamagedStepError: other errors.
    """
    chain = causes(error)
    for cause in chain:
        if isinstance(cause, KeyboardInterrupt):
            raise cause
    texts = [f"{errno.errorcode.get(getattr(cause, 'errno', None) or 0)} {cause}" for cause in chain]
    message = f"{sentence}: {summary(error)}."
    has_no_memory_or_permission = any(
        isinstance(cause, MemoryError | PermissionError | jax.errors.JaxRuntimeError) for cause in chain
    )
    if has_no_memory_or_permission or any(word in text for word in PERMISSION for text in texts):
        return CheckpointError(message)
    class_names = {base.__name__ for cause in chain for base in type(cause).__mro__}
    if class_names & TRANSIENT_CLASSES or any(word in text for word in TRANSIENT for text in texts):
        return TransientReadError(message)
    return DamagedStepError(message)
