"""The model registry: versions with their lineage, stages, and a log of promotions.

    registry.json                              marks the folder, with the version of this layout
    models/NAME/versions/N/claim.json          reserves the number N for one registration
    models/NAME/versions/N/files/…             the files of the artifact, unless it is referenced
    models/NAME/versions/N/version.json        lineage and hashes; it is written last
    models/NAME/stages/STAGE.json              the pointer of a stage: its newest log entry
    models/NAME/log/STAGE/00000001.json, …     all entries of the stage: who, when, from, to, why

A version exists when its `version.json` exists. It never changes after that. A stage has one
pointer, which is replaced in one step. The pointer is the newest entry of the log: a command that
is killed before it has written the log leaves the entry in the pointer, and the next one writes it.

A registry is a folder or a prefix of an S3 store. This package imports no torch.
"""
