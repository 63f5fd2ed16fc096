"""The server's text generation: engines, the worker process loop, and the asyncio client.

A worker process runs `text_worker` with the engine selected by `engine_choice`. The main process
talks to it through `text_client`. `text_version` turns texts and conversations into tokens, and
tokens into texts.
"""
