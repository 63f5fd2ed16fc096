"""Reads Slurm's job records: `scontrol show job`, and `sacct` if the cluster has accounting."""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from urllib.parse import parse_qsl, quote, urlencode

from regauge.jobs.targets._times import format_time
from regauge.system.errors import FIRST_SIGNAL_CODE
from regauge.system.units import SECONDS_PER_MINUTE

COMMENT_PREFIX = "regauge:"
"""Prefix for job comments written by Regauge."""
MISSING_VALUES = ("", "(null)", "Unknown", "None", "N/A")
"""Words with which Slurm marks a missing value."""
SACCT_FIELDS = {
    "JobID": "JobId",
    "JobName": "JobName",
    "State": "JobState",
    "ExitCode": "ExitCode",
    "Submit": "SubmitTime",
    "Start": "StartTime",
    "End": "EndTime",
    "NodeList": "NodeList",
    "Reason": "Reason",
    "WorkDir": "WorkDir",
    "Comment": "Comment",
}
"""`sacct` field -> name in `scontrol show job`."""
_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z0-9_:/]*)=")


@dataclass(frozen=True)
class SlurmRecord:
    """Slurm's record for a job or array job."""

    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields from `scontrol show job`."""

    @property
    def job_id(self) -> str:
        """Job number; `array_index` for an array job."""
        if "ArrayTaskId" in self.fields:
            return f"{self.fields['ArrayJobId']}_{self.fields['ArrayTaskId']}"
        return self.fields.get("JobId", "")

    @property
    def index(self) -> int:
        """The array index; 0 without an array."""
        text = self.job_id.partition("_")[2]
        return int(text) if text.isdigit() else 0

    @property
    def state(self) -> str:
        return self.fields.get("JobState", "").partition(" ")[0]

    @property
    def restarts(self) -> int:
        return int(self.fields.get("Restarts", "0"))

    @property
    def exit_code(self) -> int | None:
        """Exit code as in shells: 128 plus the signal number if a signal ended the job."""
        code, _, number = self.fields.get("ExitCode", "").partition(":")
        if not code.isdigit() or not number.isdigit():
            return None
        return FIRST_SIGNAL_CODE + int(number) if int(number) else int(code)

    @property
    def num_nodes(self) -> int:
        """Number of nodes; the smallest one of a pending elastic job."""
        count = re.match(r"\d+", self.fields.get("NumNodes", ""))
        return int(count[0]) if count else 1

    @property
    def node_list(self) -> str:
        """The nodes in Slurm's notation, such as `n[1-4]`."""
        text = self.fields.get("NodeList", "")
        return "" if text in MISSING_VALUES else text

    @property
    def work_folder(self) -> str:
        """The job's working folder, an absolute path."""
        return self.fields.get("WorkDir", "")

    @cached_property
    def facts(self) -> dict[str, str]:
        """The facts in the job's comment; empty if Regauge did not submit it."""
        return parse_comment(self.fields.get("Comment", ""))

    @property
    def earlier_stages(self) -> dict[str, str]:
        """Stage name -> job, for the stages before this one; empty outside a pipeline."""
        pairs = (item.partition(":") for item in self.facts.get("after", "").split(",") if item)
        return {name: job for name, _, job in pairs}

    def read_time(self, name: str) -> str | None:
        """Convert Slurm's local time to ISO 8601 in UTC; None if unknown."""
        try:
            return format_time(dt.datetime.fromisoformat(self.fields.get(name, "")))
        except ValueError:  # such as `Unknown`
            return None


def build_comment(facts: Mapping[str, str]) -> str:
    """Format facts as a job comment: one word without quotes, which `sacct` can print."""
    return COMMENT_PREFIX + urlencode(facts, safe="/:.,@-", quote_via=quote)


def parse_comment(comment: str) -> dict[str, str]:
    """Return the facts in a comment; empty if Regauge did not write it."""
    if not comment.startswith(COMMENT_PREFIX):
        return {}
    return dict(parse_qsl(comment.removeprefix(COMMENT_PREFIX)))


def parse_records(text: str) -> list[SlurmRecord]:
    """Parse `scontrol show --oneliner job`; records are sorted by index.

    Slurm has one record for all pending jobs in an array.
    """
    fields = (parse_fields(line) for line in text.splitlines() if "JobId=" in line)
    records = [SlurmRecord(entry) for document in fields for entry in _expand_array(document)]
    return sorted(records, key=lambda record: record.index)


def _expand_array(fields: dict[str, str]) -> list[dict[str, str]]:
    """Return the fields per index for an index list, such as `0,2-5%2`."""
    indices = fields.get("ArrayTaskId")
    if indices is None:
        return [fields]
    numbers: list[int] = []
    for part in indices.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            return [fields]
        numbers += range(int(first), int(last or first) + 1)
    return [{**fields, "ArrayTaskId": str(number)} for number in numbers]


def parse_fields(line: str) -> dict[str, str]:
    """Parse `Key=value Key=value`; a value may contain spaces."""
    parts = _KEY.split(line)[1:]
    return {key: value.strip() for key, value in zip(parts[::2], parts[1::2], strict=True)}


def parse_table(text: str) -> list[SlurmRecord]:
    """Parse `sacct --parsable2 --noheader` output with `SACCT_FIELDS`."""
    names = tuple(SACCT_FIELDS.values())
    records = []
    for line in text.splitlines():
        values = line.split("|", len(names) - 1)
        if len(values) == len(names):
            fields = dict(zip(names, values, strict=True))
            array, separator, index = fields["JobId"].partition("_")
            if separator:
                fields |= {"ArrayJobId": array, "ArrayTaskId": index}
            records.append(SlurmRecord(fields))
    return sorted(records, key=lambda record: record.index)


def parse_duration(text: str) -> float:
    """Return the seconds of a time limit; infinite for `UNLIMITED`.

    >>> parse_duration("1-00:30:00")
    88200.0
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return math.inf
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * SECONDS_PER_MINUTE + seconds


def parse_assignments(text: str) -> dict[str, str]:
    """Parse `scontrol show config`, which has one `Name = value` per line."""
    pairs = (line.partition("=") for line in text.splitlines() if " = " in line)
    return {name.strip(): value.strip() for name, _, value in pairs}
