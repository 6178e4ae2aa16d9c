"""Reading of steps by all processes of a run together, none of which waits in Orbax for another one.

An error in one process would leave the others waiting there. So each reads alone, all exchange their results, and they
fall back to an older step together.
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

from eqx_decoders.errors import CheckpointError, check
from eqx_decoders.io.checkpoint.manifest import FORMAT_VERSION, digest, fingerprints
from eqx_decoders.io.checkpoint.orbax import causes, orbax_context, summary
from eqx_decoders.io.checkpoint.steps import Steps
from eqx_decoders.io.processes import all_gather_json, from_first
from eqx_decoders.sharding.axes import named_leaves, path_name


PAUSES = (0.5, 2.0, 5.0)  # seconds before a failed read is retried
# Temporary errors of failing disks, network file systems, TensorStore and servers of buckets.
TRANSIENT = ("EIO", "EAGAIN", "ESTALE", "ETIMEDOUT", "ENETUNREACH", "EHOSTDOWN", "ECONNRESET", "ECONNREFUSED")
TRANSIENT += ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
NETWORK = {"TimeoutError", "ConnectionError", "ClientError", "HttpError", "RequestException"}  # and their subclasses
REFUSED = ("PERMISSION_DENIED", "UNAUTHENTICATED", "Forbidden")

T = TypeVar("T")


class Damaged(CheckpointError):
    """Error of a step that cannot be read back as it was written: an older step may be undamaged."""


class Unread(Damaged):
    """Error of a step that could not be read this time."""


def load_newest(
    steps: Steps,
    template_for: Callable[[dict[str, Any]], PyTree],
    step: int | None,
    prefix: str,
    verify: bool,
    warn: Callable[[str], None],
) -> tuple[PyTree, dict[str, Any], list[int]]:
    """Load `step`, or the newest undamaged one; return its tree, its manifest, and the newer steps, which are damaged.

    template_for: makes the template for a step's manifest. prefix: of the paths of the arrays to load.
    """
    candidates, damaged = None, {}
    if jax.process_index() == 0:
        newest = steps.existing(step)
        candidates = (newest,) if step is not None else steps.committed()[::-1]
    for candidate in from_first("candidates", candidates):
        try:
            manifest = read_on_all(lambda candidate=candidate: read_manifest(steps, candidate))
            template = template_for(manifest)
            arrays = _verified(steps, manifest, template, prefix, verify)
        except Damaged as error:
            damaged[candidate] = str(error)
            continue
        for reason in damaged.values():
            warn(f"{reason} Falling back to step {candidate}.")
        return _filled(template, prefix, arrays), manifest, list(damaged)
    # No step is set aside here: the next start must not find an empty directory and begin from scratch.
    raise CheckpointError("\n".join([f"No step in {steps.directory} can be loaded.", *damaged.values()]))


def read_on_all(read: Callable[[], T]) -> T:
    """Return `read()` of this process if no process finds damage; otherwise raise `Damaged` in all of them.

    A failed read may be the fault of a disk or network: all processes retry it after pauses before it counts as
    damaged, and damage is confirmed by a second read. Errors of the system that persist are no damage, and raised as
    CheckpointError.
    """
    pauses, second = iter(PAUSES), iter((0.0,))
    while True:
        failed = value = None
        try:
            value = read()
        except Damaged as error:
            failed = error
        results = all_gather_json("read", [None if failed is None else str(failed), isinstance(failed, Unread)])
        reason = next((reason for reason, _ in results if reason is not None), None)
        if reason is None:
            return cast(T, value)
        unread = any(is_unread for _, is_unread in results)
        if (pause := next(pauses if unread else second, None)) is None:
            remedy = f"It was tried {len(PAUSES) + 1} times: start again when it can be read."
            raise CheckpointError(f"{reason} {remedy}") if unread else Damaged(reason)
        time.sleep(pause)


def _verified(steps: Steps, manifest: dict[str, Any], template: PyTree, prefix: str, verify: bool) -> dict[str, Any]:
    """Load the arrays of a step and compare their fingerprints; if any differ, all are read a second time.

    All processes read again, or none: one alone may have misread an array of which each has a copy.
    """
    bad, sums, saved = [], {}, manifest["arrays"]
    for _ in range(2):
        loaded = read_on_all(lambda: _load(steps, manifest, template, prefix))
        sums = fingerprints(loaded) if verify else {}
        differing = [name for name in sums if sums[name] != saved[name]["fingerprint"]]
        bad = list(dict.fromkeys(itertools.chain.from_iterable(all_gather_json("verified", differing))))
        if not bad:
            return loaded
        del loaded  # there may be no room for two
    path = steps.path(manifest["step"])
    raise Damaged(f"Checkpoint {path}: {len(bad)} of {len(sums)} arrays are damaged: {', '.join(bad)}.")


def read_manifest(steps: Steps, step: int) -> dict[str, Any]:
    """Read the manifest of a step. Raises CheckpointError."""
    path = steps.path(step)
    try:
        with orbax_context(in_place=steps.in_place, alone=True):
            manifest = ocp.load_checkpointables(str(path), {"manifest": None})["manifest"]
        expected = manifest.pop("sha256")
        version = manifest["format_version"]
    except Exception as error:
        raise _unreadable(error, f"Checkpoint {path} has no readable manifest") from error
    if expected != digest(manifest):
        raise Damaged(f"Checkpoint {path}: the manifest is damaged (its SHA-256 differs).")
    check(
        version <= FORMAT_VERSION,
        f"Checkpoint {path} has format_version={version}, this library reads up to {FORMAT_VERSION}: "
        f"it was written by eqx_decoders {manifest['library_version']}, install that version or a later one.",
        CheckpointError,
    )
    return manifest


def _load(steps: Steps, manifest: dict[str, Any], template: PyTree, prefix: str) -> dict[str, Any]:
    """Load the arrays of a step whose path begins with `prefix`, with the template's shardings."""
    path = steps.path(manifest["step"])
    want = {prefix + name: leaf for name, leaf in arrays_of(template).items()}
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
        with orbax_context(in_place=steps.in_place, alone=True):
            read = ocp.load_checkpointables(str(path), {"arrays": filled})["arrays"] if filled else {}
            loaded |= {name: read[name] for name in filled}
    except Exception as error:
        raise _unreadable(error, f"Checkpoint {path} cannot be read") from error
    return loaded


def _filled(template: PyTree, prefix: str, loaded: dict[str, Any]) -> PyTree:
    """Return the template with the loaded arrays, uncommitted where the template's are."""
    for name, leaf in arrays_of(template).items():
        if not getattr(leaf, "committed", leaf.sharding is not None):
            loaded[prefix + name] = _uncommitted(loaded[prefix + name])
    return jax.tree_util.tree_map_with_path(lambda at, leaf: loaded.get(prefix + path_name(at), leaf), template)


def arrays_of(tree: PyTree) -> dict[str, Any]:
    """Return the arrays of a tree by path, without its other leaves. Raises CheckpointError for NumPy arrays."""
    named = named_leaves(tree)
    if len(named) != len(jax.tree.leaves(tree)):
        names = collections.Counter(path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))
        ((duplicate, count),) = names.most_common(1)
        raise CheckpointError(
            f"{count} leaves of the tree have the same dotted path {duplicate!r}. Use keys without dots."
        )
    for name, leaf in named.items():
        host = isinstance(leaf, np.ndarray | np.generic)
        check(not host, f"{name} is a NumPy array: make it a jax.Array, or it could not be sharded.", CheckpointError)
    return {name: leaf for name, leaf in named.items() if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)}


def _uncommitted(leaf: Array) -> Array:
    """Copy an array through the host, so that it is uncommitted, like `jnp.zeros`, and follows other operands."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jnp.asarray(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jnp.asarray(np.asarray(leaf))


def _unreadable(error: Exception, sentence: str) -> CheckpointError:
    """Return the error for a failed read: damage, unless this process lacks memory or permissions for any step."""
    chain = causes(error)
    for cause in chain:
        if isinstance(cause, KeyboardInterrupt):
            raise cause
    texts = [f"{errno.errorcode.get(getattr(cause, 'errno', None) or 0)} {cause}" for cause in chain]
    ours = any(isinstance(cause, MemoryError | PermissionError | jax.errors.JaxRuntimeError) for cause in chain)
    ours = ours or any(word in text for word in REFUSED for text in texts)
    system = any(word in text for word in TRANSIENT for text in texts)
    system = system or any(base.__name__ in NETWORK for cause in chain for base in type(cause).__mro__)
    kind = CheckpointError if ours else Unread if system else Damaged
    return kind(f"{sentence}: {summary(error)}.")
