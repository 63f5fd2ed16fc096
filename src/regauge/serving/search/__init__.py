"""The server's search page: nearest neighbors among vectors written by `predict`.

`search_index` finds rows, and `search_rows` reads their vectors and fields. `search_service`
connects them with the model that embeds queries.
"""
