"""Checkpoints of a training run: arrays, a manifest and the data iterator's state, committed together by Orbax.

Arrays are saved as a flat dictionary `{"model.scanned_layers.0.unit.0.mlp.gate": array}`. Without further checks, Orbax
silently casts dtypes, drops arrays whose counterpart is None, and loads flipped bits. Therefore a manifest is saved
with the arrays. Their shapes and dtypes are compared before anything is loaded, and their fingerprints afterwards.

In a run of several processes, all processes save and restore together. The first process lists the steps.

`Steps` lists and deletes steps, not `ocp.training.Checkpointer`. The latter deletes a step file by file under its own
name, so that a killed process leaves an incomplete step that is listed as complete. It also creates the directory and
removes temporary directories when it is opened, even if only to read a run that another process is writing.
"""

import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree
from orbax.checkpoint import v1 as ocp

from eqx_decoders.errors import CheckpointError, check_integer
from eqx_decoders.io.checkpoint.manifest import make_manifest
from eqx_decoders.io.checkpoint.orbax import orbax_context, summary
from eqx_decoders.io.checkpoint.reading import arrays_of, load_newest, read_manifest
from eqx_decoders.io.checkpoint.steps import Steps
from eqx_decoders.io.processes import all_gather_json, broadcast_json
from eqx_decoders.io.status import StatusLine


_log = logging.getLogger("eqx_decoders")


class Restored(NamedTuple):
    """Restored step: the tree, the data iterator's state, and the number of the step."""

    tree: PyTree
    data_state: dict[str, Any]
    step: int


class Checkpoints:
    """Checkpoints of a run in a directory, which are saved asynchronously.

    Only one run may save into the directory at a time (see `RunLock`); reading is always safe.

    **Arguments:**

    - `directory`: a path, or `gs://bucket/path` (extra `gcs`).
    - `max_checkpoints`: number of steps to keep. Older steps are deleted.
    - `warn`: function that reports steps that cannot be read; default: a warning of the logger `eqx_decoders`.
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
        self._last: int | None = None  # the last step that this object saved or restored

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.wait(drop=error is None)
        except CheckpointError as failed:
            if error is None:
                raise
            self._warn(str(failed))  # the error of the with block is raised

    @property
    def steps(self) -> tuple[int, ...]:
        """Committed steps, oldest first."""
        return self._steps.committed()

    @property
    def latest(self) -> int | None:
        """Newest committed step; None: there is no step."""
        return max(self.steps, default=None)

    def manifest(self, step: int | None = None) -> dict[str, Any]:
        """Return the manifest of a step: configuration, data state, shapes of arrays. None: of the newest step."""
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
        """Save the arrays of `tree`. Returns False if this object has just saved or restored the same step.

        The arrays may be donated or deleted as soon as the call returns: the files are written in the background.
        Errors of writing are raised by `wait`, `close` or the next `save`. Other leaves than arrays are not saved.

        **Arguments:**

        - `step`: number of the step, larger than all saved steps.
        - `tree`: tree of arrays.
        - `data_state`, `config`: values that can be written as JSON.
        - `wait`: wait until the step is written.
        - `drop`: delete all but the last `max_checkpoints` of the older steps. With `wait`, this step counts as one of
            them. False: delete no step, because the new step may turn out to be useless.
        """
        check_integer("step", step, minimum=0)
        self.wait(drop=False)
        _synchronize_operation_ids()
        steps = broadcast_json("steps", self.steps if jax.process_index() == 0 else None)
        if step == self._last and step in steps:
            return False
        newest = max(steps, default=-1)
        if step <= newest:
            raise CheckpointError(
                f"step={step} must be larger than the newest step {newest} in {self.directory}. Resume from that step, "
                "move it away, or train in another directory."
            )
        if self._last is not None and newest > self._last:
            raise CheckpointError(
                f"step {newest} in {self.directory} was saved by another run, because this run saved or restored step "
                f"{self._last} last. Stop one of the runs, or use another directory for it."
            )
        arrays = arrays_of(tree)
        if not arrays:
            raise CheckpointError(f"step={step} has no arrays, so there is nothing to save.")
        manifest = make_manifest(step, arrays, data_state, config)
        self._clean(keep=self.max_checkpoints if drop else None)
        try:
            if _is_writer():
                self._steps.begin(step)
        except Exception as error:
            raise CheckpointError(
                f"directory={self.directory} cannot be created or written: {summary(error)}. Check its name, the free "
                "space and the permissions."
            ) from error
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
        """Wait until the step that is being saved is committed. Then delete all but the last `max_checkpoints` steps.

        `drop`: False: delete no step, because the new step may turn out to be useless.
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
        self._clean(keep=self.max_checkpoints if drop else None)

    close = wait

    def restore(self, template: PyTree, step: int | None = None, *, verify: bool = True) -> Restored:
        """Load a step with the structure, dtypes and shardings of `template`.

        Raises CheckpointError, which lists all differences between the trees, or the damaged arrays.

        **Arguments:**

        - `template`: tree of arrays or `jax.ShapeDtypeStruct`, with the structure of the saved tree. Other leaves are
            returned unchanged.
        - `step`: number of the step. None: the newest undamaged step. Damaged steps are reported and renamed to
            `<step>.corrupt`; in a bucket, the file that marks a step as complete is removed instead.
        - `verify`: whether to compare the fingerprints of the loaded arrays with the manifest.
        """
        return self.restore_for(lambda _: template, step, verify=verify)

    def restore_for(
        self, template_for: Callable[[dict[str, Any]], PyTree], step: int | None = None, *, verify: bool = True
    ) -> Restored:
        """Load a step like `restore`, with the template that `template_for` returns for the manifest of the step.

        Steps of the same run may have different trees.
        """
        tree, manifest, damaged_steps = load_newest(self._steps, template_for, step, "", verify, self._warn)
        if _is_writer():
            for damaged_step in damaged_steps:
                self._steps.set_aside(damaged_step)
        all_gather_json("set aside")
        self._last = manifest["step"]
        return Restored(tree, manifest["data_state"], manifest["step"])

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        try:
            saved = str(list(self.steps))
        except CheckpointError:
            saved = "unknown"
        return CheckpointError(
            f"Step {step} could not be saved in {self.directory}: {summary(error)}. Check the free space and the "
            f"permissions. Saved steps: {saved}."
        )

    def _clean(self, *, keep: int | None = None) -> None:
        """Delete incomplete steps, and all but the last `keep` steps. Errors are only reported as warnings."""
        if not _is_writer():
            return
        try:
            if keep is not None:
                for step in self.steps[:-keep]:
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
    """Load only the arrays whose paths start with `prefix`, such as the model without the optimizer state.

    The directory is not changed, so another run may write to it at the same time.

    **Arguments:**

    - `directory`: directory of the checkpoints.
    - `template`: tree of arrays or `jax.ShapeDtypeStruct`, whose paths do not contain `prefix`.
    - `step`: number of the step; None: the newest undamaged step.
    - `verify`, `warn`: see `Checkpoints`.
    """
    with StatusLine("loading the checkpoint"):
        tree, manifest, _ = load_newest(Steps(directory), lambda _: template, step, prefix, verify, warn)
        return Restored(tree, manifest["data_state"], manifest["step"])


def _is_writer() -> bool:
    return jax.process_index() == 0


def _synchronize_operation_ids() -> None:
    """Set Orbax's count of operations to the maximum of all processes. Orbax requires that all counts are equal."""
    if jax.process_count() == 1:
        return
    from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

    last = max(map(int, all_gather_json("operation", OperationIdGenerator.get_current_operation_id())))
    while int(OperationIdGenerator.get_current_operation_id()) < last:
        OperationIdGenerator.next_operation_id()
