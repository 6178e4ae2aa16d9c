"""Settings that runs and plans share: the model, and all else on which a compiled step depends but the data."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

from eqx_decoders.context import Execution, ExecutionConfig
from eqx_decoders.errors import CheckedFields, NonNegativeFloat, NonNegativeInt, check, check_option
from eqx_decoders.families.registry import is_model, list_models
from eqx_decoders.io.atomic_files import expand_paths
from eqx_decoders.numerics.low_precision import LowPrecisionConfig
from eqx_decoders.numerics.precision import Precision
from eqx_decoders.remat import POLICIES, Remat
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.offload import Offload
from eqx_decoders.sharding.pipeline_config import PipelineConfig
from eqx_decoders.training.mesh_config import MeshConfig
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.step_config import StepConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings(CheckedFields):
    """Model of a run or of a plan."""

    checked_name = ""
    model: str = "tiny"
    """Name of a published model. `train --list-models` lists the names."""
    model_config: str | None = None
    """Configuration file used instead of model: JSON of a `DecoderConfig` (`to_json`), or a config.json of
    transformers."""
    set: tuple[str, ...] = ()
    """Fields of the model to replace, such as num_layers=4 or mlp_dim=512 (see `config_json.with_fields`)."""
    mtp_depths: NonNegativeInt = 0
    """Number of multi-token prediction depths to add to a model without them. An export to Hugging Face leaves them
    out."""

    def __post_init__(self):
        super().__post_init__()
        expand_paths(self, "model_config")
        if self.model_config is None and not is_model(self.model):
            check_option("model", self.model, list_models())


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings(ExecutionConfig):
    """How the steps of a run or of a plan are computed."""

    checked_name = ""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype of activations. auto: bfloat16 on TPU and GPU, float32 on CPU."""
    params_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights. bfloat16 has 8 significant bits, so a step that changes a weight by less than 1/512 of its
    value does not change it. With a small learning rate use float32, or `optimizer.ema_decay`."""
    remat: str = "none"
    """Rematerialization policy, or "custom" for the two lists below."""
    remat_save: tuple[str, ...] = ()
    """Names of tensors that are saved on the device, with remat=custom."""
    remat_offload: tuple[str, ...] = ()
    """Names of tensors that are saved in host memory, with remat=custom."""
    axis_types: Literal["auto", "explicit"] = "auto"
    """Type of the mesh axes. explicit: the types of arrays include their shardings, for custom code around a run. The
    steps are equal."""
    replicated_tolerance: NonNegativeFloat = 0.02
    """Maximum share of the weights that may be replicated along a mesh axis that splits other weights. A run of a model
    with at least ten million weights is refused above it. Norm scales are always replicated."""
    xla_flags: Literal["auto", "none"] = "auto"
    """XLA options on TPUs. auto: recommended options for the chip (see `cli.xla_flags`), except those that
    LIBTPU_INIT_ARGS or XLA_FLAGS set; none: XLA's defaults."""
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    low_precision: LowPrecisionConfig = LowPrecisionConfig()
    offload: Offload = Offload()
    optimizer: OptimizerConfig = OptimizerConfig()
    step: StepConfig = StepConfig()

    def __post_init__(self):
        super().__post_init__()
        check_option("remat", self.remat, (*POLICIES, "custom"))
        custom = self.remat == "custom"
        check(
            custom or not (self.remat_save or self.remat_offload),
            f"remat={self.remat!r} has its own lists: remat_save and remat_offload need remat='custom'.",
        )
        if custom:
            Remat(save=self.remat_save, offload=self.remat_offload)
        piped = self.pipeline == PipelineConfig() or (self.mesh.stage != 1 and self.pipeline.microbatches is not None)
        check(piped, f"{self.pipeline} needs mesh.stage, the number of stages, and pipeline.microbatches: give both.")
        rounded = self.low_precision == LowPrecisionConfig() or self.low_precision.mode is not None
        check(rounded, f"{self.low_precision} needs low_precision.mode, such as 'int8': give it, too.")

    def check_rows(self, rows: int) -> None:
        """Raise ConfigError for a batch of so many rows that can't be cut into microbatches."""
        parts = self.step.gradient_accumulation_steps
        check(rows % parts == 0, f"batch_size={rows} must be a multiple of step.gradient_accumulation_steps={parts}.")

    def step_execution(
        self, rows: int | None, devices: Sequence[Any] | None = None, *, abstract: bool = False
    ) -> Execution:
        """Make layout, dtypes and remat of these devices, or of all devices of this program.

        Raises ConfigError unless the devices divide a batch of `rows`; None: of any size. abstract: only describe them.
        """
        options: dict[str, Any] = {} if devices is None else {"devices": devices}
        options |= dict(abstract=abstract, explicit=self.axis_types == "explicit", offload=self.offload)
        layout = Layout.create(**dataclasses.asdict(self.mesh), **options)
        if rows is not None:
            self._check_split(rows, layout)
        compute = layout.backend.compute_dtype if self.dtype == "auto" else self.dtype
        remat: Any = self.remat
        if remat == "custom":
            remat = Remat(save=self.remat_save, offload=self.remat_offload)
        return Execution(
            layout=layout,
            precision=Precision(params=self.params_dtype, compute=compute),
            remat=remat,
            pipeline=self.pipeline.schedule(),
            low_precision=self.low_precision.products(),
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(ExecutionConfig)},
        )

    def _check_split(self, rows: int, layout: Layout) -> None:
        split = [axis for axis in ("data", "fsdp", "fsdp_transpose", "expert") if layout.sizes[axis] > 1]
        parts = math.prod(layout.sizes[axis] for axis in split)
        count, pieces = self.step.gradient_accumulation_steps, self.pipeline.microbatches or 1
        cut = f"batch_size={rows}" + f" / gradient_accumulation_steps={count}" * (count > 1)
        cut += f" / pipeline.microbatches={pieces}" * (pieces > 1)
        along = " x ".join(f"mesh.{axis}" for axis in split)
        fits = rows % (count * pieces * parts) == 0
        check(fits, f"{cut} must be a multiple of {parts}, the devices along {along}.")
