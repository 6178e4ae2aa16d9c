"""Configuration of pipeline parallelism over the mesh axis `stage`."""

import dataclasses
from typing import Literal

from eqx_decoders.errors import CheckedFields, PositiveInt, check


AXIS = "stage"
GatherName = Literal["iteration", "repeat", "once"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig(CheckedFields):
    """Settings of pipeline parallelism over `Layout.stage` devices.

    **Arguments:**

    - `microbatches`: number of microbatches of a batch, at least the number of stages; with `delay`, at least twice the
        number of stages. None: no pipeline.
    - `repeats`: number of times that a microbatch passes all stages (circular schedule). More repeats reduce the
        fraction of bubbles and increase communication. With 1, weights are stored on the devices of their stage; with
        more, each weight is sent to its stage once per step.
    - `delay`: send the outputs of a stage while the next outputs are computed, so that the next stage reads them an
        iteration later. This doubles the bubbles.
    - `gather`: when a stage gathers weights that `fsdp` and other mesh axes split. `"iteration"`: in every iteration,
        which needs the least memory. `"repeat"`: once per repeat, which stores the gathered weights of two pieces.
        `"once"`: once for all pieces.
    """

    checked_name = "Pipeline."
    microbatches: PositiveInt | None = None
    repeats: PositiveInt = 1
    delay: bool = False
    gather: GatherName = "iteration"

    def schedule(self) -> "Pipeline | None":
        """Return the schedule of the pipeline. None: no pipeline."""
        return None if self.microbatches is None else Pipeline(**vars(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline(PipelineConfig):
    """Schedule of pipeline parallelism over `Layout.stage` devices, with the settings of `PipelineConfig`.

    Layers are split into `stages * repeats` pieces of equal size; stage `c mod stages` runs piece c. Remaining layers
    run after the pipeline, without it. Microbatch m has the sequences m, m + microbatches, … of the batch.
    """

    microbatches: PositiveInt = dataclasses.field()

    @property
    def lag(self) -> int:
        """Number of iterations between the work of consecutive stages on a microbatch."""
        return 2 if self.delay else 1

    @property
    def items(self) -> int:
        """Number of work items of each stage: microbatches times repeats."""
        return self.repeats * self.microbatches

    def bubbles(self, stages: int) -> int:
        """Return the number of iterations in which a stage is idle."""
        return self.lag * (stages - 1)

    def bubble_share(self, stages: int) -> float:
        """Return the fraction of the iterations in which a stage is idle."""
        return self.bubbles(stages) / (self.items + self.bubbles(stages))

    def check_fits(self, batch_size: int, stages: int) -> None:
        """Raise ConfigError if the pipeline does not fit the batch size or the number of stages."""
        count = self.microbatches
        check(
            count >= self.lag * stages,
            f"Pipeline.microbatches={count} must be at least {self.lag * stages}: {self.lag} for each of the "
            f"Layout.stage={stages} stages with Pipeline.delay={self.delay}, so that all stages have work at the same "
            "time. Use more microbatches or fewer stages.",
        )
        check(
            batch_size % count == 0,
            f"A batch of {batch_size} sequences must be a multiple of Pipeline.microbatches={count}. Choose another "
            "batch size or number of microbatches.",
        )
