"""Checkpoints that do not depend on the device or the world size, and are committed atomically.

Entry points: `saver.Saver` (saves while training continues, finds the newest checkpoint),
`loading.load_checkpoint`, `export_weights` and `import_weights`.

| file | content |
| --- | --- |
| `layout` | folders, manifest, commit, retention and verification; no torch |
| `tensors` | safetensors files through torch's distributed checkpoint |
| `saver`, `loading` | saving in the background, and choosing the newest whole checkpoint |
| `remote` | the same checkpoints in an object store |
| `export_weights`, `import_weights` | weights to and from other formats |
| `unpickle` | worker process that reads third-party pickles |

The package may import `models`, `config`, `files`, `object_store` and files below them.
"""
