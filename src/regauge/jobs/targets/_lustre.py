"""FSx for Lustre file systems, which launchers mount by id and mount name."""

from __future__ import annotations

import re
from typing import NamedTuple

from regauge.jobs.targets import Volume
from regauge.system.errors import SettingsError

_SOURCE = re.compile(r"(?P<id>fs-[0-9a-f]+)/(?P<mount>\w+)")


class LustreSource(NamedTuple):
    file_system_id: str
    """Identifier, such as `fs-0123456789abcdef0`."""
    mount_name: str

    @classmethod
    def parse(cls, volume: Volume) -> LustreSource:
        """Parse a volume's source; raises SettingsError for another form."""
        match = _SOURCE.fullmatch(volume.source)
        if match is None:
            source = f"'{volume.source}' of '{volume.name}'"
            problem = f"launch.volumes: {source} is not the source of FSx for Lustre"
            remedy = "write id and mount name, such as fs-0123456789abcdef0/abcdefgh"
            raise SettingsError(problem, remedy)
        return cls(match["id"], match["mount"])

    def find_host_name(self, region: str) -> str:
        """Return the file system's DNS name in a region."""
        return f"{self.file_system_id}.fsx.{region}.amazonaws.com"
