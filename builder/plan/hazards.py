"""Which earlier records a record must wait for: by the bytes both touch, unless both only read."""

from dataclasses import dataclass, field

Space = tuple[int, int]  # memory class, target index


@dataclass(frozen=True)
class Access:
    """Bytes start .. stop of one space."""

    space: Space
    start: int
    stop: int
    is_write: bool


@dataclass
class HazardTracker:
    """Remembers accesses of records in order; a write forgets what it covers (its record waits for those)."""

    _live: dict[Space, list[tuple[Access, int]]] = field(default_factory=dict)

    def add(self, record: int, accesses: list[Access]) -> list[int]:
        """Indices of the earlier records this one must wait for, sorted, each once."""
        dependencies = set()
        for access in accesses:
            for earlier, index in self._live.get(access.space, ()):
                overlaps = earlier.start < access.stop and access.start < earlier.stop
                if overlaps and (earlier.is_write or access.is_write):
                    dependencies.add(index)
        for access in accesses:
            live = self._live.setdefault(access.space, [])
            if access.is_write:
                live[:] = [
                    (earlier, index)
                    for earlier, index in live
                    if not (access.start <= earlier.start and earlier.stop <= access.stop) or index == record
                ]
            live.append((access, record))
        return sorted(dependencies)
