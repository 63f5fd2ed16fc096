"""Text generation of the server: engines, the loop of a worker process, and its asyncio client.

A worker process runs `worker` with the engine that `engines` selects. The main process talks to it
through `client`, and `text_model` turns texts and conversations into tokens and back.
"""
