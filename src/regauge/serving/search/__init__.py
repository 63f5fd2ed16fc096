"""The search page of the server: the nearest of the vectors that `predict` wrote.

`search_index` finds rows, and `search_rows` reads their vectors and fields. `search_service`
connects them with the model that embeds queries.
"""
