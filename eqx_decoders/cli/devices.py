"""Devices of `generate` and `convert`: one, or a mesh over the devices of one or more processes."""

import contextlib
import dataclasses
import json
from typing import Any

from eqx_decoders.errors import CheckedFields, PositiveInt, check
from eqx_decoders.io.processes import connected, from_first
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.training.mesh_config import MeshConfig


ONE_DEVICE = MeshConfig(data=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices(CheckedFields):
    """Flags of programs that run on any devices, in one or more processes."""

    checked_name = ""  # messages name flags

    distributed: bool = False
    """Run as one of several processes that are started with the same flags (see scripts/train.py)."""
    distributed_timeout: PositiveInt = 300
    """Time in seconds within which all processes must start."""
    mesh: MeshConfig = ONE_DEVICE

    def __post_init__(self):
        super().__post_init__()
        spread = self.mesh != ONE_DEVICE or not self.distributed
        check(spread, "distributed=True needs a mesh over the devices of all processes, such as mesh.fsdp=-1.")

    def connected(self) -> contextlib.AbstractContextManager[None]:
        """Connect to the other processes while open, and check that they have the same flags."""
        return self._connected() if self.distributed else contextlib.nullcontext()

    @contextlib.contextmanager
    def _connected(self):
        with connected(self.distributed_timeout):
            flags: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))  # as the others read them
            first = from_first("flags", flags)
            other = {name: (value, first.get(name)) for name, value in flags.items() if value != first.get(name)}
            message = "; ".join(
                f"{name}={value!r}, but {theirs!r} in the first process" for name, (value, theirs) in other.items()
            )
            check(not other, f"{message}: all processes must be started with one command.")
            yield

    def layout(self) -> Layout:
        """Return the layout of the mesh over all devices; without a mesh, of a single device."""
        return layout_of(self.mesh)


def layout_of(mesh: MeshConfig) -> Layout:
    """Return the layout of a mesh; of one device if the mesh is the default."""
    return Layout() if mesh == ONE_DEVICE else Layout.create(**dataclasses.asdict(mesh))
