"""Flags for the devices of `generate`, `serve`, `evaluate` and `convert`: one device, or a mesh."""

import contextlib
import dataclasses
import json
from typing import Any

from eqx_decoders.errors import CheckedFields, PositiveInt, check
from eqx_decoders.io.processes import broadcast_json, connected
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.training.settings.step import MeshConfig


ONE_DEVICE = MeshConfig(data=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices(CheckedFields):
    """Flags for the devices of a program, in one or more processes."""

    checked_name = ""  # messages contain flags

    distributed: bool = False
    """Run as one of several processes that were started with the same flags (see scripts/train.py)."""
    distributed_timeout: PositiveInt = 300
    """Time in seconds within which all processes must start."""
    mesh: MeshConfig = ONE_DEVICE

    def __post_init__(self):
        super().__post_init__()
        check(
            self.mesh != ONE_DEVICE or not self.distributed,
            "distributed=True needs a mesh over the devices of all processes, such as mesh.fsdp=-1.",
        )

    def connected(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that connects to the other processes and checks that they have the same flags."""
        return self._connected() if self.distributed else contextlib.nullcontext()

    @contextlib.contextmanager
    def _connected(self):
        with connected(self.distributed_timeout):
            flags: dict[str, Any] = json.loads(
                json.dumps(dataclasses.asdict(self))
            )  # JSON values, as in other processes
            first = broadcast_json("flags", flags)
            differences = [
                f"{name}={value!r}, but {first.get(name)!r} in the first process"
                for name, value in flags.items()
                if value != first.get(name)
            ]
            check(
                not differences,
                f"{'; '.join(differences)}: all processes must be started with the same flags.",
            )
            yield

    def layout(self) -> Layout:
        """Return the layout of the mesh, or of one device without a mesh."""
        return layout_of(self.mesh)


def layout_of(mesh: MeshConfig) -> Layout:
    """Return the layout of a mesh, or of one device for the default mesh."""
    return Layout() if mesh == ONE_DEVICE else Layout.create(**dataclasses.asdict(mesh))
