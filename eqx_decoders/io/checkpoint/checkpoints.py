"""Checkpoints of a training run: arrays, a manifest and the data iterator's state, committed together by Orbax.

Arrays are saved as a flat dictionary `{"model.scanned_layers.0.unit.0.mlp.gate": array}`. Orbax alone casts dtypes,
drops arrays whose counterpart is None and loads flipped bits, all silently. So a manifest is saved with the arrays:
their shapes and dtypes are compared before anything is loaded, and their fingerprints after.

In a run of several processes all of them save and restore together. The first one lists the steps.

Steps are listed, dropped and cleaned up by `Steps`, not by `ocp.training.Checkpointer`: that one deletes a step file by
file under its own name, so a kill halfway leaves half a step that it lists as complete, and it creates the directory
and removes temporary ones when it is opened, even if only to read a run that is still being written.
"""

import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree
from orbax.checkpoint import v1 as ocp

from eqx_decoders.errors import CheckpointError, check, check_integer
from eqx_decoders.io.checkpoint.manifest import make_manifest
from eqx_decoders.io.checkpoint.orbax import orbax_context, summary
from eqx_decoders.io.checkpoint.reading import arrays_of, load_newest, read_manifest
from eqx_decoders.io.checkpoint.steps import Steps
from eqx_decoders.io.processes import all_gather_json, from_first
from eqx_decoders.io.status import StatusLine


_log = logging.getLogger("eqx_decoders")


class Restored(NamedTuple):
    """Restored step: unpacks as `tree, data_state, step`."""

    tree: PyTree
    data_state: dict[str, Any]
    step: int


class Checkpoints:
    """Checkpoints of a run in a directory, saved asynchronously, of which the last `max_checkpoints` steps remain.

    The directory is a path or `gs://bucket/path` (extra `gcs`).

    Saving requires that this process is the only writer (see `RunLock`); reading is always safe. Steps that
    cannot be read are reported through `warn`, by default as a warning of the logger `eqx_decoders`.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, max_checkpoints: int = 3, warn: Callable[[str], None] = _log.warning
    ):
        check_integer("max_checkpoints", max_checkpoints)
        self._steps = Steps(directory)
        self.directory = self._steps.directory
        self.max_checkpoints = max_checkpoints
        self._warn = warn
        self._pending: tuple[int, Any] | None = None
        self._last: int | None = None  # the step that this object saved or restored last

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.wait(drop=error is None)
        except CheckpointError as failed:
            if error is None:
                raise
            self._warn(str(failed))  # the first error is the one to raise

    @property
    def steps(self) -> tuple[int, ...]:
        """Committed steps, oldest first."""
        return self._steps.committed()

    @property
    def latest(self) -> int | None:
        """Newest committed step; None without any."""
        return max(self.steps, default=None)

    def manifest(self, step: int | None = None) -> dict[str, Any]:
        """Read the manifest of a step (the newest one if None): config, data_state, and the shapes of its arrays."""
        return read_manifest(self._steps, self._steps.existing(step))

    def save(
        self,
        step: int,
        tree: PyTree,
        *,
        data_state: dict[str, Any],
        config: dict[str, Any] | str,
        wait: bool = False,
        drop: bool = True,
    ) -> bool:
        """Save the arrays of `tree`; return False if this object has just saved or restored this very step.

        The arrays may be donated or deleted as soon as the call returns: the files are written in the background, and
        `wait`, `close` or the next `save` raise its errors. Leaves that are no arrays are not saved.

        drop: delete all but the last `max_checkpoints` steps before this one. The step itself counts among them when
        the next one is saved, or with `wait`: it may be of no use.
        """
        check_integer("step", step, minimum=0)
        self.wait(drop=False)
        _same_operation()
        steps = from_first("steps", self.steps if jax.process_index() == 0 else None)
        if step == self._last and step in steps:
            return False
        newest = max(steps, default=-1)
        rule = f"must come after step {newest}, the newest in {self.directory}"
        remedy = "resume from that one, move it away, or train in another directory"
        check(step > newest, f"step={step} {rule}: {remedy}.", CheckpointError)
        is_own = self._last is None or newest <= self._last
        rule = f"step {newest} in {self.directory} is another run's: this one saved or restored step {self._last} last"
        check(is_own, f"{rule}. Stop one of them, or give it a directory of its own.", CheckpointError)
        arrays = arrays_of(tree)
        check(bool(arrays), f"step={step} holds no arrays: there is nothing to save.", CheckpointError)
        manifest = make_manifest(step, arrays, data_state, config)
        self._clean(most=self.max_checkpoints if drop else None)
        try:
            if _is_writer():
                self._steps.begin(step)
        except Exception as error:
            remedy = "Check the name, the space and the permissions."
            cause = summary(error)
            raise CheckpointError(f"directory={self.directory} cannot be made or written: {cause}. {remedy}") from error
        items = {"arrays": {name: leaf for name, leaf in arrays.items() if leaf.size}, "manifest": manifest}
        try:
            with orbax_context(in_place=self._steps.in_place):
                self._pending = step, ocp.save_checkpointables_async(str(self._steps.path(step)), items)
        except Exception as error:
            raise self._failed(step, error) from error
        if wait:
            self.wait(drop=drop)
        return True

    def wait(self, *, drop: bool = True) -> None:
        """Wait until the save in the background is committed, then delete all but the last `max_checkpoints` steps.

        drop: False deletes none of them, for a step that may be of no use.
        """
        if self._pending is None:
            return
        (step, response), self._pending = self._pending, None
        try:
            response.result()
        except Exception as error:
            self._clean()
            raise self._failed(step, error) from error
        self._last = step
        self._clean(most=self.max_checkpoints if drop else None)

    close = wait

    def restore(self, template: PyTree, step: int | None = None, *, verify: bool = True) -> Restored:
        """Load a step into the structure, dtypes and shardings of `template`.

        template: the tree that was saved, of arrays or `jax.ShapeDtypeStruct`s; other leaves stay as they are.
        step: None for the newest one; a damaged step is reported and set aside as `<step>.corrupt` (in a bucket under
        its own name, without the file that marks it complete), and the one before it is loaded.
        verify: compare the fingerprints of the loaded and the saved arrays.

        Raises CheckpointError that lists every difference between the trees, or the damaged leaves.
        """
        return self.restore_for(lambda _: template, step, verify=verify)

    def restore_for(
        self, template_for: Callable[[dict[str, Any]], PyTree], step: int | None = None, *, verify: bool = True
    ) -> Restored:
        """Restore a step into the template that `template_for` makes for its manifest: trees of steps may differ."""
        tree, manifest, damaged = load_newest(self._steps, template_for, step, "", verify, self._warn)
        for bad in damaged if _is_writer() else ():
            self._steps.set_aside(bad)
        all_gather_json("set aside")
        self._last = manifest["step"]
        return Restored(tree, manifest["data_state"], manifest["step"])

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        try:
            saved = str(list(self.steps))
        except CheckpointError:
            saved = "unknown"
        return CheckpointError(
            f"Step {step} could not be saved in {self.directory}: {summary(error)}. "
            f"Check the space and the permissions there; saved before it: {saved}."
        )

    def _clean(self, *, most: int | None = None) -> None:
        """Delete all but the last `most` steps, and incomplete ones; a failure is only a warning."""
        if not _is_writer():
            return
        try:
            for step in self.steps[:-most] if most is not None else ():
                self._steps.uncommit(step)
            self._steps.clean()
        except Exception as error:
            self._warn(f"Old steps in {self.directory} could not be deleted: {summary(error)}.")


def load_weights(
    directory: str | os.PathLike[str],
    template: PyTree,
    step: int | None = None,
    *,
    prefix: str = "model.",
    verify: bool = True,
    warn: Callable[[str], None] = _log.warning,
) -> Restored:
    """Load only the leaves below `prefix` into `template` (a model of arrays or `jax.ShapeDtypeStruct`s).

    Changes nothing in the directory, so it may be called while a run writes there. Without `step` it loads the newest
    undamaged one.
    """
    with StatusLine("loading the checkpoint"):
        tree, manifest, _ = load_newest(Steps(directory), lambda _: template, step, prefix, verify, warn)
        return Restored(tree, manifest["data_state"], manifest["step"])


def _is_writer() -> bool:
    return jax.process_index() == 0


def _same_operation() -> None:
    """Advance Orbax's count of operations to the highest of all processes: it saves only if all counts are equal."""
    if jax.process_count() == 1:
        return
    from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

    last = max(map(int, all_gather_json("operation", OperationIdGenerator.get_current_operation_id())))
    while int(OperationIdGenerator.get_current_operation_id()) < last:
        OperationIdGenerator.next_operation_id()
