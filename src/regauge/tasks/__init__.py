"""What a model is trained for: how rows become batches, a batch a loss, and outputs metrics.

A task is a frozen table of settings; files here import torch inside of their methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from regauge.config import Choice
from regauge.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from torch import Tensor

    from regauge.data.batches import Arrays, Draw, Piece
    from regauge.data.dataset import Manifest, Rows
    from regauge.data.loader import Facts
    from regauge.models.io_spec import Answers, Fields
    from regauge.models.modules import TextModule
    from regauge.models.settings import Model

Sums = dict[str, tuple[Any, Any]]
"""Metric name to (weighted sum, weight); a mean is taken once, over everything."""
ITEMS = "items"
"""Stands beside held-out metrics: how many items, tokens or queries, they are means over."""


class Task(Choice):
    """One objective."""

    coupled: ClassVar[bool] = False
    """Whether the loss needs the outputs of the whole global batch at once."""
    whole: ClassVar[bool] = False
    """Whether metrics need what is kept of all held-out rows at once."""
    layout: ClassVar[str] = "packed"
    """The row layout that the task reads, unless it is set otherwise: a name of `data/layouts`."""
    module_needs_fields: ClassVar[bool] = False
    """Whether its module depends on the fields of the rows."""
    writes: ClassVar[bool] = False
    """Whether its model says each next token, so that it can go on with a text."""

    def check(self, manifest: Manifest) -> None:
        """Raise SettingsError when a dataset cannot be used for the task."""
        if manifest.layout != self.reads():
            raise SettingsError(
                f"task '{self.kind}' reads rows of layout '{self.reads()}', the dataset has"
                f" '{manifest.layout}'",
                f'prepare it with rows.layout = "{self.reads()}"',
            )

    def reads(self) -> str:
        """Return the row layout that the task reads as it is set."""
        return self.layout

    def check_weights(self, folder: Path) -> None:
        """Warn of what the task leaves out of a folder of weights."""

    def check_rows(self, rows: int) -> None:
        """Raise SettingsError when the task cannot use a global batch of so many rows."""

    def ladder(self, manifest: Manifest) -> tuple[int, ...]:
        """Return the lengths that batches are padded to; with the batch's rows, the shapes."""
        return (manifest.fields["tokens"].limit,)

    def real_share(self, manifest: Manifest) -> float:
        """Return the share of real tokens in batches of the declared shapes."""
        return manifest.real_token_share

    def slots_per_row(self) -> int:
        """Return how many places a row has in a global batch: those that pieces are cut into."""
        return 1

    def texts_per_row(self, manifest: Manifest) -> int:
        """Return how many sequences the model computes for one row."""
        del manifest
        return self.slots_per_row()

    def cut(
        self, rows: Rows, numbers: np.ndarray, microbatch_rows: int, ladder: tuple[int, ...]
    ) -> list[Piece]:
        """Cut a global batch of row numbers into microbatches of one size."""
        from regauge.data.batches import whole_rows

        del rows
        return whole_rows(numbers, microbatch_rows, ladder[0])

    def batch(self, rows: Rows, piece: Piece, draw: Draw, facts: Facts) -> Arrays:
        """Build the arrays of one microbatch."""
        raise NotImplementedError

    def module(self, model: Model, manifest: Manifest, seed: int) -> TextModule:
        """Return the module that is trained, in fp32; on the meta device it has no weights."""
        raise NotImplementedError

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of losses and the weight, both scalars."""
        raise NotImplementedError

    def kept(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        """Return what a `whole` task keeps of a batch, [slots, width] fp32."""
        del batch
        return output["vectors"]

    def tally(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Sums:
        """Return the sums of every held-out metric, of a batch or of the whole split.

        A `whole` task is given `vectors`, [slots, width], and `real`, [slots]: what it kept of all
        rows in their order, and which of them are there. The first metric is the loss.
        """
        raise NotImplementedError

    def answers(self) -> Answers:
        """Return what its model says of a record once it is trained."""
        return "vectors"

    def fields(self, manifest: Manifest) -> Fields:
        """Return what its model reads of a record, as it did in a dataset."""
        from regauge.models.io_spec import Fields

        return Fields(limits=(manifest.fields["tokens"].limit,))

    def exchange(
        self, row: dict[str, np.ndarray], prompt_tokens: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return a prompt out of a row and the tokens that follow it there, if there is one.

        `prompt_tokens` is its length where the row does not say; only for a task that writes.
        """
        del row, prompt_tokens
        return None

    def rivals(
        self, output: dict[str, Tensor], batch: dict[str, Tensor], texts: Sequence[dict[str, Any]]
    ) -> dict[str, Sums]:
        """Return the metrics of other ways to answer the held-out rows, by name.

        `texts` are the rows as they were read; none by default.
        """
        del output, batch, texts
        return {}
