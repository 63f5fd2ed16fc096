"""Text generation of the server: engines, the loop of a worker process, and its asyncio client.

A worker process runs `text_worker` with the engine that `engine_choice` selects. The main process
talks to it through `text_client`. `text_version` turns texts and conversations into tokens, and
tokens into texts.
"""
