"""Reads Slurm's records of jobs: `scontrol show job`, and `sacct` if the cluster has accounting."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from urllib.parse import parse_qsl, quote, urlencode

from regauge.jobs.targets._times import format_time
from regauge.system.errors import FIRST_SIGNAL_CODE

COMMENT_PREFIX = "regauge:"
"""Prefix of the job comments that Regauge writes."""
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
"""Fields that are read from `sacct`, with their names in `scontrol show job`."""
_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z0-9_:/]*)=")


@dataclass(frozen=True)
class SlurmRecord:
    """Slurm's record of a job or an array job."""

    fields: Mapping[str, str] = field(default_factory=dict)
    """The fields of `scontrol show job`."""

    @property
    def job_id(self) -> str:
        """Job number; `array_index` for an array job."""
        if "ArrayTaskId" in self.fields:
            return f"{self.fields['ArrayJobId']}_{self.fields['ArrayTaskId']}"
        return self.fields.get("JobId", "")

    @property
    def index(self) -> int:
        """The index in the array; 0 without an array."""
        text = self.job_id.partition("_")[2]
        return int(text) if text.isdigit() else 0

    @property
    def state(self) -> str:
        """Slurm's name of the state, such as `PENDING`."""
        return self.fields.get("JobState", "").partition(" ")[0]

    @property
    def restarts(self) -> int:
        """Number of times that Slurm has requeued the job."""
        return int(self.fields.get("Restarts", "0"))

    @property
    def exit_code(self) -> int | None:
        """The exit code as in shells: 128 plus the number of the signal that ended the job."""
        code, _, number = self.fields.get("ExitCode", "").partition(":")
        if not code.isdigit() or not number.isdigit():
            return None
        return FIRST_SIGNAL_CODE + int(number) if int(number) else int(code)

    @property
    def node_list(self) -> str:
        """The nodes in Slurm's notation, such as `n[1-4]`."""
        text = self.fields.get("NodeList", "")
        return "" if text in MISSING_VALUES else text

    @property
    def work_folder(self) -> str:
        """Working folder of the job, an absolute path."""
        return self.fields.get("WorkDir", "")

    @cached_property
    def facts(self) -> dict[str, str]:
        """The facts in the comment of the job; empty if Regauge did not submit it."""
        return parse_comment(self.fields.get("Comment", ""))

    @property
    def earlier_stages(self) -> dict[str, str]:
        """Stage name -> job, for the stages before this one; empty outside a pipeline."""
        pairs = (item.partition(":") for item in self.facts.get("after", "").split(",") if item)
        return {name: job for name, _, job in pairs}

    def read_time(self, name: str) -> str | None:
        """Return a time as ISO 8601 in UTC; None if it is unknown."""
        return convert_time(self.fields.get(name, ""))


def convert_time(text: str) -> str | None:
    """Return a time of Slurm, which is local, as ISO 8601 in UTC; None if it is unknown."""
    try:
        return format_time(dt.datetime.fromisoformat(text))
    except ValueError:  # such as `Unknown`
        return None


def build_comment(facts: Mapping[str, str]) -> str:
    """Return facts as the comment of a job: one word without quotes, which `sacct` can print."""
    return COMMENT_PREFIX + urlencode(facts, safe="/:.,@-", quote_via=quote)


def parse_comment(comment: str) -> dict[str, str]:
    """Return the facts of a comment; empty if Regauge did not write it."""
    if not comment.startswith(COMMENT_PREFIX):
        return {}
    return dict(parse_qsl(comment.removeprefix(COMMENT_PREFIX)))


def parse_records(text: str) -> list[SlurmRecord]:
    """Return the records of `scontrol show --oneliner job`, sorted by their index.

    Slurm has one record for all pending jobs of an array.
    """
    fields = (parse_fields(line) for line in text.splitlines() if "JobId=" in line)
    records = [SlurmRecord(entry) for document in fields for entry in _expand_array(document)]
    return sorted(records, key=lambda record: record.index)


def _expand_array(fields: dict[str, str]) -> list[dict[str, str]]:
    """Return the fields per index for a list of indices, such as `0,2-5%2`."""
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
    """Return the fields of `Key=value Key=value`; a value may contain spaces."""
    parts = _KEY.split(line)[1:]
    return {key: value.strip() for key, value in zip(parts[::2], parts[1::2], strict=True)}


def parse_table(text: str) -> list[SlurmRecord]:
    """Parse the output of `sacct --parsable2 --noheader` with the fields `SACCT_FIELDS`."""
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


def parse_assignments(text: str) -> dict[str, str]:
    """Return the values of `scontrol show config`, which has one `Name = value` per line."""
    pairs = (line.partition("=") for line in text.splitlines() if " = " in line)
    return {name.strip(): value.strip() for name, _, value in pairs}
