"""The schedule of a pipeline over the mesh axis `stage`."""

import dataclasses
from typing import Literal

from eqx_decoders.errors import CheckedFields, PositiveInt, check


AXIS = "stage"
GatherName = Literal["iteration", "repeat", "once"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig(CheckedFields):
    """Settings of a pipeline over `Layout.stage` devices; without `microbatches` there is none.

    **Arguments:**

    - `microbatches`: parts of the batch; at least as many as stages, with `delay` twice as many.
    - `repeats`: how often a microbatch passes all stages: more repeats have a smaller share of bubbles and send more.
        Weights are stored so that none moves for one repeat; with more, each moves to its stage once in a step.
    - `delay`: results are sent while the next ones are computed, and read an iteration later; twice the bubbles.
    - `gather`: when a stage gathers the weights that `fsdp` and such split: in each `"iteration"`, what least memory
        needs; once in each `"repeat"`, two pieces being held; or `"once"` for all pieces.
    """

    checked_name = "Pipeline."
    microbatches: PositiveInt | None = None
    repeats: PositiveInt = 1
    delay: bool = False
    gather: GatherName = "iteration"

    def schedule(self) -> "Pipeline | None":
        """Return the schedule of the pipeline; None for none."""
        return None if self.microbatches is None else Pipeline(**vars(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline(PipelineConfig):
    """Schedule of a model's layers as a pipeline over `Layout.stage` devices, with the settings of `PipelineConfig`.

    Layers are cut into `stages * repeats` pieces of so many layers; piece c is run by stage `c mod stages`. What does
    not fill all pieces runs after them, as without a pipeline. Microbatch m has rows m, m + microbatches, ….
    """

    microbatches: PositiveInt = dataclasses.field()

    @property
    def lag(self) -> int:
        """Iterations between two stages' work on a microbatch."""
        return 2 if self.delay else 1

    @property
    def items(self) -> int:
        """Microbatches on which each stage works, with repeats."""
        return self.repeats * self.microbatches

    def bubbles(self, stages: int) -> int:
        """Return the number of iterations in which a stage has nothing to do."""
        return self.lag * (stages - 1)

    def bubble_share(self, stages: int) -> float:
        """Return the fraction of the iterations in which a stage has nothing to do."""
        return self.bubbles(stages) / (self.items + self.bubbles(stages))

    def check_fits(self, rows: int, stages: int) -> None:
        """Raise ConfigError for a batch or a mesh that does not fit this pipeline."""
        least, count = self.lag * stages, self.microbatches
        rule = "with delay=True twice " if self.delay else ""
        text = f"Pipeline.microbatches={count} must be at least {least}, {rule}Layout.stage={stages}"
        check(count >= least, f"{text}: else stages wait for what comes back. Give more of them or fewer stages.")
        rule = f"must be a multiple of Pipeline.microbatches={count}"
        check(rows % count == 0, f"A batch of {rows} rows {rule}. Choose another size or number of microbatches.")
