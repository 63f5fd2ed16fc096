"""Token vectors of a text: an encoder's outputs before pooling.

A compiled program returns only pooled vectors. So the artifact's program is rebuilt, and runs in
fp32 without compilation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from regauge.models.inference_modules import TextProgram, cast_program
from regauge.models.modules import Encoder
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    import numpy as np

    from regauge.inference.export.artifact import Artifact


@dataclass(frozen=True)
class TokenEncoder:
    """An uncompiled program that returns vectors."""

    program: TextProgram

    @classmethod
    def load(cls, artifact: Artifact) -> TokenEncoder:
        """Build an artifact's encoder on the CPU.

        Raises SettingsError if the model does not encode single texts.
        """
        program = artifact.restore_program()
        if not isinstance(program, TextProgram) or not isinstance(program.module, Encoder):
            problem = f"{artifact.origin} does not have an encoder for token vectors"
            raise SettingsError(problem, "use the model of an encoder")
        cast_program(program, torch.float32)
        return cls(program)

    def compute(self, ids: np.ndarray) -> np.ndarray:
        """Return a text's token vectors, [tokens, width] fp32; `ids` is [tokens]."""
        tokens = torch.tensor(ids, dtype=torch.int32)[None]
        lengths = torch.tensor([len(ids)], dtype=torch.int32)
        with torch.inference_mode():
            vectors: np.ndarray = self.program.token_vectors(tokens, lengths)[0].numpy()
        return vectors
