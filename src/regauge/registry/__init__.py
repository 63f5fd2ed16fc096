"""The model registry: versions with their lineage, stages, and a log of promotions.

    registry.json                              marks the folder, with its layout version
    models/NAME/versions/N/claim.json          reserves number N for one registration
    models/NAME/versions/N/files/…             the artifact's files, unless referenced
    models/NAME/versions/N/version.json        lineage and hashes; written last
    models/NAME/stages/STAGE.json              the stage pointer: its newest log entry
    models/NAME/log/STAGE/00000001.json, …     all stage entries: who, when, from, to, why

A version exists when its `version.json` exists, and never changes after that. A stage has one
pointer, which is replaced atomically. The pointer is the newest log entry: if a command is killed
before it has written the log, the entry stays in the pointer, and the next command writes it.

A registry is a folder or an S3 prefix. This package does not import torch.
"""
