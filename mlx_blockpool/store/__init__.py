"""What outlives the process: whole-or-absent files and records that prove what they hold. Knows no pool and no engine."""

from .fs import Disk
from .record import Expected, Part, Record

__all__ = ["Disk", "Expected", "Part", "Record"]
