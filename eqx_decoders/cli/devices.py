"""Where `generate` and `convert` put a model: on one device, or on a mesh over the devices of one or more processes."""

import contextlib
import dataclasses
from typing import Any

from eqx_decoders.errors import check, check_integer
from eqx_decoders.io.coordination import connected, from_first
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.training.mesh_config import MeshConfig


ONE_DEVICE = MeshConfig(data=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """The flags of programs that run on any devices, in one or more processes."""

    distributed: bool = False
    """This is one of several processes, started with the same flags as the others (see scripts/train.py)."""
    distributed_timeout: int = 300
    """Seconds in which all of them must have started."""
    mesh: MeshConfig = ONE_DEVICE

    def __post_init__(self):
        check_integer("distributed_timeout", self.distributed_timeout)
        spread = self.mesh != ONE_DEVICE or not self.distributed
        check(spread, "distributed=True needs a mesh over the devices of all processes, such as mesh.fsdp=-1.")

    def connected(self) -> contextlib.AbstractContextManager[None]:
        """Around the program: the other processes are met, and have the same flags."""
        return self._connected() if self.distributed else contextlib.nullcontext()

    @contextlib.contextmanager
    def _connected(self):
        with connected(self.distributed_timeout):
            own: dict[str, Any] = dataclasses.asdict(self)
            first = from_first("flags", own)
            other = {name: (value, first.get(name)) for name, value in own.items() if value != first.get(name)}
            told = "; ".join(
                f"{name}={value!r}, but {theirs!r} in the first process" for name, (value, theirs) in other.items()
            )
            check(not other, f"{told}: all processes must be started with one command.")
            yield

    def layout(self) -> Layout:
        """All devices as the mesh says; without one, a single device."""
        return layout_of(self.mesh)


def layout_of(mesh: MeshConfig) -> Layout:
    """One device, unless the mesh says more."""
    return Layout() if mesh == ONE_DEVICE else Layout.create(**dataclasses.asdict(mesh))


def mesh_flags() -> dict[str, str]:
    """The flags of the mesh, by the names that sentences about it have."""
    names = [field.name for field in dataclasses.fields(MeshConfig)]
    return {f"{group}.{name}": f"--mesh.{name.replace('_', '-')}" for group in ("mesh", "Layout") for name in names}
