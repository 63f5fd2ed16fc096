"""A run on several machines: where they meet, what they tell each other, who decides."""
