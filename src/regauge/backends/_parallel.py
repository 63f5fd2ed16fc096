"""A program over several devices of this machine: a process for each, of which this is the first.

The others are told the program without its weights. These come from here, one at a time and cut
to the share of each part: a payload is read and verified by one process, and a program that is
tried during an export lies in no file.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from regauge.backends import _group, _shares
from regauge.backends._group import Group, LostError
from regauge.backends._parts import GRACE_SECONDS, START_SECONDS, Follower, Part, started
from regauge.errors import RegaugeError
from regauge.log import logger
from regauge.units import MIB

if TYPE_CHECKING:
    from torch import Tensor, nn

    from regauge.backends import Payload, Site
    from regauge.backends._parts import Sharing


class Parallel:
    """A runner whose program is computed by this process and others.

    Where one of them is lost all are ended, and the next call starts others.
    """

    def __init__(self, payload: Payload, site: Site, sharing: Sharing) -> None:
        """Start the others; raises SettingsError where so many cannot share the program."""
        self._told = payload, site, sharing
        self._one_at_a_time = threading.Lock()
        self.crew: _Crew | None = None
        self._begun()

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return what the program does."""
        with self._one_at_a_time, torch.no_grad():
            output: Tensor = self._guarded(self.crew or self._begun(), inputs)
            return output

    def graphs(self) -> int:
        """Return that no graph is ever made."""
        return 0

    def close(self) -> None:
        """End the other processes, which happens by itself where nobody has the runner any more."""
        if self.crew is not None:
            self._end()
            self.crew = None

    def _begun(self) -> _Crew:
        crew = self.crew = _Crew(*self._told)
        self._end = weakref.finalize(self, crew.end)  # also when the interpreter ends
        self._guarded(crew)
        return crew

    def _guarded(self, crew: _Crew, inputs: tuple[Tensor, ...] | None = None) -> Any:
        """Let the parts begin, or compute; whatever goes wrong, none is left waiting."""
        try:
            return crew.begin() if inputs is None else crew.compute(inputs)
        except LostError as lost:
            error = crew.blamed(lost)
            self.close()
            raise error from None
        except BaseException:
            self.close()
            raise


class _Crew:
    """The parts of one program, from their start to their end."""

    def __init__(self, payload: Payload, site: Site, sharing: Sharing) -> None:
        self._payload = payload
        self._site = site
        self._sharing = sharing
        self._group = Group(0, sharing.parts, sharing.seconds)
        self._program: Any = None
        self.followers: list[Follower] = []
        self.held: list[int] = []
        """Bytes of weights and buffers on the device of each part."""

    def begin(self) -> None:
        """Start the other processes, and give each part its weights."""
        accelerator, sharing = self._site.accelerator, self._sharing
        whole = self._payload.program().eval()
        self._program = self._share(whole, self._group)
        accelerator.use(self._payload.precision)
        store, port = _group.opened(START_SECONDS)
        self.followers += [started(number, sharing) for number in range(1, sharing.parts)]
        for number, each in enumerate(self.followers, start=1):
            each.hear()
            each.say(self._part(number, _shares.bare(whole), port))
        for each in self.followers:
            each.hear()
        self._group.join(accelerator.collectives(), store)
        self._give(whole)
        self.held = [_shares.size(self._program), *(each.hear() for each in self.followers)]
        shown = " + ".join(f"{size / MIB:.1f}" for size in self.held)
        told = sharing.parts, shown, _shares.size(whole) / MIB
        logger.info("%d parts hold %s of %.1f MiB", *told)

    def compute(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Return what the program does, computed by all parts."""
        device = self._site.device
        for each in self.followers:
            each.say([(value.shape, value.dtype) for value in inputs])
        placed = [value.to(device).contiguous() for value in inputs]
        for value in placed:
            self._group.tell(value)
        output: Tensor = self._program(*placed)
        self._site.accelerator.end_microbatch()
        self._group.settle(device, self._ended)
        return output

    def blamed(self, lost: LostError) -> Exception:
        """Return what is to be said of a part that was lost: it ended, failed, or is silent."""
        until = time.monotonic() + GRACE_SECONDS
        for each in self.followers:
            try:
                each.hear(until - time.monotonic(), self._sharing.seconds)
            except (RegaugeError, RuntimeError) as error:
                return error
        return lost

    def end(self) -> None:
        """End the other processes, and leave their group."""
        followers, self.followers = self.followers, []
        for each in followers:
            each.end()
        self._group.leave()

    def _part(self, number: int, program: nn.Module, port: int) -> Part:
        site = self._site
        return Part(
            number=number,
            sharing=self._sharing,
            program=program,
            accelerator=site.accelerator,
            precision=self._payload.precision,
            index=(site.device.index or 0) + number,
            threads=site.threads,
            port=port,
        )

    def _share(self, whole: nn.Module, group: Group) -> nn.Module:
        """Return what a part computes, without weights."""
        return _shares.shared(_shares.bare(whole), group, self._sharing.share)

    @torch.no_grad()
    def _give(self, whole: nn.Module) -> None:
        """Send every part its shares, and put those of this one in their places."""
        names = _shares.places(self._program)
        parts = self._sharing.parts
        others = (self._share(whole, Group(number, parts, 0)) for number in range(1, parts))
        forms = [_shares.forms(each) for each in (self._program, *others)]
        for name, value in _shares.stored(whole).items():
            for number, shapes in enumerate(forms):
                if name in shapes:
                    share = _shares.cut(value, shapes[name], number)
                    # A copy of its own: a view would keep the file of all weights mapped.
                    own = share.clone(memory_format=torch.contiguous_format)
                    placed = own.to(self._site.device)
                    if number:
                        self._group.send(placed, number)
                    else:
                        _shares.place(self._program, names[name], placed)

    def _ended(self) -> bool:
        return any(each.process.poll() is not None for each in self.followers)
