"""The catalog: chips, machine types and dated prices, and how they are updated."""
