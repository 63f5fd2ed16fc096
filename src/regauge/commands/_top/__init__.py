"""The terminal view of `regauge top`: reads a run, a job or a server, and draws it twice a second.

`open_reader` returns the reader of a target. A reader returns a `Snapshot` for each call, which
`render` turns into a screen. Nothing here writes to a run, and nothing imports torch.
"""
