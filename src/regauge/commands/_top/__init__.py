"""The terminal view for `regauge top`: reads a run, job or server, and draws it twice a second.

`open_reader` returns a target's reader. A reader returns a `Snapshot` per call, which `render`
turns into a screen. Nothing here writes to a run or imports torch.
"""
