"""Settings of the devices that draw answers, and of how the model is split over them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax

from eqx_decoders.errors import CheckedFields, ConfigError, NonNegativeInt, PositiveInt, check
from eqx_decoders.sharding.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerConfig(CheckedFields):
    """Devices that draw answers. Without any of these settings it is those that train, on the same arrays."""

    checked_name = "sampler."
    devices: NonNegativeInt = 0
    """The last so many devices draw answers, and the others train; 0: all do both, in turn."""
    data: PositiveInt | None = None
    """Copies of the model that draws, each with its part of the answers; None: as many as the devices allow."""
    fsdp: PositiveInt = 1
    """Parts into which its weights and the answers are cut; weights are gathered where they are used."""
    tensor: PositiveInt = 1
    """Parts into which its heads, mlp and vocab are cut."""
    expert: PositiveInt = 1
    """Parts into which its experts are cut."""

    compute_dtype: bool = True
    """Read weights from copies in the dtype in which they are multiplied, where the trainer has them in a larger one:
    the same numbers, and half of the bytes of float32 ones or less; False: from the trainer's own arrays."""

    @property
    def is_separate(self) -> bool:
        """Whether the model that draws is split another way than the one that is trained."""
        return dataclasses.replace(self, compute_dtype=True) != SamplerConfig()

    def layout(self, devices: Sequence[Any], model: Any) -> Layout:
        """Return the layout of a model (of arrays or shapes) that draws on these devices. Raises ConfigError."""
        data = -1 if self.data is None else self.data
        try:
            layout = Layout.create(devices=devices, data=data, fsdp=self.fsdp, tensor=self.tensor, expert=self.expert)
            layout.shardings(eqx.filter(model, lambda leaf: isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)))
        except ConfigError as error:
            raise ConfigError(str(error).replace("Layout.", "sampler.")) from error
        return layout


def split_devices(count: int) -> tuple[list[Any], list[Any]]:
    """Return the devices that train, and the last `count`, which draw answers. Raises ConfigError."""
    devices, processes = jax.devices(), jax.process_count()
    check(count < len(devices), f"sampler.devices={count} of {len(devices)} devices leave none to train: give fewer.")
    rule = f"sampler.devices={count}: a run whose devices are divided has one process, not {processes}"
    check(processes == 1, f"{rule}. Leave it out: then all devices draw and train in turn.")
    return devices[: len(devices) - count], devices[len(devices) - count :]
