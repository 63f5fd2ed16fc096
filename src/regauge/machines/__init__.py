"""The catalog: chips, machine types and dated prices, and how to update them."""
