"""Settings of the sampler of reinforcement learning: its devices, and the layout of the model on them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax

from eqx_decoders.errors import CheckedFields, ConfigError, NonNegativeInt, PositiveInt, check
from eqx_decoders.sharding.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerConfig(CheckedFields):
    """Devices and layout of the sampler. By default it uses the devices and arrays of the trainer."""

    checked_name = "sampler."
    devices: NonNegativeInt = 0
    """Number of devices reserved for sampling: the last N devices. 0: all devices alternate between sampling and
    training."""
    data: PositiveInt | None = None
    """Data-parallel degree of the sampler. None: as many replicas as there are devices."""
    fsdp: PositiveInt = 1
    """FSDP degree of the sampler."""
    tensor: PositiveInt = 1
    """Tensor-parallel degree of the sampler."""
    expert: PositiveInt = 1
    """Expert-parallel degree of the sampler."""

    compute_dtype: bool = True
    """Sample with a copy of the weights in the compute dtype if the trainer stores them in a larger dtype. The results
    are equal, and the sampler reads half of the bytes of float32 weights. False: sample with the trainer's arrays."""

    @property
    def is_separate(self) -> bool:
        """Whether the sampler has another layout than the trainer."""
        return dataclasses.replace(self, compute_dtype=True) != SamplerConfig()

    def layout(self, devices: Sequence[Any], model: Any) -> Layout:
        """Return the layout of the sampler's model (arrays or shapes) on these devices. Raises ConfigError."""
        data = -1 if self.data is None else self.data
        try:
            layout = Layout.create(devices=devices, data=data, fsdp=self.fsdp, tensor=self.tensor, expert=self.expert)
            layout.shardings(eqx.filter(model, lambda leaf: isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)))
        except ConfigError as error:
            raise ConfigError(str(error).replace("Layout.", "sampler.")) from error
        return layout


def split_devices(count: int) -> tuple[list[Any], list[Any]]:
    """Return the devices of the trainer, and the last `count` devices for the sampler. Raises ConfigError."""
    devices, processes = jax.devices(), jax.process_count()
    check(
        count < len(devices),
        f"sampler.devices={count} must leave at least one of the {len(devices)} devices for training.",
    )
    check(
        processes == 1,
        f"sampler.devices={count} supports one process, not {processes}: leave it out, so that all devices alternate "
        "between sampling and training.",
    )
    return devices[: len(devices) - count], devices[len(devices) - count :]
