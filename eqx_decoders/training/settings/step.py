"""Settings that runs and plans share: the model, and how its training step is compiled."""

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
            check_option("model", self.model, list_models(), listed_by="`train --list-models`")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Number of devices along each axis of the mesh. One of the numbers may be -1: all remaining devices."""

    data: int = -1
    """Data-parallel degree: number of replicas of the weights. -1: all remaining devices."""
    stage: int = 1
    """Pipeline-parallel degree: the layers are split into this number of stages. Without `pipeline`, the weights of a
    stage are gathered where they are used."""
    fsdp: int = 1
    """FSDP degree: weights and batch are split; weights are gathered where they are used. -1: all remaining devices."""
    fsdp_transpose: int = 1
    """FSDP degree along the MLP dimension of the weights."""
    context: int = 1
    """Context-parallel degree: sequences are split."""
    tensor: int = 1
    """Tensor-parallel degree: heads, MLP and vocabulary are split."""
    tensor_sequence: int = 1
    """Tensor-parallel degree with sequence parallelism: between layers, the sequence is split."""
    expert: int = 1
    """Expert-parallel degree: experts are split."""


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
            f"remat_save and remat_offload need remat='custom': remat={self.remat!r} has its own lists.",
        )
        if custom:
            Remat(save=self.remat_save, offload=self.remat_offload)
        check(
            self.pipeline == PipelineConfig() or (self.mesh.stage != 1 and self.pipeline.microbatches is not None),
            f"{self.pipeline} needs mesh.stage, the number of stages, and pipeline.microbatches: set both.",
        )
        check(
            self.low_precision == LowPrecisionConfig() or self.low_precision.mode is not None,
            f"{self.low_precision} needs low_precision.mode, such as 'int8': set it.",
        )

    def check_rows(self, rows: int) -> None:
        """Raise ConfigError if a batch of `rows` sequences cannot be split into microbatches."""
        steps = self.step.gradient_accumulation_steps
        check(rows % steps == 0, f"batch_size={rows} must be a multiple of step.gradient_accumulation_steps={steps}.")

    def step_execution(
        self, rows: int | None, devices: Sequence[Any] | None = None, *, abstract: bool = False
    ) -> Execution:
        """Return the layout, dtypes and remat policy of the steps. Raises ConfigError.

        **Arguments:**

        - `rows`: number of sequences of a batch, which the devices must divide. None: it is not checked.
        - `devices`: the devices. None: all devices of this process and of the processes that it is connected to.
        - `abstract`: whether the layout only describes devices, which need not exist.
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
        """Raise ConfigError if the devices do not divide the microbatches of a batch."""
        axes = [axis for axis in ("data", "fsdp", "fsdp_transpose", "expert") if layout.sizes[axis] > 1]
        devices = math.prod(layout.sizes[axis] for axis in axes)
        steps, microbatches = self.step.gradient_accumulation_steps, self.pipeline.microbatches or 1
        quotient = f"batch_size={rows}" + f" / gradient_accumulation_steps={steps}" * (steps > 1)
        quotient += f" / pipeline.microbatches={microbatches}" * (microbatches > 1)
        check(
            rows % (steps * microbatches * devices) == 0,
            f"{quotient} must be a multiple of {devices}, the devices along "
            f"{' x '.join(f'mesh.{axis}' for axis in axes)}.",
        )
