"""Checkpoints of a training run: arrays, a manifest and the data iterator's state, committed together by Orbax.

What is saved is a flat dictionary `{"model.segments.0.unit.0.mlp.gate": array}`. Orbax alone casts dtypes, drops arrays
whose counterpart is None and loads flipped bits, all silently. So a manifest is saved beside the arrays: their shapes
and dtypes are compared before anything is loaded, and their fingerprints after.

In a run of several processes all of them save and restore together. Which steps there are is said by the first one.

Steps are listed, dropped and cleaned up by `checkpoint_steps`, not by `ocp.training.Checkpointer`: that one deletes a
step file by file under its own name, so a kill halfway leaves half a step that it lists as a whole one, and it creates
the directory and removes temporary ones when it is opened, even if only to read a run that is still being written.
"""

import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree
from orbax.checkpoint import v1 as ocp

from eqx_decoders.errors import CheckpointError, check, check_integer
from eqx_decoders.io.checkpoint.manifest import fingerprint as fingerprint, make_manifest
from eqx_decoders.io.checkpoint.orbax import orbax_context, summary
from eqx_decoders.io.checkpoint.reading import arrays_of, load_newest, read_manifest
from eqx_decoders.io.checkpoint.steps import Steps
from eqx_decoders.io.coordination import from_first, gather
from eqx_decoders.io.status import StatusLine


_log = logging.getLogger("eqx_decoders")


class Restored(NamedTuple):
    """What `Checkpoints.restore` returns; unpacks as `tree, data_state, step`."""

    tree: PyTree
    data_state: dict[str, Any]
    step: int


class Checkpoints:
    """The numbered steps in a directory: saved asynchronously, the last `max_checkpoints` of them kept.

    The directory is a path or `gs://bucket/path` (extra `gcs`).

    Saving requires that this process is the only writer (see `rundir.RunLock`); reading is always safe. Steps that
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
        self._own: int | None = None  # the step that this object saved or restored last

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
        """The committed steps, oldest first."""
        return self._steps.committed()

    @property
    def latest(self) -> int | None:
        """The newest committed step."""
        return max(self.steps, default=None)

    def manifest(self, step: int | None = None) -> dict[str, Any]:
        """What is known of a step (the newest one if None) without loading it: config, data_state, arrays."""
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
        """Save the arrays of `tree`; return False if this object saved or restored this very step last.

        The arrays may be donated or deleted as soon as the call returns: the files are written in the background, and
        `wait`, `close` or the next `save` raise its errors. Leaves that are no arrays are not saved.

        drop: delete all but the last `max_checkpoints` of the steps before it, as there is a newer one that came out of
        them. The step itself counts when the next one is saved, or with `wait`: it may be of no use.
        """
        check_integer("step", step, minimum=0)
        self.wait(drop=False)
        _same_operation()
        steps = from_first("steps", self.steps if jax.process_index() == 0 else None)
        if step == self._own and step in steps:
            return False
        newest = max(steps, default=-1)
        rule = f"must come after step {newest}, the newest in {self.directory}"
        remedy = "resume from that one, move it away, or train in another directory"
        check(step > newest, f"step={step} {rule}: {remedy}.", CheckpointError)
        mine = self._own is None or newest <= self._own
        rule = f"step {newest} in {self.directory} is another run's: this one saved or restored step {self._own} last"
        check(mine, f"{rule}. Stop one of them, or give it a directory of its own.", CheckpointError)
        arrays = arrays_of(tree)
        check(bool(arrays), f"step={step} holds no arrays: there is nothing to save.", CheckpointError)
        manifest = make_manifest(step, arrays, data_state, config)
        self._clean(keep=self.max_checkpoints if drop else None)
        try:
            if _is_writer():
                self._steps.begin(step)
        except Exception as error:
            remedy = "Check the name, the space and the permissions."
            told = summary(error)
            raise CheckpointError(f"directory={self.directory} cannot be made or written: {told}. {remedy}") from error
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

        drop: whether to delete them; without it a step that may be of no use takes the place of no other.
        """
        if self._pending is None:
            return
        (step, response), self._pending = self._pending, None
        try:
            response.result()
        except Exception as error:
            self._clean()
            raise self._failed(step, error) from error
        self._own = step
        self._clean(keep=self.max_checkpoints if drop else None)

    close = wait

    def restore(self, template: PyTree, step: int | None = None, *, verify: bool = True) -> Restored:
        """Load a step into the structure, dtypes and shardings of `template`.

        template: the tree that was saved, of arrays or `jax.ShapeDtypeStruct`s; other leaves are kept as they are.
        step: without it the newest one; one that is damaged is reported and set aside as `<step>.corrupt` (in
        a bucket under its own name, without the file that says that it is whole), and the one before it is taken.
        verify: compare the fingerprints of what was loaded with those of what was saved.

        Raises CheckpointError with every difference between the trees, or with the names of the damaged leaves.
        """
        return self.restore_for(lambda _: template, step, verify=verify)

    def restore_for(
        self, template_for: Callable[[dict[str, Any]], PyTree], step: int | None = None, *, verify: bool = True
    ) -> Restored:
        """`restore`, into a template that is made for the manifest of the step: steps may hold other trees."""
        tree, manifest, damaged = load_newest(self._steps, template_for, step, "", verify, self._warn)
        for bad in damaged if _is_writer() else ():
            self._steps.set_aside(bad)
        gather("set aside")
        self._own = manifest["step"]
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

    def _clean(self, *, keep: int | None = None) -> None:
        """Delete all but the last `keep` steps, and what is left of others; failing to do so is no reason to stop."""
        if not _is_writer():
            return
        try:
            for step in self.steps[:-keep] if keep is not None else ():
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
) -> PyTree:
    """Load only the leaves below `prefix` into `template` (a model of arrays or `jax.ShapeDtypeStruct`s).

    Changes nothing in the directory, so it may be called while a run writes there.
    """
    return load_part(directory, template, step, prefix=prefix, verify=verify, warn=warn).tree


def load_part(
    directory: str | os.PathLike[str],
    template: PyTree,
    step: int | None = None,
    *,
    prefix: str = "model.",
    verify: bool = True,
    warn: Callable[[str], None] = _log.warning,
) -> Restored:
    """`load_weights`, with the step that they are of: without `step` it is the newest that is sound."""
    with StatusLine("loading the checkpoint"):
        tree, manifest, _ = load_newest(Steps(directory), lambda _: template, step, prefix, verify, warn)
        return Restored(tree, manifest["data_state"], manifest["step"])


def _is_writer() -> bool:
    return jax.process_index() == 0


def _same_operation() -> None:
    """Orbax counts its operations in each process, and saves only where all have counted the same."""
    if jax.process_count() == 1:
        return
    from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

    last = max(map(int, gather("operation", OperationIdGenerator.get_current_operation_id())))
    while int(OperationIdGenerator.get_current_operation_id()) < last:
        OperationIdGenerator.next_operation_id()
